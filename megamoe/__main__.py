"""`python -m megamoe`: the same as the `megamoe` command."""

import sys

from megamoe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
