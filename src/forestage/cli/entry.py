"""The console script `forestage`: a step's helper must start as quickly as a hook does."""

import sys


def main() -> None:
    """The console script: `forestage step` for the SPANK companion, all else for people."""
    if sys.argv[1:2] == ["step"]:
        from forestage.hooks import boundary

        boundary.main("step")
    from forestage.cli import main as cli

    cli.main()
