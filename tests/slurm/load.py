"""What a cluster under load is put through, decided beforehand: jobs, and what befalls them.

One seed gives one script, whatever the machine; when exactly each of it happens is up to Slurm.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ahead
import tricks
from images import MIB
from jobs import PARTITIONS, Site, hooked
from registry import STORE, with_importer
from spec import ALICE, BOB, CAROL, PYXIS_REPORT, USERS, ClusterSpec, User
from tricks import Trick

import squashfs

CRED_EXPIRE = 25  # seconds; 120 on most clusters
# Slurm has a requeued job wait for a second more than slurmd remembers that the job was killed. In
# 22.05 (slurm_cred.c, _clear_expired_job_states) that is not enough: what has expired is forgotten
# only where nobody looked for such within the last 2 s. A busy slurmd then takes the job for one
# that it has begun, skips its Prolog, and has its script wait for that: after twice MessageTimeout
# the node is drained, whatever the Prolog is. 23.11 forgets at once.
AGAIN_AFTER = CRED_EXPIRE + 8
LARGEST = 10 * MIB  # for the configuration; one image is larger
CONFIG: Mapping[str, object] = {
    "sources": [f"/shared/{user.name}" for user in USERS] + [f"{tricks.SITE}/images", tricks.LIES],
    "cold": "auto",
    "redirect": "auto",  # which is spank: the companion is there
    "max_image_size": LARGEST,
    "max_size": 22 * MIB,  # of 50 in all: something goes at every turn
    "low_watermark": "80%",
    # So that the larger ones take longer than a step waits for them, and may be disturbed.
    "bandwidth": 4 * MIB,
    "chunk_size": MIB,
    "registry": {"store": STORE},
    "deadline": "auto",  # a longer wait may cost a job whose node registers meanwhile
    "partitions": {
        "plain": {"enabled": False},
        "steps": {"redirect": "spank", "max_image_size": None},
        "binds": {"redirect": "bind"},
    },
}
# Where no partition binds, Prologs end before their work does (hooks/background_prolog.py).
# `none` for the jobs that would leave a FUSE behind: in a step's own namespace that would keep the
# file mounted through which the step has read, as long as it lives.
NO_BIND = {"plain": {"enabled": False}, "binds": {"redirect": "none"}}
SPANK_ONLY = {**CONFIG, "partitions": NO_BIND}
# Room for some that no job has used: what one has used lately does not go for them.
AHEAD = {**SPANK_ONLY, **ahead.KEYS, "max_size": 44 * MIB}
# As the repository's hooks. The first of a boot gives the node a name for it, of which the kernel
# has but one for all nodes here.
HOOK = """#!/bin/sh
named=/run/boot_id
exec 9>/run/boot_id.lock
/usr/bin/flock 9
if ! test -e $named; then
    read -r id </proc/sys/kernel/random/uuid
    echo "$id" >$named
    /usr/bin/mount --bind $named /proc/sys/kernel/random/boot_id
fi
exec 9>&-
exec {hook} >>{log} 2>&1
"""

OTHERS = "{} Nodes=ALL OverSubscribe=YES State=UP"

Way = Literal["option", "inner", "hint", "off"]
Moment = Literal["submitted", "begun"]
Fate = Literal["ends", "cancelled", "requeued"]
FATES: Sequence[Fate] = ("ends", "cancelled", "requeued")
MOMENTS: Sequence[Moment] = ("submitted", "begun")
PARTITION_NAMES = ("all", "steps", "binds", "plain")
WAYS: Sequence[Way] = ("option", "option", "inner", "hint", "off")


def strained(nodes: int = 3) -> ClusterSpec:
    """Nodes that are given more than they can take; Slurm's own patience is not what is tried."""
    spec = hooked(
        nodes,
        nvme_mib=768,  # what has left its job may keep the blocks of what was evicted
        hook=HOOK,
        AuthInfo=f"cred_expire={CRED_EXPIRE}",
        PartitionName="\nPartitionName=".join(
            [PARTITIONS, *map(OTHERS.format, ("steps", "binds"))]
        ),
        MessageTimeout="60",
        MinJobAge="7200",  # what became of each is asked at the end
    )
    spec = dataclasses.replace(
        spec,
        node_dirs=(*spec.node_dirs, "/forestage"),
        companion="",
        # What is looked at is which bytes a task is given; to run them would add nothing.
        plugstack=(f"required {{state}}/pyxis.so report={PYXIS_REPORT} container=no",),
    )
    return with_importer(spec)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Picture:
    """An image as users know it. `trouble` is the user's own, with forestage or without."""

    name: str
    owner: User
    mib: int
    mode: int = 0o644
    exists: bool = True
    gid: int | None = None  # else the owner's

    @property
    def path(self) -> str:
        return f"/shared/{self.owner.name}/{self.name}.sqsh"

    def trouble(self, user: User) -> str | None:
        """The error that this user's task gets in place of the image's bytes."""
        if not self.exists:
            return "No such file or directory"
        rights = self.mode
        if self.gid == tricks.FAR_GID and user in tricks.FAR_MEMBERS:
            rights |= rights >> 3
        return "Permission denied" if user != self.owner and not rights & 0o004 else None


