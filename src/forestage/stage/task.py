"""What a stager is to do."""

from typing import Protocol

import msgspec

from forestage.cache.image import Image
from forestage.cache.node import Node
from forestage.cache.part import Part
from forestage.slurm.job import Job
from forestage.stage.source import OpenImage, Source


class Tree(Protocol):
    """A directory that is copied as one image (data/tree.py)."""

    def open(self) -> Source:
        """Returns it as the engines read it, once a further change would show. Raises Declined."""

    def must_be_unchanged(self) -> None:
        """Raises Declined unless all of it is as it was."""


class Task(msgspec.Struct, frozen=True):
    """What to copy, where to, and for which job first; of a directory `tree` is its source."""

    node: Node
    job: Job
    opened: OpenImage
    tree: Tree | None = None

    def received(self) -> "Task":
        """Returns the same with the source as a descriptor of this process."""
        return Task(self.node, self.job, self.opened.received())

    @property
    def image(self) -> Image:
        return self.opened.image

    @property
    def key(self) -> str:
        return self.opened.image.key

    @property
    def part(self) -> Part:
        return self.node.cache.part(self.key)
