"""`python -m pidurable.cli`: the same as `pidurable`."""

from __future__ import annotations

import sys

from pidurable.cli import main

if __name__ == "__main__":
    sys.exit(main())
