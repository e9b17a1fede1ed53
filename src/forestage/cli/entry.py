"""The console script `forestage`: what the companion runs must start as quickly as a hook does."""

import os
import sys


def main() -> None:
    """The console script: `step` and `hints` for the SPANK companion, all else for people."""
    if sys.argv[1:2] == ["step"]:
        from forestage.hooks import boundary

        boundary.main("step")
    if sys.argv[1:3] == ["hints", "--"]:
        from forestage.hooks import boundary

        boundary.import_msgspec()
        from forestage.admin import hints

        os._exit(hints.main(sys.argv[3:]))
    from forestage.cli import main as cli

    cli.main()
