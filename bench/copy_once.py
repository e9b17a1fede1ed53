"""One copy by an engine, as the stager does it: reserve, copy, fsync. For bench/copy."""

import os
import threading
from pathlib import Path

from forestage.cache import source_image
from forestage.cache.part import Part
from forestage.cache.source_image import AccessRights, SourceImage
from forestage.config import Config
from forestage.sources import source
from forestage.sources.source import OpenImage
from forestage.stage import engines
from forestage.system.as_user import User


def copy_once(config: Config, path: str, directory: Path) -> None:
    """Leaves the file at `path` as a durable part in `directory`, which must not exist yet."""
    fd = os.open(path, os.O_RDONLY)
    wanted = SourceImage(source_image.read_identity(fd, path), AccessRights(0, 0, 0o600))
    opened = OpenImage(wanted, User("root", 0, 0), fd)
    reading = source.open_source(opened)
    part = Part(directory)
    part.directory.mkdir()
    chosen = engines.choose_engine(config, wanted.size)
    chosen.reserve(reading, part)
    chosen.copy(reading, part, threading.Event())
    with part.image.open("rb") as file:
        os.fsync(file.fileno())
