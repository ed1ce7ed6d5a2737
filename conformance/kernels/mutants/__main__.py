"""`python -m conformance.kernels.mutants [--backend NAME ...]`, which is `nox -s mutants -- ...`."""

from __future__ import annotations

import sys

from conformance.kernels.mutants.options import parsed


def main(given: list[str]) -> int:
    """Returns 0; 1 if a mutant survived without a reason, or one of a user's backend that is not equivalent; 2 for a
    meaningless call; 130 for Ctrl-C."""
    options = parsed(given)
    # Torch and the machine take seconds to import; a misspelt option should fail at once.
    from conformance.kernels.mutants.command import perform

    return perform(options, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
