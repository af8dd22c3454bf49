"""An operation that has begun: its result, once it is awaited."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch.distributed as dist
from torch import Tensor

from penteract.mesh import Traffic


class Pending:
    """A collective in flight. `wait()` returns its result, the same one when called again."""

    def __init__(
        self,
        works: Iterable[dist.Work],
        finish: Callable[[], Tensor],
        traffic: Traffic | None = None,
    ) -> None:
        """`traffic` counts how long the works are waited for."""
        self._works, self._traffic = tuple(works), traffic
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._finish is not None:
            if self._works:
                with self._traffic.waiting() if self._traffic else nullcontext():
                    for work in self._works:
                        work.wait()
            # The buffers are freed with the closure.
            self._works, self._result, self._finish = (), self._finish(), None
        assert self._result is not None
        return self._result

    def is_over(self) -> bool:
        """Whether `wait()` would return at once."""
        return all(work.is_completed() for work in self._works)


def done(x: Tensor) -> Pending:
    """What nothing is awaited for."""
    return Pending((), lambda: x)
