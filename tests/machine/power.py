"""Power cuts of a machine: at points of forestage's work, and what each has left."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

from compute import Compute
from cut import Left, look
from install import CACHE
from traced import ARMED, STANDING

SITE = "/usr/lib/forestage/lib/python3/site-packages"


@dataclass
class Power:
    """Counts the cuts of a node, and what was wrong after each."""

    node: Compute
    cuts: int = 0
    entries: int = 0
    wrong: list[str] = field(default_factory=list)
    images: dict[str, str] = field(default_factory=dict)
    """Digests of the sources, by path."""
    trees: dict[str, str] = field(default_factory=dict)
    """Digests of entries that are no file's copy, by key; of those that jobs have proven right."""

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._lefts: list[tuple[str, Left]] = []

    def trace(self) -> None:
        """From now on forestage stands still where it is told to."""
        source = Path(__file__).with_name("traced.py")
        self.node.vm.put(f"{SITE}/traced.py", source.read_bytes())
        self.node.vm.put(f"{SITE}/traced.pth", b"import traced; traced.begin()\n")
        self.node.run("sync")  # also after a cut

    def arm(self, point: str, word: str) -> None:
        """The first process that comes by there stands still."""
        self.node.run(f"rm -rf {STANDING}")
        self.node.vm.put(ARMED, f"{point}\n{word}".encode())

    def stands(self) -> None:
        self.node.until(f"test -d {STANDING}")

    def go_on(self) -> None:
        self.node.run(f"rm -f {ARMED}")

    def cut(self, what: str) -> None:
        folder = self.node.vm.folder / f"cut{next(self._numbers)}"
        with self.node.vm.standing_still():
            self.node.vm.copy_disks(folder)
        self._lefts.append((what, look(folder)))
        folder.rmdir()

    def learn(self) -> None:
        """Notes what the entries are that are there now."""
        said = self.node.run(f"cd {CACHE}/entries; sha256sum */image 2>/dev/null || true").out
        for line in said.splitlines():
            digest, path = line.split()
            self.trees[path.split("/")[0]] = digest

    def judge(self) -> list[str]:
        """What was wrong after the cuts since the last time, in words."""
        found = []
        for what, left in self._lefts:
            self.cuts += 1
            for key, (path, digest) in left.entries.items():
                self.entries += 1
                if digest != self.images.get(path, self.trees.get(key)):
                    found.append(f"{what}: wrong bytes: {path} {key}")
                if left.swept.get(key) != "ok":
                    found.append(f"{what}: the sweep says {left.swept.get(key)} of {path} {key}")
            found += [f"{what}: {one}" for one in left.problems]
            found += [f"{what}: left: {one}" for one in left.left]
        self._lefts.clear()
        self.wrong += found
        return found
