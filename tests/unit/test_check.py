"""Each misconfiguration is found, told in words that help, and nothing else is made of it."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from click.testing import CliRunner

from commands import Frozen
from forestage import check_disk, check_sources
from forestage.cli.main import World, main
from forestage.finding import Code, Finding, Level, worst
from forestage.paths import Places
from forestage.system import as_user
from goodnode import COMPANION, RELEASE, REPO, GoodNode, words

G = 1 << 30
GOOD_CONF = "/etc/slurm/slurm.conf"
PARTS = "/etc/slurm/plugstack.conf.d"
OURS, PYXIS = f"{PARTS}/10-forestage.conf", f"{PARTS}/20-pyxis.conf"
PYXIS_SO = "/usr/lib64/slurm/pyxis.so"


@pytest.fixture
def node(tmp_path: Path) -> GoodNode:
    return GoodNode(tmp_path / "node")


def test_on_a_good_node_it_is_silent(node: GoodNode) -> None:
    node.use("/lustre/a.sqsh", 1)
    done = node.check()
    assert words(done) == "forestage OK - nothing to change"
    assert (done.status, done.code, done.findings) == ("ok", 0, ())


class Planted(NamedTuple):
    """A mistake: how to make it, what it is called, and words that a person must read."""

    id: str
    level: Level
    words: tuple[str, ...]
    plant: Callable[[GoodNode], object]


def slurm(old: str, new: str) -> Callable[[GoodNode], object]:
    return lambda node: node.slurm(old, new)


def settings(text: str) -> Callable[[GoodNode], object]:
    return lambda node: node.config(text)


def mounted(point: str, rest: str) -> Callable[[GoodNode], object]:
    return lambda node: node.mount(point, rest)


def flags(text: str) -> Callable[[GoodNode], object]:
    return slurm("PrologFlags=Alloc,DeferBatch", text)


def both(*plants: Callable[[GoodNode], object]) -> Callable[[GoodNode], object]:
    return lambda node: [plant(node) for plant in plants]


def wrote(path: str, text: str, mode: int = 0o644) -> Callable[[GoodNode], object]:
    return lambda node: node.write(path, text, mode)


def removed(*paths: str) -> Callable[[GoodNode], object]:
    return both(*(functools.partial(GoodNode.remove, path=path) for path in paths))


def changed(path: str, old: str, new: str) -> Callable[[GoodNode], object]:
    return lambda node: node.change(path, old, new)


def peers(text: str = "") -> Callable[[GoodNode], object]:
    """Peers that prove themselves with a key file, so that no munge is asked."""

    def plant(node: GoodNode) -> None:
        key = node.root / "key"
        key.write_bytes(bytes(range(32)))
        key.chmod(0o600)
        node.config(f"peers:\n  enabled: true\n  key_file: {key}\n{text}")

    return plant


SLURM = [
    Planted(
        "prolog-alloc",
        "warning",
        ("at a job's first step only", "20 s", "PrologFlags=DeferBatch,Alloc"),
        flags("PrologFlags=DeferBatch"),
    ),
    Planted(
        "prolog-alloc",
        "warning",
        ("jobs wait 15s for a copy at most", f"{GOOD_CONF}: PrologFlags=Alloc,DeferBatch"),
        flags(""),
    ),
    Planted(
        "prolog-deferbatch",
        "warning",
        ("loses its first srun", "PrologFlags=Alloc,DeferBatch"),
        flags("PrologFlags=Alloc"),
    ),
    Planted(
        "prolog-serial",
        "warning",
        ("no other starts or ends on the node", "change  ", "PrologFlags=Alloc,DeferBatch"),
        flags("PrologFlags=Alloc,Serial,DeferBatch"),
    ),
    Planted(
        "prolog-run-in-job",
        "warning",
        ("charged to the job", "PrologFlags=DeferBatch,Alloc"),
        flags("PrologFlags=RunInJob,DeferBatch"),  # which implies Alloc
    ),
    Planted(
        "prolog-timeout",
        "warning",
        ("PrologEpilogTimeout is so short", "waits 7s", "drains the node"),
        slurm("ClusterName=good", "PrologEpilogTimeout=10"),
    ),
    Planted(
        "prolog-timeout",
        "warning",
        ("slurm.conf: PrologTimeout=600",),
        slurm("ClusterName=good", "PrologTimeout=10"),  # since 25.05
    ),
    Planted(
        "cred-expire",
        "warning",
        ("waits 45s for a copy at most, and not 1m30s", "AuthInfo=socket=/m,cred_expire=600"),
        slurm("ClusterName=good", "AuthInfo=socket=/m,cred_expire=60"),
    ),
    Planted(
        "deadline-too-long",
        "critical",
        ("deadline: 5m is longer than", "1m30s", "die", "AuthInfo=cred_expire=405"),
        settings("deadline: 5m\n"),
    ),
    Planted(
        "deadline-too-long",
        "critical",
        ("partitions.gpu.deadline: 5m",),
        settings("partitions:\n  gpu:\n    deadline: 5m\n"),
    ),
    Planted(
        "deadline-cut",
        "warning",
        ("deadline: 1m is cut to 45s", "drain the node", "PrologEpilogTimeout=85"),
        both(settings("deadline: 1m\n"), slurm("ClusterName=good", "PrologEpilogTimeout=60")),
    ),
    Planted(
        "contain-spank",
        "warning",
        ("steps wait 50 s for a copy at most, and not 8m",),
        slurm("ClusterName=good", "SlurmdParameters=config_overrides,contain_spank"),
    ),
    Planted("slurm-conf", "unknown", ("a job waits 15 s",), removed(GOOD_CONF)),
    Planted(
        "hook-no-match",
        "critical",
        ("Prolog=/etc/slurm/prolog.d/* matches no file", "drains the node", "ln -s"),
        both(
            removed("/etc/slurm/prolog.d/50-forestage", "/etc/slurm/prolog.d/90-site"),
            lambda node: node.use("/lustre/a.sqsh", 1),  # by a way that is not seen here
        ),
    ),
    Planted(
        "hook-missing",
        "critical",
        (
            "/etc/slurm/prolog.d/70-gone",
            "leads nowhere",
            "drains",
            "rm /etc/slurm/prolog.d/70-gone",
        ),
        lambda node: node.link("/etc/slurm/prolog.d/70-gone", "nowhere"),
    ),
    Planted(
        "hook-missing",
        "critical",
        ("/opt/epilog of Epilog=/opt/epilog is not there", f"{GOOD_CONF}: without Epilog=/opt"),
        slurm("PluginDir", "Epilog=/opt/epilog\nPluginDir"),
    ),
    Planted(
        "hook-not-executable",
        "critical",
        ("/etc/slurm/prolog.d/README", "chmod 0755"),
        wrote("/etc/slurm/prolog.d/README", "read me"),
    ),
    Planted(
        "prolog-absent",
        "warning",
        ("no Prolog in slurm.conf", "first step", "forestage enable"),
        removed("/etc/slurm/prolog.d/50-forestage"),
    ),
    Planted(
        "prolog-absent",
        "critical",
        ("No image is ever staged",),
        both(removed("/etc/slurm/prolog.d/50-forestage"), wrote(OURS, "")),
    ),
    Planted(
        "epilog-absent",
        "critical",
        ("no Epilog in slurm.conf", "until the sweep", "Epilog=/usr/libexec/forestage/epilog"),
        slurm("Epilog=/usr/libexec/forestage/epilog\n", ""),
    ),
    Planted(
        "hook-interpreter",
        "critical",
        ("/usr/lib/forestage/bin/python3 cannot run them", "No module named"),
        wrote(
            "/usr/lib/forestage/bin/python3",
            "#!/bin/sh\necho 'ModuleNotFoundError: No module named x' >&2\nexit 1\n",
            0o755,
        ),
    ),
    Planted(
        "hook-interpreter",
        "critical",
        ("it is not there",),
        removed("/usr/lib/forestage/bin/python3"),
    ),
]

PLUGINS = [
    Planted(
        "plugstack-order",
        "warning",
        ("pyxis.so comes before", "before the line of pyxis.so"),
        lambda node: node.at(OURS).rename(node.at(f"{PARTS}/30-forestage.conf")),
    ),
    Planted(
        "companion-required",
        "warning",
        ("10-forestage.conf:1 says `required`", "slurmd does not start", "timeout=500"),
        changed(OURS, "optional", "required"),
    ),
    Planted(
        "companion-release",
        "warning",
        ("built for Slurm 24.11, this is 22.05", "No step"),
        both(
            slurm("PluginDir=", "PluginDir=/opt/none:"),
            lambda node: node.plugin("/usr/lib/forestage/spank/forestage.so", 0x180B05),
        ),
    ),
    Planted(
        "companion-missing",
        "warning",
        ("forestage.so", "is not there", "No step"),
        removed("/usr/lib/forestage/spank/forestage.so"),
    ),
    Planted(
        "companion-helper",
        "warning",
        ("helper /opt/none is not there",),
        changed(OURS, "timeout=500", "helper=/opt/none"),
    ),
    Planted(
        "companion-absent",
        "critical",
        ("redirect: spank", "no job ever sees a copy", "optional /usr/lib/forestage/spank"),
        both(wrote(OURS, ""), settings("partitions:\n  gpu:\n    redirect: spank\n")),
    ),
    Planted(
        "spank-job-prolog",
        "warning",
        (
            "/opt/other.so defines slurm_spank_job_prolog",
            "hides --container-image from the Prolog: copies start with the first step.",
        ),
        both(
            wrote(f"{PARTS}/90-other.conf", "optional /opt/other.so"),
            lambda node: node.plugin("/opt/other.so", RELEASE, also=("slurm_spank_job_prolog",)),
        ),
    ),
    Planted(
        "spank-job-prolog",
        "critical",
        ("no such image is staged", "90-other.conf: without line 1, or `optional /usr/lib"),
        both(
            wrote(OURS, ""),
            wrote(f"{PARTS}/90-other.conf", "optional /opt/other.so"),
            lambda node: node.plugin("/opt/other.so", RELEASE, also=("slurm_spank_job_prolog",)),
        ),
    ),
    Planted(
        "pyxis-old",
        "warning",
        ("since pyxis 0.22", "minutes for 20 GiB"),
        both(
            changed(PYXIS, " use_squashfuse=1", ""),
            lambda node: node.plugin(PYXIS_SO, RELEASE, b"enroot\0"),
        ),
    ),
    Planted(
        "pyxis-unpacks",
        "warning",
        (
            "does not set use_squashfuse=1",
            "required pyxis.so runtime_path=/run/pyxis use_squashfuse",
        ),
        changed(PYXIS, "use_squashfuse=1", "use_squashfuse=0"),
    ),
    Planted(
        "fuse-device",
        "critical",
        ("/dev/fuse has mode 0600", "container jobs fail", 'MODE="0666"'),
        lambda node: node.at("/dev/fuse").chmod(0o600),
    ),
    Planted("fuse-device", "critical", ("is not there", "modprobe fuse"), removed("/dev/fuse")),
    Planted(
        "squashfuse-missing",
        "critical",
        ("squashfuse is not installed",),
        removed("/usr/bin/squashfuse"),
    ),
    Planted(
        "user-namespaces",
        "critical",
        ("user.max_user_namespaces=65536",),
        wrote("/proc/sys/user/max_user_namespaces", "0\n"),
    ),
    Planted(
        "user-namespaces",
        "critical",
        ("kernel.unprivileged_userns_clone=1",),
        wrote("/proc/sys/kernel/unprivileged_userns_clone", "0\n"),
    ),
]

DISK = [
    Planted(
        "cache-not-mounted",
        "critical",
        ("its disk is not mounted", "/etc/fstab"),
        lambda node: node.unmount("/mnt/nvme"),
    ),
    Planted(
        "cache-on-network",
        "critical",
        ("lies on nfs4 (server:/x)", "through the network twice"),
        mounted("/mnt/nvme", "0:60 - nfs4 server:/x"),
    ),
    Planted(
        "cache-on-network",
        "critical",
        ("fuse.sshfs",),
        mounted("/mnt/nvme", "0:60 - fuse.sshfs server:/x"),
    ),
    Planted(
        "cache-in-memory",
        "warning",
        ("lies in memory (tmpfs)", "memory of the jobs"),
        mounted("/mnt/nvme", "0:60 - tmpfs tmpfs"),
    ),
    Planted(
        "cache-read-only",
        "critical",
        ("/mnt/nvme is mounted read-only", "remount,rw"),
        changed("/proc/self/mountinfo", "/mnt/nvme rw,noatime", "/mnt/nvme ro,noatime"),
    ),
    *(
        Planted(
            "cache-read-only",
            "critical",
            ("goes read-only when its disk fails",),
            changed("/proc/self/mountinfo", "/dev/md0 rw", f"/dev/md0 {options}"),
        )
        for options in ("ro,errors=remount-ro", "rw,emergency_ro")
    ),
    Planted(
        "cache-hidden",
        "critical",
        ("lies below /mnt/nvme/jobs, which jobs do not see",),
        both(
            slurm("ClusterName=good", "JobContainerType=job_container/tmpfs"),
            wrote("/etc/slurm/job_container.conf", "AutoBasePath=true BasePath=/mnt/nvme/jobs\n"),
            wrote("/etc/forestage/conf.d/x.yaml", "cache: /mnt/nvme/jobs/c\n"),
        ),
    ),
    Planted(
        "cache-not-ours",
        "critical",
        ("with mode 0755", "others could change what jobs read"),
        lambda node: node.at("/mnt/nvme/forestage").chmod(0o755),
    ),
    Planted(
        "cache-small",
        "warning",
        ("less than two images such as /lustre/big.sqsh (1 PiB)",),
        lambda node: node.use("/lustre/big.sqsh", 1 << 50),
    ),
    Planted(
        "raid-level",
        "warning",
        ("md0, a raid5 of 2 disks", "--level=0 --raid-devices=2"),
        wrote("/sys/block/md0/md/level", "raid5\n"),
    ),
    Planted(
        "raid-degraded",
        "warning",
        ("md0 (raid0) lacks 1 of its 2 disks",),
        wrote("/sys/block/md0/md/degraded", "1\n"),
    ),
    Planted(
        "disks-idle",
        "warning",
        ("nvme5n1 look unused", "RAID 0 of 3", "1.5 times"),
        lambda node: node.disk("nvme5n1"),
    ),
    Planted(
        "disk-spins",
        "warning",
        ("rotating disk (sda)", "two minutes for 23 GiB"),
        both(
            mounted("/mnt/nvme", "8:1 - ext4 /dev/sda1"),
            lambda node: node.disk("sda"),
            wrote("/sys/block/sda/queue/rotational", "1\n"),
            wrote("/sys/block/sda/sda1/partition", "1\n"),
            lambda node: node.link("/sys/dev/block/8:1", "../../block/sda/sda1"),
        ),
    ),
]

REST = [
    Planted(
        "config",
        "critical",
        ("forestage.yaml", "deadline", "expected auto or a duration"),
        settings("deadline: soon\n"),
    ),
    Planted(
        "no-sources",
        "critical",
        ("No image is ever staged", "conf.d/none.yaml: sources: ["),
        wrote("/etc/forestage/conf.d/none.yaml", "sources: []\n"),
    ),
    Planted(
        "source-missing",
        "critical",
        ("the source /lustre is not there",),
        lambda node: node.at("/lustre").rmdir(),
    ),
    Planted(
        "source-not-mounted",
        "warning",
        ("the source /lustre lies on the root file system",),
        lambda node: node.unmount("/lustre"),
    ),
    Planted(
        "switched-off",
        "warning",
        ("INC-42", "rm /run/forestage/disabled"),
        wrote("/run/forestage/disabled", "INC-42\n"),
    ),
    Planted("switched-off", "warning", ("enabled: false",), settings("enabled: false\n")),
    Planted(
        "program-missing",
        "critical",
        ("setpriv", "the package util-linux", "cannot be started: copies fail"),
        removed("/usr/bin/setpriv"),
    ),
    Planted(
        "program-missing",
        "critical",
        ("engine: rsync fails", "the package rsync"),
        settings("engine: rsync\n"),
    ),
    Planted(
        "mount-namespaces",
        "critical",
        ("max_mnt_namespaces=65536",),
        wrote("/proc/sys/user/max_mnt_namespaces", "0\n"),
    ),
    Planted(
        "slurmd-mounts",
        "warning",
        ("slurmd has mounts of its own", "PrivateTmp="),
        both(removed("/proc/77/ns/mnt"), lambda node: node.link("/proc/77/ns/mnt", "mnt:[2]")),
    ),
    Planted(
        "sweep-timer",
        "warning",
        ("systemctl enable --now forestage-sweep.timer",),
        removed("/etc/systemd/system/timers.target.wants/forestage-sweep.timer"),
    ),
    Planted(
        "peer-service",
        "warning",
        ("nobody listens on port 7716", "forestage-peer"),
        peers("  port: 7716\n"),
    ),
    Planted(
        "peer-proof",
        "warning",
        ("cannot prove who it is", "once per node"),
        both(peers(), lambda node: (node.root / "key").chmod(0o644)),
    ),
    Planted(
        "not-root",
        "unknown",
        ("sudo forestage check",),
        lambda node: setattr(node, "is_root", False),
    ),
]

PLANTED = [*SLURM, *PLUGINS, *DISK, *REST]


@pytest.mark.parametrize("mistake", PLANTED, ids=lambda one: one.id)
def test_a_mistake_is_found_and_nothing_else(node: GoodNode, mistake: Planted) -> None:
    mistake.plant(node)
    done = node.check()
    told = words(done)
    assert [(one.id, one.level) for one in done.findings] == [(mistake.id, mistake.level)], told
    assert done.status == mistake.level
    lines = told.splitlines()
    assert lines[0] == f"forestage {mistake.level.upper()} - 1 finding: {mistake.id}"
    assert [word for word in mistake.words if word not in told] == []
    found = done.findings[0]
    assert found.what, found.why and found.change


def findings_made() -> set[str]:
    """The id of each Finding that the source makes."""
    calls = (
        call
        for file in Path(check_disk.__file__).parent.glob("check*.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Finding"
    )
    return {ast.literal_eval(call.args[0]) for call in calls}


def test_each_finding_can_be_planted() -> None:
    """Whoever adds a finding adds how it comes about."""
    made = findings_made()
    assert len(made) > 40
    elsewhere = {"source-denied", "source-hangs", "striping", "cache-full", "enroot-data"}
    assert made == {one.id for one in PLANTED} | elsewhere


def test_operators_find_each_id_in_the_documents() -> None:
    section = (REPO / "docs/operations.md").read_text().split("## Is the node set up well?")[1]
    listed = re.findall(r"`([a-z-]+)`", section.split("| about | ids |")[1].split("\n\n")[0])
    assert sorted(listed) == sorted(findings_made())


@pytest.mark.parametrize("why", ["missing", "release"])
def test_a_required_companion_that_cannot_be_loaded_is_critical(node: GoodNode, why: str) -> None:
    node.change(OURS, "optional", "required")
    if why == "missing":
        node.remove("/usr/lib/forestage/spank/forestage.so")
    else:
        node.plugin("/usr/lib/forestage/spank/forestage.so", 0x180B05)
    first, second = node.check().findings
    assert (first.id, first.level) == (f"companion-{why}", "critical")
    assert first.why == "slurmd does not start"
    assert second.id == "companion-required"
    assert second.change == f"{OURS}: {COMPANION.strip()}"


@pytest.mark.parametrize(
    ("plant", "words_told"),
    [
        (mounted("/scratch", "0:70 - nfs server:/scratch"), "saves nothing"),
        (mounted("/scratch", "0:70 - tmpfs tmpfs"), "takes memory"),
        (lambda node: None, "at the pace of /dev/vdb"),
    ],
    ids=["network", "memory", "another-disk"],
)
def test_where_enroot_unpacks_matters_only_where_it_unpacks(
    node: GoodNode, plant: Callable[[GoodNode], object], words_told: str
) -> None:
    plant(node)
    node.change("/etc/enroot/enroot.conf", "/mnt/nvme/enroot", "/scratch/enroot")
    assert node.ids() == []
    node.change(PYXIS, "use_squashfuse=1", "use_squashfuse=no")
    assert node.ids() == ["pyxis-unpacks", "enroot-data"]
    told = words(node.check())
    assert words_told in told
    assert 'ENROOT_DATA_PATH "/mnt/nvme/enroot/user-$(id -u)"' in told


@pytest.mark.parametrize(
    ("conf", "found"),
    [
        ("# nothing\n", ["enroot-data"]),
        ("ENROOT_DATA_PATH ${HOME}/x\n", []),  # only a shell could tell
        ('ENROOT_DATA_PATH="/mnt/nvme/x"\n', []),
        (None, []),
    ],
)
def test_enroots_configuration_is_believed_where_it_is_plain(
    node: GoodNode, conf: str | None, found: list[str]
) -> None:
    node.change(PYXIS, " use_squashfuse=1", "")
    node.remove("/etc/enroot/enroot.conf")
    if conf is not None:
        node.write("/etc/enroot/enroot.conf", conf)
    assert node.ids() == ["pyxis-unpacks", *found]


def test_peers_that_are_served_and_proven_are_no_finding(node: GoodNode) -> None:
    peers()(node)
    assert node.ids() == []


def test_of_a_stand_in_for_pyxis_nothing_is_demanded(node: GoodNode) -> None:
    """A plugin that does not run enroot is another one, whatever its name."""
    node.plugin(PYXIS_SO, RELEASE)
    node.remove("/dev/fuse")
    assert node.ids() == []


@pytest.mark.parametrize("state", ["denied", "hangs"])
def test_a_source_that_a_user_cannot_read_is_told(
    node: GoodNode, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: object) -> object:
        raise PermissionError(13, "no") if state == "denied" else as_user.TooSlow("no answer")

    monkeypatch.setattr(as_user, "call", call)
    node.use("/lustre/a.sqsh", 1)
    assert node.ids() == [f"source-{state}"]


def test_a_source_of_another_group_is_no_finding(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the check would warn or not, by whose job came last."""

    def call(*_: object) -> object:
        raise PermissionError(13, "no")

    monkeypatch.setattr(as_user, "call", call)
    node.use("/lustre2/a.sqsh", 1)
    assert node.ids() == []


