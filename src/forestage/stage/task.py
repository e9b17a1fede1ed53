"""What a stager is to do."""

import msgspec

from forestage.cache.node import Node
from forestage.cache.part import Part
from forestage.cache.source_image import SourceImage
from forestage.slurm.job import Job
from forestage.sources.file import FileSource
from forestage.sources.source import OpenImage, Source


class CopyTask(msgspec.Struct, frozen=True):
    """What to copy, where to, and for which job first."""

    node: Node
    job: Job
    opened: OpenImage

    def with_descriptor(self) -> "CopyTask":
        """Returns the same with the source as a descriptor of this process."""
        return CopyTask(self.node, self.job, self.opened.with_descriptor())

    @property
    def source(self) -> Source:
        return self.opened.other_source or FileSource(self.node, self.job.user, self.opened)

    @property
    def image(self) -> SourceImage:
        return self.opened.image

    @property
    def key(self) -> str:
        return self.opened.image.key

    @property
    def chunk(self) -> int:
        """Return the bytes of one chunk of the image."""
        return self.node.config.chunk_bytes_for(self.image.size)

    @property
    def part(self) -> Part:
        return self.node.cache.part(self.key)
