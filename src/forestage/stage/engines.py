"""Engines that bring a source into a part: chunks (default) or rsync, behind one interface."""

import os
import threading
from collections.abc import Mapping
from typing import NamedTuple, Protocol, TypeAlias

from forestage.cache import allocation
from forestage.cache.arrival_map import ArrivalMap
from forestage.cache.part import Part
from forestage.config import Config
from forestage.errors import CopyStopped, Failed
from forestage.sources.source import ReadableSource, SourceUnreadable
from forestage.stage import chunks, source_reader
from forestage.stage.chunks import CopyTuning
from forestage.system import run


class EngineResult(NamedTuple):
    """What came of a copy: bytes by the node that gave them, and the source's bytes per second.

    `other_nodes` are those of them that are not of the job. `bytes_per_second` is 0 where that is
    not known.
    """

    bytes_by_node: Mapping[str, int] = {}
    other_nodes: tuple[str, ...] = ()
    bytes_per_second: float = 0.0


class CopyHelpers(Protocol):
    """Those that help an engine with one copy, and make it in its place (features' engine.py)."""

    def copy(
        self,
        source: ReadableSource,
        part: Part,
        tuning: CopyTuning,
        stop: threading.Event,
        readers: ArrivalMap | None,
    ) -> EngineResult: ...


class ChunkEngine:
    """Several threads, large chunks. Like RsyncEngine it goes on from wherever the part is."""

    def __init__(self, tuning: CopyTuning) -> None:
        self.tuning = tuning

    def needed_bytes(self, source: ReadableSource) -> int:
        """The bytes of disk that image and map will take in all."""
        found = source_reader.map_chunks(source, self.tuning.chunk)
        return allocation.needed_bytes(source.size, self.tuning.chunk, found.to_reserve)

    def reserve(self, source: ReadableSource, part: Part) -> None:
        """Takes all the space that is still needed. Raises OSError (ENOSPC)."""
        found = source_reader.map_chunks(source, self.tuning.chunk)
        allocation.reserve_part(part, source.size, self.tuning.chunk, found.to_reserve)

    def copy(
        self,
        source: ReadableSource,
        part: Part,
        stop: threading.Event,
        helpers: CopyHelpers | None = None,
        readers: ArrivalMap | None = None,
    ) -> EngineResult:
        """Leaves exactly the source's bytes in the part, and its map complete.

        `readers` learn which pieces are in. Raises CopyStopped, SourceTruncated, Failed, OSError;
        what is in can be resumed.
        """
        if helpers is not None:
            return helpers.copy(source, part, self.tuning, stop, readers)
        pace = chunks.copy_chunks(source, part, self.tuning, stop, readers)
        return EngineResult(bytes_per_second=pace.bytes_per_second(source.size))


class RsyncEngine:
    """The conservative choice: rsync, one stream, and neither helpers nor readers.

    It opens the source again through our descriptor, as root; where root is squashed on the shared
    file system it says so and the job goes on with its original path.
    """

    def __init__(self, tuning: CopyTuning) -> None:
        self.tuning = tuning

    def needed_bytes(self, source: ReadableSource) -> int:
        return source.size + allocation.map_bytes(source.size, self.tuning.chunk)

    def reserve(self, source: ReadableSource, part: Part) -> None:
        # The size stays as far as rsync has come: that is its progress, and where it resumes.
        with allocation.open_part_file(part.image) as fd:
            allocation.allocate_space(fd, 0, source.size)
        allocation.reserve_small_files(part, source.size, self.tuning.chunk)

    def copy(
        self,
        source: ReadableSource,
        part: Part,
        stop: threading.Event,
        helpers: CopyHelpers | None = None,
        readers: ArrivalMap | None = None,
    ) -> EngineResult:
        try:  # where root may not open the source, that is no fault of rsync's
            os.close(os.open(f"/proc/self/fd/{source.buffered}", os.O_RDONLY))
        except OSError as error:
            raise SourceUnreadable(source.path, error) from None
        begun = part.image.stat().st_size > 0
        argv = [
            "rsync",
            "--copy-links",  # /proc/self/fd/N is a link
            "--inplace",  # keeps the space that was reserved
            "--partial",
            # What a killed rsync left is the head of the same file, checked against the source.
            *(["--append-verify"] if begun else ["--whole-file", "--ignore-times"]),
            f"--bwlimit={-(-(self.tuning.bandwidth or 0) // 1024)}",  # KiB/s, 0 is no limit
            f"/proc/self/fd/{source.buffered}",
            os.fspath(part.image),
        ]
        ran = run.run_program(argv, pass_fds=[source.buffered], stop=stop)
        if stop.is_set():
            raise CopyStopped
        if ran.code != 0:
            raise Failed("copy", ran.format_ending())
        # rsync keeps its own sums to itself, so the digests are taken from the copy.
        found = chunks.compute_digests(part.image, source.size, self.tuning, path=source.path)
        with allocation.open_part_file(part.map) as fd:  # not truncated: its space stays its own
            os.pwrite(fd, found, 0)
        return EngineResult()


Engine: TypeAlias = ChunkEngine | RsyncEngine


def choose_engine(config: Config, size: int) -> Engine:
    """Return the engine that the admin chose, for an image of `size` bytes."""
    if config.engine == "chunks":
        return ChunkEngine(derive_tuning(config, size))
    return RsyncEngine(derive_tuning(config, size))


def derive_tuning(config: Config, size: int) -> CopyTuning:
    """Pure but for the number of cores: what the configuration means for an engine."""
    cores = os.cpu_count() or 1
    return CopyTuning(
        threads=config.threads or min(8, max(4, 2 * cores)),
        chunk=config.chunk_bytes_for(size),
        bandwidth=config.bandwidth,
        through=config.cold_start_mode == "through",
    )