def test_whether_a_user_may_enter_a_source_is_tried_as_that_user(
    tmp_path: Path, as_root: None
) -> None:
    from forestage.system.as_user import User
    from forestage.system.tree import Files

    for above in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        above.chmod(above.stat().st_mode | 0o011)
    for name, mode in (("open", 0o711), ("closed", 0o710)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    found = check_sources.gather(Files(tmp_path), ("/open", "/closed"), User("", 65534, 65534))
    assert [one.state for one in found] == ["readable", "denied"]


def test_a_disk_without_room_for_anything_is_told(node: GoodNode) -> None:
    node.write("/etc/forestage/conf.d/x.yaml", "min_free: 100%\n")
    assert node.ids() == ["cache-full"]


# --- Lustre, by a fake lfs


def test_the_large_images_most_used_are_asked_for_their_striping(
    node: GoodNode, lfs: Callable[[str], Path]
) -> None:
    asked = lfs(
        'case "$*" in *wide*) echo -1;; *two*) echo 2;; *pfl*) printf "1\\n16\\n";;'
        " *) echo 1;; esac"
    )
    for number in range(4):
        node.use(f"/lustre/one{number}.sqsh", 2, times=number + 1)
    for name, size in (("small", G - 1), ("narrow", G), ("wide", G), ("two", G), ("pfl", G)):
        node.use(f"/lustre/d/{name}.sqsh", size)
    node.use("/home/other.sqsh", G)
    done = node.check()
    assert [one.id for one in done.findings if one.id != "cache-small"] == ["striping"] * 2
    names = [line.rpartition("/")[2] for line in asked.read_text().splitlines()]
    assert sorted(names) == ["narrow.sqsh", "pfl.sqsh", "two.sqsh", "wide.sqsh"]
    assert asked.read_text().startswith("getstripe --stripe-count ")
    told = words(done)
    assert "/lustre/d/narrow.sqsh (1 GiB) lies on 1 OST\n" in told
    assert "/lustre/d/two.sqsh (1 GiB) lies on 2 OSTs\n" in told
    assert "lfs setstripe -E -1 -c -1 -S 1M /lustre/d " in told
    assert "200 s" in told


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "echo 8", "echo 0"])
def test_an_lfs_that_does_not_say_one_is_no_finding(
    node: GoodNode, lfs: Callable[[str], Path], script: str
) -> None:
    asked = lfs(script)
    node.use("/lustre/a.sqsh", G)
    assert "striping" not in node.ids() or script == "echo 0"
    assert asked.read_text()


