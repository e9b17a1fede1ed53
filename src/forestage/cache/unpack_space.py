"""Room on the cache's disk for what a job unpacks there: how much that is, and whether it is free.

Where enroot's data lies on that disk, a container takes a few times its image. What to evict for it
is cache/evict's to say.
"""

import os
from pathlib import Path

from forestage.cache.layout import Cache
from forestage.cache.source_image import SourceImage
from forestage.config import Config
from forestage.slurm import enroot
from forestage.system import as_user
from forestage.system.tree import RootedTree


def estimate_unpacked_bytes(cache: Cache, config: Config, image: SourceImage) -> int:
    """The bytes that a container of this image takes, if it is unpacked on the cache's disk."""
    try:
        packed = (
            os.lstat(cache.image_path(image.key)).st_blocks * 512
        )  # nothing comes out of a hole
    except OSError:
        packed = image.size
    return config.unpack_ratio * packed


def has_free_bytes(cache: Cache, config: Config, need: int) -> bool:
    """Whether `need` bytes are free beside those that stay so. Raises OSError."""
    disk = os.statvfs(cache.root)
    return disk.f_bavail * disk.f_frsize >= read_min_free(cache, config) + need


def is_enroot_on_same_disk(cache: Cache, root: Path, timeout: float) -> bool:
    """Whether enroot unpacks to the cache's disk, or to the same pool (btrfs, ZFS).

    True where its configuration does not tell. In a child, as that place may hang, for `timeout`
    seconds. Raises as_user.ChildTimeout, OSError.
    """
    above = enroot.find_fixed_data_path(enroot.read_enroot_setup(RootedTree(root)).settings)

    def work() -> as_user.ChildResult[bool]:
        place = root / above.lstrip("/")
        while not place.exists() and place != place.parent:
            place = place.parent
        there, here = os.statvfs(place), os.statvfs(cache.root)
        pool = there.f_bavail * there.f_frsize == here.f_bavail * here.f_frsize
        return (pool or place.stat().st_dev == cache.root.stat().st_dev), []

    return as_user.run_in_child(work, bool, timeout)[0] if above else True


def read_min_free(cache: Cache, config: Config) -> int:
    """The bytes that stay free on the disk. Raises OSError."""
    disk = os.statvfs(cache.root)
    return config.min_free.resolve_bytes(disk.f_blocks * disk.f_frsize)
