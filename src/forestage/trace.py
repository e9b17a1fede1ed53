"""Named points in the program at which tests inject faults. In production nobody listens."""

from collections.abc import Callable

listener: Callable[[str], None] | None = None


def reach_point(name: str) -> None:
    """Says that the program is here."""
    if listener is not None:
        listener(name)