def test_nobody_is_asked_about_a_file_system_that_hangs(
    node: GoodNode, lfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: object) -> object:
        raise as_user.TooSlow("no answer")

    asked = lfs("echo 1")
    node.use("/lustre/a.sqsh", G)
    monkeypatch.setattr(as_user, "call", call)
    assert "source-hangs" in node.ids()
    assert asked.read_text() == ""


def test_without_lfs_nothing_is_asked(node: GoodNode) -> None:
    node.use("/lustre/a.sqsh", G)
    assert "striping" not in node.ids()


# --- slurm.conf and plugstack.conf as sites write them


def test_what_implies_a_flag_is_as_good_as_the_flag(node: GoodNode) -> None:
    node.slurm("PrologFlags=Alloc,DeferBatch", "PrologFlags=Contain,DeferBatch")
    assert node.ids() == []


@pytest.mark.parametrize("keys", ["deadline: 5m\nprolog_wait: 0\n", "deadline: 30s\n"])
def test_a_deadline_that_slurm_allows_is_no_finding(node: GoodNode, keys: str) -> None:
    node.config(keys)
    assert node.ids() == []


def test_a_node_without_pyxis_has_nothing_to_change_in_it(node: GoodNode) -> None:
    node.remove(PYXIS)
    assert node.ids() == []


