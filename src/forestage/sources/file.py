"""A file as a source of a copy: an image, or a squashfs file to be mounted."""

import contextlib
from collections.abc import Iterator
from typing import ClassVar, Literal

import msgspec

from forestage.bind import origins
from forestage.cache import source_image
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.sources import opening, source
from forestage.sources.source import OpenImage, ReadableSource
from forestage.system.as_user import User


class FileSourceFinder(msgspec.Struct, frozen=True):
    """Finds the file that a request names; its entry is an image, or data, with its own share."""

    kind: Literal["image", "data"]

    def path(self, job: Job, request: Request) -> str:
        return source_image.resolve_requested_path(request, job.work_dir)

    @contextlib.contextmanager
    def open(self, node: Node, job: Job, path: str, end: Deadline) -> Iterator[OpenImage]:
        with opening.open_image_for_hook(job.user, path, node, end) as opened:
            found = msgspec.structs.replace(opened.image, kind=self.kind)
            yield msgspec.structs.replace(opened, image=found)


class FileSource(msgspec.Struct, frozen=True):
    """A regular file that `user` has opened."""

    is_read_through: ClassVar[bool] = True

    node: Node
    user: User
    opened: OpenImage

    def open(self) -> ReadableSource:
        """Opens it once a further change would show in its times, and no write is under way.

        In this order: a write that began before the times were known may be in none of them.
        """
        clock = self.node.clock
        clock.sleep(source.seconds_to_settle(self.opened.image, clock.wall()))
        content = source.open_source(self.opened)
        self._check_no_writer()
        return content

    def check_unchanged(self) -> None:
        """Raises Declined unless the open file and what the path leads to now are as before.

        And where somebody has begun to write: their next bytes need no other times.
        """
        self._check_no_writer()
        wanted, config = self.opened.image, self.node.config
        known = (wanted.identity, wanted.access)
        source.check_same_file(self.opened)
        try:
            found, line = opening.open_as_user(
                wanted.path,
                self.user,
                config.staged_from,
                origins.read_known_caches(self.node.cache),
                source.STAGER_TIMEOUT,
                services=config.user_mounts,
            )
        except OSError:
            raise source.declined_as_changed(wanted.path) from None
        line.close()
        if found.image is None or (found.image.identity, found.image.access) != known:
            why = found.image and source.explain_difference(wanted.identity, found.image.identity)
            raise source.declined_as_changed(wanted.path, why or "")

    def _check_no_writer(self) -> None:
        fd, path = self.opened.fd, self.opened.image.path
        source.check_no_writer(fd, path)
        source.check_no_writer_below(fd, path)
