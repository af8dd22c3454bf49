"""Megatron-Core's layer of experts on CPU ranks: its router, its all-to-all dispatcher, its MLPs.

Experts are computed one after another: its grouped product needs CUDA. What of CUDA the layer asks
for besides `megatron_cpu` is a stream, which does nothing here; and gloo wants row counts as ints.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peers.megatron_cpu import on_cpu
from timing.kinds import WAITING
from torch import Tensor, nn
from torch.profiler import record_function


class Sent:
    """What a rank's all-to-alls of tokens have sent to others; counts of rows are left out."""

    bytes = messages = 0


class MegatronMoE:
    """The layer as this rank of `dist`'s ranks, each of which holds as many experts."""

    def __init__(self, router: Tensor, inner: Tensor, down: Tensor, topk: int) -> None:
        """With router [E, h], gate above up [E, 2f, h] and down [E, h, f] of all experts."""
        self.sent = Sent()
        experts, hidden, ffn = down.shape
        ranks, rank = dist.get_world_size(), dist.get_rank()
        with on_cpu(), self._on_cpu():
            from megatron.core import parallel_state
            from megatron.core.tensor_parallel.random import initialize_rng_tracker
            from megatron.core.transformer.moe import moe_utils

            moe_utils.te_general_gemm = None  # not defined without Transformer Engine
            initialize_rng_tracker(inference_rng_tracker=True)
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=ranks, expert_tensor_parallel_size=1
            )
            self.layer = _layer(experts, hidden, ffn, topk, down.dtype)
        n = experts // ranks
        self.held = slice(n * rank, n * (rank + 1))
        self._fill(router, inner[self.held], down[self.held])

    @torch.no_grad()
    def _fill(self, router: Tensor, inner: Tensor, down: Tensor) -> None:
        self.layer.router.weight.copy_(router)
        for expert, into, out in zip(self.layer.experts.local_experts, inner, down, strict=True):
            expert.linear_fc1.weight.copy_(into)
            expert.linear_fc2.weight.copy_(out)

    def forward(self, x: Tensor) -> Tensor:
        """[t, h] → [t, h]."""
        y: Tensor = self.layer(x[:, None])[0][:, 0]
        return y

    def running(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """`call`, forward and backward, where this layer can run."""

        def run() -> Any:
            with self._on_cpu():
                return call()

        return run

    def gradients(self) -> list[Tensor]:
        """Of router, and by expert; see `stacked`."""
        return [p.grad for p in self.layer.parameters() if p.grad is not None]

    def stacked(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Of router, inner and down."""
        router, *experts = gradients
        return [router, torch.stack(experts[::2]), torch.stack(experts[1::2])]

    @contextlib.contextmanager
    def _on_cpu(self) -> Iterator[None]:
        from megatron.core.tensor_parallel import mappings

        stream = mock.MagicMock()
        exchange, gather = dist.all_to_all_single, mappings.dist_all_gather_func

        def all_to_all(
            out: Tensor, x: Tensor, output_split_sizes: Any, input_split_sizes: Any, group: Any
        ) -> None:
            came, going = ([int(n) for n in s] for s in (output_split_sizes, input_split_sizes))
            others = sum(going) - going[dist.get_rank(group)]
            self.sent.bytes += others * x[:1].nbytes
            self.sent.messages += 1
            with record_function(WAITING):
                exchange(out, x, came, going, group=group)

        def all_gather(*args: Any, **kwargs: Any) -> None:
            with record_function(WAITING):
                gather(*args, **kwargs)

        cuda = {
            "current_device": lambda: torch.device("cpu"),
            "current_stream": lambda: stream,
            "Stream": lambda: stream,
            "stream": lambda _: contextlib.nullcontext(),
        }
        with warnings.catch_warnings(), contextlib.ExitStack() as patches:
            warnings.simplefilter("ignore")  # torch's new names of collectives
            patches.enter_context(mock.patch.multiple(torch.cuda, **cuda))
            patches.enter_context(mock.patch.object(dist, "all_to_all_single", all_to_all))
            patches.enter_context(mock.patch.object(mappings, "dist_all_gather_func", all_gather))
            yield


def _layer(experts: int, hidden: int, ffn: int, topk: int, dtype: torch.dtype) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=ffn,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=experts, moe_grouped_gemm=False)
    return build_module(spec, config=config).train()