def test_slurms_configuration_is_read_where_it_is_named(node: GoodNode) -> None:
    node.conf = "/opt/slurm.conf"
    node.write("/opt/slurm.conf", "Include /nowhere\n")
    assert node.ids() == ["slurm-conf"]


@pytest.mark.parametrize("name", ["more.conf", "/etc/slurm/more.conf"])
def test_what_is_included_counts(node: GoodNode, name: str) -> None:
    node.slurm("PrologFlags=Alloc,DeferBatch", f"Include {name}")
    node.write("/etc/slurm/more.conf", "PrologFlags=Alloc,DeferBatch,Serial\n")
    assert node.ids() == ["prolog-serial"]


def test_hooks_that_a_script_calls_are_known_for_ours(node: GoodNode) -> None:
    """Sites wrap hooks; the interpreter behind the wrapper is looked at, too."""
    node.remove("/etc/slurm/prolog.d/50-forestage")
    called = "#!/bin/sh\nexec /usr/libexec/forestage/prolog >>/var/log/x 2>&1\n"
    node.write("/etc/slurm/prolog.d/50-wrapper", called, 0o755)
    node.slurm("Epilog=/usr/libexec/forestage/epilog\n", "Epilog=/etc/epilog\n")
    node.write("/etc/epilog", "#!/bin/sh\nrun-parts /etc/somewhere\n", 0o755)
    assert node.ids() == ["epilog-absent"]
    node.use("/lustre/a.sqsh", 1, hook="epilog")
    assert node.ids() == []
    node.remove("/usr/lib/forestage/bin/python3")
    assert node.ids() == ["hook-interpreter"]


