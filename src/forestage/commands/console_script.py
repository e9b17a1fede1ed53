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
        from forestage.features.doors import HINTS, load_doors

        for hints in load_doors(HINTS):
            os._exit(hints.main(sys.argv[3:]))
    _end_at_interrupt()
    from forestage.commands import main as cli

    cli.main()


def _end_at_interrupt() -> None:
    """Let ^C end the process without a traceback until `LazyCommandGroup.invoke` can tell of it.

    The imports before that take most of a short command's time. What is ignored stays ignored.
    """
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
