"""One copy by an engine, as the stager does it: reserve, copy, fsync. For bench/copy.

copy_once.py chunks|rsync digest|nodigest SOURCE PART-DIRECTORY
"""

import os
import threading
from pathlib import Path

from forestage import bring, copy, image
from forestage.config import Config
from forestage.image import Access, Image, Look
from forestage.job import User
from forestage.part import Part


def copy_once(config: Config, path: str, directory: Path) -> None:
    """Leaves the file at `path` as a durable part in `directory`, which must not exist yet."""
    fd = os.open(path, os.O_RDONLY)
    wanted = Image(image.identify(fd, path), Access(0, 0, 0o600))
    looked = Look(wanted, User("root", 0, 0), fd)
    source = bring.open_source(looked, config)
    part = Part(directory)
    part.directory.mkdir()
    chosen = copy.engine(config)
    chosen.reserve(source, part)
    chosen.copy(source, part, threading.Event())
    with part.image.open("rb") as file:
        os.fsync(file.fileno())
