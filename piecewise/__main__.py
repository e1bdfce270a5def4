"""`python -m piecewise` is the `piecewise` command."""

import sys

from piecewise.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