@pytest.mark.parametrize(
    ("name", "line"),
    [("prolog", "Prolog=/etc/slurm/prolog.d/*\n"), ("epilog", f"Epilog={Places().epilog}\n")],
)
def test_hook_line_removed_after_jobs_ran_is_absent(node: GoodNode, name: str, line: str) -> None:
    """As when configuration management puts an old slurm.conf back."""
    node.use("/lustre/a.sqsh", 1, hook="prolog")
    node.use("/lustre/a.sqsh", 1, hook="epilog")
    assert node.ids() == []
    node.slurm(line, "")
    assert node.ids() == [f"{name}-absent"]


def test_what_else_a_sites_script_runs_is_not_asked_to_run_our_hooks(node: GoodNode) -> None:
    node.remove("/etc/slurm/prolog.d/50-forestage")
    node.write("/opt/python3", "#!/bin/sh\nexit 1\n", 0o755)
    node.write(
        "/etc/slurm/prolog.d/50-site",
        "#!/bin/sh\n/opt/python3 /opt/health.py\n"
        "/usr/libexec/forestage/prolog  # and not forestage by /opt/python3\n",
        0o755,
    )
    assert node.ids() == []


def test_a_comment_that_names_us_is_no_hook_of_ours(node: GoodNode) -> None:
    node.remove("/etc/slurm/prolog.d/50-forestage")
    node.write("/etc/slurm/prolog.d/90-site", "#!/bin/sh\n# before forestage\nexit 0\n", 0o755)
    assert node.ids() == ["prolog-absent"]


