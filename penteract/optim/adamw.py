"""AdamW on the flat masters: torch's fused kernel, one call per buffer. arXiv:1711.05101."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penteract.config import OptimConfig
from penteract.parallel.buffers import Buffers, Slot

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """Updates a model's masters from its gradients, decaying only where the placement says so."""

    def __init__(self, buffers: Buffers, optim: OptimConfig) -> None:
        self.buffers = buffers
        self.flats = []
        groups = []
        for buffer in buffers.buffers:
            flat = torch.nn.Parameter(buffer.master)
            flat.grad = buffer.gradient
            self.flats.append(flat)
            decay = optim.weight_decay if buffer.decay else 0.0
            groups.append({"params": [flat], "weight_decay": decay})
        self.torch = torch.optim.AdamW(
            groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
        )
        for flat in self.flats:  # as torch would at the first step; here so that they can be loaded
            moments = {name: torch.zeros_like(flat) for name in MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=flat.device)
            self.torch.state[flat] = {"step": step, **moments}

    def step(self, lr: float, coefficient: Tensor, skip: Tensor) -> None:
        """One update with gradients times `coefficient`; none where `skip` is 1 (both scalars).

        Neither scalar is read on the host.
        """
        for group in self.torch.param_groups:
            group["lr"] = lr
        # The fused kernel divides gradients by grad_scale and does nothing where found_inf is set.
        # The scale is a float32 number, which would cost a float64 run half of its digits.
        scale = coefficient.reciprocal()
        if any(buffer.gradient.dtype == torch.float64 for buffer in self.buffers.buffers):
            scale = torch.ones_like(coefficient)
            for buffer in self.buffers.buffers:
                buffer.gradient.mul_(coefficient)
        self.torch.grad_scale = scale.float()  # type: ignore[attr-defined]
        self.torch.found_inf = skip.float()  # type: ignore[attr-defined]
        self.torch.step()
        self.buffers.publish()

    @property
    def updates(self) -> int:
        """Updates done, as Adam counts them for its bias correction."""
        return int(self.torch.state[self.flats[0]]["step"].item()) if self.flats else 0

    @updates.setter
    def updates(self, n: int) -> None:
        for flat in self.flats:
            self.torch.state[flat]["step"].fill_(n)

    def state(self) -> Iterator[tuple[str, Slot, Tensor]]:
        """(moment name, slot, that slot's moment as a view of the parameter's shape)."""
        for buffer, flat in zip(self.buffers.buffers, self.flats, strict=True):
            for slot in buffer.slots:
                for name in MOMENTS:
                    shape, numel = slot.master.shape, slot.master.numel()
                    moment = self.torch.state[flat][name][slot.start : slot.start + numel]
                    yield name, slot, moment.view(shape)
