"""What is not the core: a folder for each feature, which could be deleted.

The table says what the core must know of a feature before it imports any of it. It has literals
alone and imports nothing, since each hook reads it, also one that then has nothing to do.
"""


class Feature:
    """A row of the table."""

    __slots__ = ("doors", "marks", "name", "needs", "options", "words")

    def __init__(
        self,
        name: str,
        *,
        doors: tuple[str, ...] = (),
        needs: tuple[str, ...] = (),
        marks: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        words: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.doors = doors
        """The files of its folder that the core calls, each where doors.py says."""
        self.needs = needs
        """The features that it imports."""
        self.marks = marks
        """Files below /run/forestage: the job's Epilog has work for it while one is there."""
        self.options = options
        """The words that a job's comment and options of srun may have for it."""
        self.words = words
        """The words that only a job's comment may have for it."""


FEATURES = (
    Feature(
        "registry",
        doors=("epilog", "reasons"),
        marks=("images/{job}.asked",),
    ),
    # What every job with an image needs: no folder. In the Prolog and in a step the features above
    # this row do their work before the core takes the job's lease, those below it after that.
    Feature(
        "core",
        marks=("leases/{job}.json", "leases/{job}.prolog"),
        options=("stage", "stage-tell", "stage-wait"),
    ),
    Feature(
        "data",
        doors=("epilog", "reasons"),
        needs=("peers",),
        marks=("leases/{job}.hinted",),
        options=("stage-dir",),
        words=("stage-list",),
    ),
    Feature(
        "peers",
        doors=(),
    ),
    Feature(
        "prefetch",
        doors=(),
        needs=("peers", "prepare"),
    ),
    Feature(
        "prepare",
        doors=(),
        needs=("data", "registry"),
    ),
    Feature(
        "report",
        doors=(),
    ),
    Feature(
        "metrics",
        doors=(),
        needs=("peers",),
    ),
)
