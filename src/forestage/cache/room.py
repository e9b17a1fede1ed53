"""Room on the cache's disk for what a job unpacks there: how much that is, and whether it is free.

Where enroot's data lies on that disk, a container takes a few times its image. What to evict for it
is cache/evict's to say.
"""

import os

from forestage.cache.image import Image
from forestage.cache.layout import Cache
from forestage.config import Config


def unpacked(cache: Cache, config: Config, image: Image) -> int:
    """The bytes that a container of this image takes, if it is unpacked on the cache's disk."""
    try:
        packed = os.lstat(cache.image(image.key)).st_blocks * 512  # nothing comes out of a hole
    except OSError:
        packed = image.size
    return config.unpack_ratio * packed


def is_free(cache: Cache, config: Config, need: int) -> bool:
    """Whether `need` bytes are free beside those that stay so. Raises OSError."""
    disk = os.statvfs(cache.root)
    return disk.f_bavail * disk.f_frsize >= min_free(cache, config) + need


def min_free(cache: Cache, config: Config) -> int:
    """The bytes that stay free on the disk. Raises OSError."""
    disk = os.statvfs(cache.root)
    return config.min_free.of(disk.f_blocks * disk.f_frsize)
