"""The node that a hook, a stager or a command works on, under one configuration."""

import os

import msgspec

from forestage.cache.layout import Cache
from forestage.cache.lease import LeaseDirectory
from forestage.clock import Clock
from forestage.config import Config
from forestage.paths import NodePaths


def configured_root(config: Config, places: NodePaths) -> str:
    """Return the cache's root with the links that lead there. Pure.

    Users may write to a directory above it: who resolves the root may hang, as with its disk.
    """
    return os.fspath(places.root / config.cache.lstrip("/"))


class Node(msgspec.Struct, frozen=True):
    """The node's cache, leases and places."""

    config: Config
    places: NodePaths
    cache: Cache
    leases: LeaseDirectory
    clock: Clock

    @classmethod
    def from_config(cls, config: Config, places: NodePaths, clock: Clock) -> "Node":
        # The kernel's mount table knows the cache by its real path only.
        root = places.root / os.path.realpath(config.cache).lstrip("/")
        cache = Cache(root, places.claims, places.known_disks)
        return cls(config, places, cache, LeaseDirectory(places.leases), clock)

    def with_config(self, **keys: object) -> "Node":
        """Returns the node with other values of these keys."""
        return msgspec.structs.replace(self, config=msgspec.structs.replace(self.config, **keys))