PICTURES = (
    *(Picture(f"a{mib}", ALICE, mib) for mib in (1, 2, 3, 5, 6, 8)),
    *(Picture(f"b{mib}", BOB, mib) for mib in (1, 2, 4, 7, 8)),
    # What follows is not for all, or for nobody.
    Picture("group", ALICE, 3, mode=0o640, gid=tricks.FAR_GID),
    Picture("private", ALICE, 3, mode=0o600),
    Picture("large", BOB, 18),
    Picture("missing", ALICE, 0, exists=False),
)
USUAL = PICTURES[:-4]


@dataclass(frozen=True)
class Plan:
    """A job to come: a step for each picture, and its fate `delay` seconds after it is `since`."""

    user: User
    pictures: tuple[Picture, ...]
    way: Way
    partition: str
    nodes: tuple[str, ...]
    tasks: int  # of each step, on each node
    fate: Fate = "ends"
    since: Moment = "submitted"
    delay: float = 0.0
    trick: Trick = ""

    @property
    def options(self) -> list[str]:
        """Of sbatch."""
        first = self.pictures[0].path
        named = ",".join(one.path for one in self.pictures) + tricks.HINTS.get(self.trick, "")
        asked = {
            "option": [f"--container-image={first}"],
            "hint": [f"--comment=stage={named}"],
            "off": ["--comment=stage=off"],
            "inner": [],
        }[self.way]
        count = len(self.nodes)
        where = [f"--nodelist={','.join(self.nodes)}", f"--nodes={count}"]
        tasks = [f"--ntasks={count * self.tasks}", f"--ntasks-per-node={self.tasks}"]
        return [*asked, *where, *tasks, f"--partition={self.partition}", "--open-mode=append"]

    @property
    def script(self) -> str:
        """Ends as the worst of its steps. What is to be cut short waits for that, but only once."""
        steps = [f"srun --container-image={one.path} true || code=1" for one in self.pictures]
        if self.fate != "ends":
            # After its first step, so that the fate may come upon any part of it.
            steps.insert(1, 'test "${SLURM_RESTART_COUNT:-0}" != 0 || sleep 600')
        begin = f"touch {self.begun('$SLURM_JOB_ID')}"
        trick = tricks.script(self.trick, self.pictures[0].path)
        return "\n".join(["#!/bin/bash", begin, trick, "code=0", *steps, "exit $code", ""])

    def begun(self, job: int | str) -> str:
        """The file that is there once the script is at work."""
        return f"/shared/{self.user.name}/begun-{job}"

    @property
    def ends(self) -> str:
        """As what, if nothing befalls it."""
        failed = any(one.trouble(self.user) for one in self.pictures)
        return "FAILED" if failed else "COMPLETED"

    def looks(self, picture: Picture) -> int:
        """How many tasks look at a picture, if nothing befalls the job."""
        per_step = len(self.nodes) * self.tasks
        # The batch script is a task as well.
        batch = self.way == "option" and picture == self.pictures[0]
        trick = tricks.ON_PICTURE.get(self.trick, 0) if picture == self.pictures[0] else 0
        return per_step * self.pictures.count(picture) + batch + trick


@dataclass(frozen=True)
class Mishap:
    """What the admin does, or a user, or fate, while jobs run. `picture` is None for all.

    `stager`, `server` (of an image that is read through) and `prolog` (whose script has ended): the
    next one on the node is killed.
    """

    kind: Literal["reboot", "evict", "change", "sweep", "stager", "server", "prolog"]
    node: str
    picture: Picture | None = None


