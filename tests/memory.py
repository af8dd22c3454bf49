"""How much memory this process takes while something runs."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def peak_while(act: Callable[[], object]) -> int:
    """By how much the process's own memory rises, at most, while `act` runs.

    What was freed before is given back first: used again it would not show as growth.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    stop, peak, before = threading.Event(), [0], anonymous_bytes()

    def watch() -> None:
        while not stop.wait(0.0005):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    stop.set()
    watcher.join()
    return peak[0] - before
