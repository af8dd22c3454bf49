"""Stands for DeepEP's Buffer: the calls and results that its documentation shows, over our axis."""

from typing import Any

import torch
from torch import Tensor

from penteract.collectives import start_all_to_all
from penteract.mesh import Axis


class DeepEP:
    """Experts are numbered rank by rank. A handle is what went where."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        n = num_experts // self.axis.size
        flags = [
            ((topk_idx >= r * n) & (topk_idx < (r + 1) * n)).any(1) for r in range(self.axis.size)
        ]
        there = torch.stack(flags, 1)  # [t, ranks]
        each = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return there.sum(0), None, each, there, "event"

    def dispatch(self, x: Tensor, **how: Any) -> tuple[Any, ...]:
        handle = how.get("handle")
        if handle is not None:  # the same ways once more
            assert set(how) == {"handle"}
            to, token, sent, came = handle[:4]
            return self._send(x[token], sent, came), None, None, None, handle, "event"
        there, numbers = how["is_token_in_rank"], how["topk_idx"]
        to, token = there.t().nonzero(as_tuple=True)
        sent = how["num_tokens_per_rank"].tolist()
        assert torch.equal(torch.bincount(to, minlength=self.axis.size), torch.tensor(sent))
        came = start_all_to_all(torch.tensor(sent), self.axis).wait().tolist()
        n = len(how["num_tokens_per_expert"]) // self.axis.size
        local = numbers[token] - to[:, None] * n
        local = torch.where((local >= 0) & (local < n) & (numbers[token] >= 0), local, -1)
        rows = self._send(x[token], sent, came)
        local = self._send(local, sent, came)
        # It sends no weight to a rank for an expert elsewhere.
        weights = self._send(how["topk_weights"][token], sent, came).masked_fill(local < 0, 0)
        counts = torch.bincount(local[local >= 0], minlength=n).tolist()
        handle = (to, token, sent, came, len(x), local)
        return rows, local, weights, counts, handle, "event"

    def combine(self, x: Tensor, handle: Any, **how: Any) -> tuple[Any, ...]:
        _, token, sent, came, length, local = handle
        out = x.new_zeros(length, x.shape[1])
        out.index_add_(0, token, self._send(x, came, sent))
        weights = how.get("topk_weights")
        if weights is not None:
            back = self._send(weights.masked_fill(local < 0, 0), came, sent)
            weights = back.new_zeros(length, back.shape[1]).index_add_(0, token, back)
        return out, weights, "event"

    def _send(self, x: Tensor, sent: list[int], came: list[int]) -> Tensor:
        return start_all_to_all(x, self.axis, sent, came).wait()
