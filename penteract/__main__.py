"""`python -m penteract`: what `--nproc` and launchers run."""

from penteract.cli import main

raise SystemExit(main())