def test_a_stack_that_includes_itself_is_looked_at_as_far_as_it_goes(node: GoodNode) -> None:
    node.write("/etc/slurm/plugstack.conf", "include *.d/*.conf\ninclude plugstack.conf\n")
    assert node.ids() == []


def test_a_broken_configuration_hides_nothing_of_slurm(node: GoodNode) -> None:
    node.config("deadline: soon\nengine: magic\n")
    node.slurm("PrologFlags=Alloc,DeferBatch", "PrologFlags=Alloc,DeferBatch,Serial")
    assert node.ids() == ["config", "config", "prolog-serial"]


def test_what_the_kernel_does_not_tell_is_no_finding(node: GoodNode) -> None:
    """As in a container without /proc and /sys."""
    node.at("/proc").rename(node.at("/none"))
    node.at("/sys").rename(node.at("/nothing"))
    assert node.ids() == []


def test_a_name_that_is_no_text_is_told_all_the_same(node: GoodNode) -> None:
    odd = os.fsencode(node.at("/etc/slurm/prolog.d/")) + b"/caf\xe9\x1b[2J"
    os.symlink("nowhere", odd)
    done = node.check()
    assert [one.id for one in done.findings] == ["hook-missing"]
    assert msgspec.json.encode(done)
    assert "caf\\udce9\\x1b[2J" in words(done)


