"""The `penteract` command as a process; also `python -m penteract`, which launchers run."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from penteract.cli import main


def run() -> NoReturn:
    """Run one command and end the process with its exit code."""
    code = main()
    dist = sys.modules.get("torch.distributed")
    if code and dist is not None and dist.is_initialized():
        # After a fault peers may be gone, and the group's threads would abort a normal exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


if __name__ == "__main__":
    run()
