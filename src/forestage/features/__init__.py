"""What is not the core: a folder for each feature, which could be deleted.

The table says what the core must know of a feature before it imports any of it. It has literals
alone and imports nothing, since each hook reads it, also one that then has nothing to do.
"""


class Feature:
    """A row of the table."""

    __slots__ = ("doors", "name", "needs")

    def __init__(
        self, name: str, *, doors: tuple[str, ...] = (), needs: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.doors = doors
        """The files of its folder that the core calls, each where doors.py says."""
        self.needs = needs
        """The features that it imports."""


FEATURES = (
    Feature("registry", doors=("epilog", "reasons")),
    Feature("data", doors=("epilog", "reasons"), needs=("peers",)),
    Feature("peers"),
    Feature("prefetch", needs=("peers", "prepare")),
    Feature("prepare", needs=("data", "peers", "prefetch", "registry")),
    Feature("report"),
    Feature("metrics", needs=("peers",)),
)
