"""One step without memory, data or other processes: shapes and messages of any rank of any world.

Tensors are fake (shapes only) and so is the process group, so a layout for thousands of devices is
tried on a laptop in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from penteract.config import Config
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run


def dry_run(config: Config, grid: Grid, rank: int) -> list[str]:
    """Run one step of `config` as `rank` of `grid`; lines that say what it holds and sends.

    `config` must have its vocabulary. Uses the process's default process group, which must be
    unused.
    """
    if grid.world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world)
    try:
        mesh = create_mesh(grid, rank)
        device = torch.device("cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            task = synthetic_task(config, mesh, device)
            run = Run(task, config, mesh, device, read=_ones)
            run.update()
            task.close()
        parameters = sum(slot.numel for slot in run.buffers.slots())
        stored, gradients, masters = run.buffers.held_bytes()
        moments = sum(moment.nbytes for _, _, moment in run.optimizer.state())
        host = " of the host's memory" if config.optim.offload else ""
        lines = [
            f"rank {rank} of {grid.world}: one step ran on shapes alone",
            f"  parameters held     {parameters:>16,}",
            f"  weights             {stored:>16,} bytes",
            f"  gradients           {gradients:>16,} bytes",
            f"  masters             {masters:>16,} bytes{host}",
            f"  optimizer moments   {moments:>16,} bytes{host}",
        ]
        for axis in mesh.axes.values():
            for call, count in sorted(axis.traffic.calls.items()):
                sent = axis.traffic.bytes[call]
                lines.append(f"  sent over {axis.name:<9} {sent:>16,} bytes in {count} {call}")
        return lines
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _ones(values: Sequence[Tensor]) -> list[float]:
    return [1.0] * len(values)