def test_a_user_is_told_what_he_cannot_see_and_nothing_that_is_not_so(
    node: GoodNode, as_root: None
) -> None:
    for above in (node.root, *node.root.parents[:3]):
        above.chmod(above.stat().st_mode | 0o011)
    node.is_root = False
    os.seteuid(65534)
    try:
        found = node.ids()
    finally:
        os.seteuid(0)
    assert found == ["not-root"]


# --- the command


def invoke(node: GoodNode, *args: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["check", *args], obj=World(node.places, Frozen()))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


@pytest.fixture
def as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sources are looked at as who runs the test: pytest's folders are closed to others."""
    monkeypatch.setattr(as_user, "become", lambda user: None)


def test_the_command_ends_as_nagios_wants_it(
    node: GoodNode, as_root: None, as_nobody: None
) -> None:
    assert invoke(node) == (0, "forestage OK - nothing to change\n")
    node.config("enabled: false\n")
    code, out = invoke(node)
    assert (code, out.splitlines()[0]) == (1, "forestage WARNING - 1 finding: switched-off")
    node.slurm("PluginDir", "Prolog=/nowhere\nPluginDir")
    code, out = invoke(node, "--json")
    document = json.loads(out)
    assert (code, document["code"], document["status"]) == (2, 2, "critical")
    assert [one["id"] for one in document["findings"]] == ["hook-missing", "switched-off"]
    assert set(document["findings"][0]) == {"id", "level", "what", "why", "change"}


def test_what_is_wrong_goes_before_what_is_not_known() -> None:
    def one(level: Level) -> Finding:
        return Finding("x", level, "what", "why", "change")

    assert worst([]) is Code.OK
    assert worst([one("unknown")]) is Code.UNKNOWN
    assert worst([one("unknown"), one("warning")]) is Code.WARNING
    assert worst([one("unknown"), one("critical"), one("warning")]) is Code.CRITICAL


def test_it_changes_nothing(node: GoodNode) -> None:
    def tree() -> set[tuple[str, float]]:
        files = node.root.rglob("*")
        return {(str(f), os.lstat(f).st_mtime) for f in files}

    before = tree()
    node.check()
    assert tree() == before