def script(seed: str, jobs: int, nodes: Sequence[str]) -> Iterator[Plan | Mishap]:
    """Pure: the jobs in their order, and between them what befalls all. Same seed, same script."""
    chance = random.Random(seed)
    deck: list[Trick] = []
    reboots = -(-jobs // 60) if jobs >= 10 else 0
    rebooting = {(one + 1) * jobs // (reboots + 1) for one in range(reboots)}
    for number in range(jobs):
        yield _plan(chance, nodes, deck)
        node = chance.choice(nodes)
        if number in rebooting:
            yield Mishap("reboot", node)
        if chance.random() < 0.12:
            yield Mishap("evict", node, chance.choice([None, *USUAL]))
        if chance.random() < 0.12:
            yield Mishap("change", node, chance.choice(PICTURES[:-1]))
        if chance.random() < 0.03:
            yield Mishap("sweep", node)
        draw = chance.random()
        if draw < 0.12:
            yield Mishap("stager" if draw < 0.06 else "prolog", node)
        if chance.random() < 0.06:
            yield Mishap("server", node)


def _plan(chance: random.Random, nodes: Sequence[str], deck: list[Trick]) -> Plan:
    # Some are wanted by many, some hardly ever.
    weights = [12 // (place + 1) + 1 for place in range(len(USUAL))] + [4, 3, 2, 1]
    pictures = tuple(chance.choices(PICTURES, weights, k=chance.choice([1, 1, 1, 2])))
    fate = chance.choices(FATES, [70, 22, 8])[0]
    way, partition = chance.choice(WAYS), chance.choices(PARTITION_NAMES, [4, 2, 3, 1])[0]
    # Only against what forestage does: where it does nothing, they are the users' own affair.
    user = chance.choices([ALICE, BOB, CAROL], [4, 4, 1])[0]
    trick: Trick = ""
    if chance.random() < 0.5 and way != "off" and partition != "plain":
        if not deck:  # each as often as the others
            deck += chance.sample(tricks.TRICKS, len(tricks.TRICKS))
        trick = deck.pop()
        way = "hint" if trick in tricks.BY_HINT else way
        partition = "binds" if trick == "fuse" else partition
        partition = "steps" if trick in tricks.IN_STEPS else partition
        # An import reads that home many times, with forestage or without.
        user = ALICE if user == CAROL and trick == "registry" else user
        # Who is killed at it keeps a process in the kernel, with forestage or without.
        fate = "ends" if trick in ("parked", "holds", "above", "shm") else fate
    return Plan(
        user=pictures[0].owner if trick == "lease" else user,
        pictures=pictures,
        way=way,
        partition=partition,
        nodes=tuple(sorted(chance.sample(list(nodes), chance.choices([1, 2], [3, 1])[0]))),
        tasks=chance.choice([1, 1, 2]),
        fate=fate,
        # A cancelled one may be pending then, in its Prolog, or at one of its steps.
        since="begun" if fate == "requeued" else chance.choices(MOMENTS, [2, 1])[0],
        delay=chance.choice([0.0, chance.uniform(0, 1.5)]),
        trick=trick,
    )


class Sources:
    """The pictures on the shared file system, and what each has ever been."""

    def __init__(self, site: Site, settled: bool = False) -> None:
        """`settled`: they look as if nobody had written to them lately."""
        self.site = site
        self._settled = settled
        self._random = random.Random(1)
        self._digests: dict[Picture, list[str]] = {picture: [] for picture in PICTURES}
        for picture in PICTURES:
            if picture.exists:
                self.change(picture, in_place=False)
        tricks.prepare(site)

    def change(self, picture: Picture, in_place: bool) -> None:
        """By rename, as one should, or in place, which nobody may be reading then."""
        # None as large as another: an older one shows in its size, too.
        data = self._random.randbytes(picture.mib * MIB + 4096 + self._random.randrange(4096))
        data = squashfs.beginning(data)
        target = self.site.source(picture.path)
        written = target if in_place else target.with_suffix(".new")
        # Before it can be seen.
        self._digests[picture].append(hashlib.sha256(data).hexdigest())
        _write(written, data, picture)
        if self._settled:
            os.utime(written, (self.site.source("/shared").stat().st_mtime - 3600,) * 2)
        if not in_place:
            written.replace(target)

    def now(self) -> dict[Picture, int]:
        """How often each has been changed."""
        return {picture: len(digests) for picture, digests in self._digests.items()}

    def shown(self, picture: Picture, since: int) -> Sequence[str]:
        """The digests that it has had at any time since it was changed for the `since`-th time."""
        return self._digests[picture][since - 1 :]


def _write(file: Path, data: bytes, picture: Picture) -> None:
    file.write_bytes(data)
    os.chown(file, picture.owner.uid, picture.gid or picture.owner.uid)
    file.chmod(picture.mode)
