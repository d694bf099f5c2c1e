"""Command line: ``python -m moe_numba.simulator run|debug [options] script.py [arguments]``."""

import sys

from moe_numba.simulator.command import main

if __name__ == "__main__":
    sys.exit(main())
