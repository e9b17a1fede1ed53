"""Each mistake in a node's setup is found, with the line to change, and nothing else is."""

from __future__ import annotations

import ast
import errno
import functools
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
from click.testing import CliRunner

from commands import NOW, Frozen
from forestage import check, events
from forestage.check import CheckFinding, FindingLevel, plugstack_findings
from forestage.check import slurm_site as sites
from forestage.check.slurm_site import COMPANION_CONF
from forestage.commands.command_context import CommandContext
from forestage.commands.main import main
from forestage.config import load_config
from forestage.errors import Failed
from forestage.events import BadEntryOutcome, EventRecord, RequestOutcome
from forestage.features.peers import auth, node_list, proven_node, silent_nodes
from forestage.features.peers import checks as peers_checks
from forestage.features.peers.node_list import PeerNodeList
from forestage.features.prefetch import checks as prefetch_checks
from forestage.features.prefetch import expected_list, prefetch_record
from forestage.features.prefetch.expected_list import ExpectedImageList
from forestage.features.prefetch.prefetch_node import BUSY
from forestage.features.prefetch.prefetch_record import ImageInspection, PrefetchRecord
from forestage.features.registry import checks as registry_checks
from forestage.paths import NodePaths
from forestage.slurm.slurm_conf import MAX_FILES
from forestage.system import as_user
from forestage.system.as_user import User
from forestage.system.terminal import format_local_time
from forestage.system.tree import RootedTree
from goodnode import COMPANION, OF_ROOT, REPO, TCP, GoodNode, words
from node import until

G = 1 << 30
CONF = "/etc/slurm/slurm.conf"
YAML = "/etc/forestage/forestage.yaml"
PEER_LINK = "/etc/systemd/system/multi-user.target.wants/forestage-peer.service"
# As /proc/net/tcp6 has ::1 and 2001:db8::1.
LOOPBACK6, ADDRESS6 = "0" * 24 + "01000000", "B80D0120" + "0" * 16 + "01000000"
PROLOG_D = "/etc/slurm/prolog.d"
PROLOG, EPILOG = str(NodePaths().prolog), str(NodePaths().epilog)
COMPANION_SO = str(NodePaths().companion)
INCLUDE = "include /usr/lib/forestage/spank/plugstack-22.05*.conf\n"
PARTS = "/etc/slurm/plugstack.conf.d"
OURS, PYXIS = f"{PARTS}/10-forestage.conf", f"{PARTS}/20-pyxis.conf"
PYXIS_SO = "/usr/lib64/slurm/pyxis.so"


def hangs(*_: object) -> None:
    """So long that each check gives up before; one that never does hears of it, and has failed."""
    until(lambda: False, "a check to give up")


@pytest.fixture
def node(tmp_path: Path, me: User, monkeypatch: pytest.MonkeyPatch) -> GoodNode:
    """Any user reaches what lies on it."""
    monkeypatch.setattr(registry_checks, "NOBODY", me)
    return GoodNode(tmp_path / "node")


def test_good_node_has_no_finding(node: GoodNode) -> None:
    node.use("/lustre/a.sqsh", 1)
    done = node.check()
    assert words(done) == "forestage OK - nothing to change"
    assert (done.status, done.code, done.findings) == ("ok", 0, ())


def test_login_node_that_is_set_up_correctly_has_no_finding(node: GoodNode) -> None:
    as_login(node)
    assert node.check().findings == ()


class Planted(NamedTuple):
    """A mistake: its id and level, how to make it, and the line to change where it is computed."""

    level: FindingLevel
    id: str
    plant: Callable[[GoodNode], object]
    change: str = ""


critical = functools.partial(Planted, "critical")
warning = functools.partial(Planted, "warning")
unknown = functools.partial(Planted, "unknown")
note = functools.partial(Planted, "note")


def slurm(old: str, new: str) -> Callable[[GoodNode], object]:
    return lambda node: node.slurm(old, new)


def settings(text: str) -> Callable[[GoodNode], object]:
    return lambda node: node.config(text)


def flags(text: str) -> Callable[[GoodNode], object]:
    return slurm("PrologFlags=Alloc,DeferBatch", f"PrologFlags={text}")


def both(*plants: Callable[[GoodNode], object]) -> Callable[[GoodNode], object]:
    return lambda node: [plant(node) for plant in plants]


def wrote(path: str, text: str, mode: int = 0o644) -> Callable[[GoodNode], object]:
    return lambda node: node.write(path, text, mode)


def removed(*paths: str) -> Callable[[GoodNode], object]:
    return both(*(functools.partial(GoodNode.remove, path=path) for path in paths))


def loop(path: str) -> Callable[[GoodNode], object]:
    """A file that not even root can read."""
    return both(removed(path), lambda node: node.link(path, path.rpartition("/")[2]))


def linux(release: str) -> Callable[[GoodNode], object]:
    return wrote("/proc/sys/kernel/osrelease", f"{release}\n")


def open_files(soft: str, hard: str, pid: int = 77) -> Callable[[GoodNode], object]:
    """What slurmd may open, as /proc has it."""
    return wrote(
        f"/proc/{pid}/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max processes             127447               127447               processes \n"
        f"Max open files            {soft:<20} {hard:<20} files     \n",
    )


def removed_systemd(node: GoodNode) -> None:
    shutil.rmtree(node.at("/run/systemd"))


def health(program: str) -> Callable[[GoodNode], object]:
    return slurm("ClusterName=good", f"ClusterName=good\nHealthCheckProgram={program}")


def changed(path: str, old: str, new: str) -> Callable[[GoodNode], object]:
    return lambda node: node.change(path, old, new)


def as_login(node: GoodNode) -> None:
    """Jobs are submitted there, by Slurm's commands alone: there is no slurmd, and no cache."""
    node.login = True
    for path in ("/usr/sbin/slurmd", "/proc/self/mountinfo", YAML):
        node.remove(path)


def listening(address: str) -> Callable[[GoodNode], object]:
    """The peer service, at an address as /proc has it."""
    return changed("/proc/net/tcp", "00000000:1E25", f"{address}:1E25")


def listening6(address: str) -> Callable[[GoodNode], object]:
    return wrote("/proc/net/tcp6", TCP.splitlines()[0] + f"\n   0: {address}:1E25 {address}:0 0A\n")


def silent(*names: str) -> Callable[[GoodNode], object]:
    """Nodes whose peer service has just not answered."""
    return lambda node: [
        silent_nodes.record_silence(node.places, name, time.monotonic()) for name in names
    ]


without_companion = both(wrote(OURS, ""), settings("redirect: bind\n"))
mount_of_cache = functools.partial(changed, "/proc/self/mountinfo")
users_lustre = changed(
    "/proc/self/mountinfo",
    "lustre 10.0.0.1@o2ib:/big rw,flock",
    "fuse.juicefs big rw,user_id=994,group_id=994,allow_other",
)


def peers(text: str = "") -> Callable[[GoodNode], object]:
    """Peers that prove themselves with a key file, so that no munge is asked."""

    def plant(node: GoodNode) -> None:
        key = node.root / "key"
        key.write_bytes(bytes(range(32)))
        key.chmod(0o600)
        node.config(f"peers:\n  enabled: true\n  key_file: {key}\n{text}")

    return plant


SLURM = [
    warning("prolog-alloc", flags("DeferBatch"), f"{CONF}: PrologFlags=DeferBatch,Alloc"),
    warning("prolog-deferbatch", flags("Alloc")),
    warning(
        "slurm-hints",
        both(
            flags("Alloc"),  # DeferBatch would keep slurmctld from starting
            wrote("/usr/sbin/slurmd", "#!/bin/sh\necho slurm-wlm 21.08.5\n", 0o755),
            lambda node: node.companion_for("21.08.5"),
        ),
    ),
    warning(
        "prolog-serial", flags("Alloc,Serial,DeferBatch"), f"{CONF}: PrologFlags=Alloc,DeferBatch"
    ),
    warning(
        "prolog-run-in-job", flags("RunInJob,X11,DeferBatch"), f"{CONF}: PrologFlags=X11,DeferBatch"
    ),
    warning("prolog-timeout", slurm("ClusterName=good", "PrologEpilogTimeout=10")),
    warning("prolog-timeout", slurm("ClusterName=good", "PrologTimeout=10")),
    warning(
        "deadline-cut",
        settings("redirect: bind\ncold: wait\ndeadline: 1m\n"),
        f"{CONF}: BatchStartTimeout=85",
    ),
    warning(
        "deadline-cut",
        both(
            settings("redirect: bind\ncold: wait\ndeadline: 5m\n"),
            slurm("ClusterName=good", "BatchStartTimeout=120\nAuthInfo=ttl=5"),
        ),
        f"{CONF}: BatchStartTimeout=405, AuthInfo=ttl=5,cred_expire=405",
    ),
    warning(
        "deadline-cut",
        settings("redirect: bind\ncold: wait\npartitions:\n  gpu:\n    deadline: 5m\n"),
        f"{CONF}: BatchStartTimeout=405, AuthInfo=cred_expire=405",
    ),
    warning(
        "deadline-cut",
        both(
            settings("redirect: bind\ncold: wait\ndeadline: 1m\n"),
            slurm("ClusterName=good", "BatchStartTimeout=120\nPrologEpilogTimeout=60"),
        ),
        f"{CONF}: PrologEpilogTimeout=85",
    ),
    warning(
        "contain-spank",
        slurm("ClusterName=good", "SlurmdParameters=config_overrides,contain_spank"),
    ),
    unknown("slurm-conf", removed(CONF)),
    unknown("slurm-conf", loop(CONF)),
    unknown("plugstack-conf", loop(OURS)),
    unknown(
        "plugstack-conf",
        wrote("/etc/slurm/plugstack.conf", "include *.d/*.conf\ninclude plugstack.conf\n"),
    ),
    unknown(
        "job-container-conf", slurm("ClusterName=good", "JobContainerType=job_container/tmpfs")
    ),
    critical(
        "hook-no-match",
        both(
            removed(f"{PROLOG_D}/50-forestage", f"{PROLOG_D}/90-site"),
            lambda node: node.use("/lustre/a.sqsh", 1),  # by a way that is not seen here
        ),
        f"ln -s {PROLOG} {PROLOG_D}/50-forestage (or {CONF}:3: without Prolog={PROLOG_D}/*)",
    ),
    critical(
        "hook-missing",
        lambda node: node.link(f"{PROLOG_D}/70-gone", "nowhere"),
        f"rm {PROLOG_D}/70-gone",
    ),
    critical(
        "hook-missing",
        slurm("PluginDir", "Epilog=/opt/epilog\nPluginDir"),
        f"{CONF}:5: without Epilog=/opt/epilog",
    ),
    critical(
        "hook-missing",
        both(
            removed(f"{PROLOG_D}/50-forestage"),
            lambda node: node.link(f"{PROLOG_D}/50-forestage", "/opt/forestage/gone"),
        ),
        f"ln -sfn {PROLOG} {PROLOG_D}/50-forestage",
    ),
    critical(
        "hook-missing",
        removed(EPILOG),
        f"install forestage's package again (or {CONF}:4: without Epilog={EPILOG})",
    ),
    critical(
        "hook-not-executable",
        wrote(f"{PROLOG_D}/README", "read me"),
        f"chmod 0755 {PROLOG_D}/README (or take it out of that directory)",
    ),
    warning(
        "prolog-absent",
        both(
            removed(f"{PROLOG_D}/50-forestage"),
            wrote(f"{PROLOG_D}/90-site", "#!/bin/sh\n# before forestage\nexit 0\n", 0o755),
        ),
        "forestage enable --yes",
    ),
    critical(
        "prolog-absent",
        both(removed(f"{PROLOG_D}/50-forestage"), without_companion),
        "forestage enable --yes",
    ),
    critical("epilog-absent", slurm(f"Epilog={EPILOG}\n", ""), f"{CONF}: Epilog={EPILOG}"),
    warning("prolog-absent", slurm(f"Prolog={PROLOG_D}/*\n", ""), f"{CONF}: Prolog={PROLOG}"),
    critical(
        "epilog-absent",
        both(
            slurm(f"Epilog={EPILOG}", "Epilog=/etc/epilog"),
            wrote("/etc/epilog", "#!/bin/sh\n", 0o755),
        ),
        f"{CONF}:4: Epilog=/etc/epilog is there already: run {EPILOG} at its end, or make it one of"
        " a directory (Epilog=/etc/epilog.d/*)",
    ),
    critical(
        "hook-interpreter",
        wrote(
            "/usr/lib/forestage/bin/python3",
            "#!/bin/sh\necho 'ModuleNotFoundError: No module named x' >&2\nexit 1\n",
            0o755,
        ),
    ),
    critical("hook-interpreter", removed("/usr/lib/forestage/bin/python3")),
]

PLUGINS = [
    warning(
        "plugstack-order",
        lambda node: node.at(OURS).rename(node.at(f"{PARTS}/30-forestage.conf")),
        f"{PARTS}/30-forestage.conf: `optional {COMPANION_SO} timeout=500` before the line of"
        f" pyxis.so ({PYXIS}:1)",
    ),
    warning(
        "plugstack-order",
        both(
            removed(OURS),
            wrote(COMPANION_CONF.format("22.05"), COMPANION),
            wrote(f"{PARTS}/30-forestage.conf", INCLUDE),
        ),
        # The line of the site, and not that of a package's file.
        f"{PARTS}/30-forestage.conf: `{INCLUDE.strip()}` before the line of pyxis.so ({PYXIS}:1)",
    ),
    warning(
        "companion-required",
        changed(OURS, "optional", "required"),
        f"{OURS}: optional {COMPANION_SO} timeout=500",
    ),
    warning("companion-release", lambda node: node.companion_for("24.11.5")),
    warning(
        "companion-release",
        both(
            removed("/usr/sbin/slurmd"),  # it is beside its plugins
            wrote("/opt/slurm/sbin/slurmd", "#!/bin/sh\necho slurm 24.05.1\n", 0o755),
        ),
    ),
    warning(
        "companion-advised",
        wrote(OURS, ""),
        f"/etc/slurm/plugstack.conf: optional {COMPANION_SO}, before pyxis (package"
        " forestage-spank); or `redirect: bind` in the configuration",
    ),
    warning("companion-missing", removed(COMPANION_SO)),
    warning(  # nothing is installed
        "companion-missing",
        both(wrote(OURS, INCLUDE), removed(COMPANION_SO), removed(f"{COMPANION_SO}.release")),
        "install the package forestage-spank that is built for Slurm 22.05",
    ),
    warning(  # Slurm and the companion were upgraded, plugstack.conf was not
        "companion-missing",
        both(
            wrote(OURS, INCLUDE),
            wrote("/usr/sbin/slurmd", "#!/bin/sh\necho slurm 24.11.1\n", 0o755),
            lambda node: node.companion_for("24.11.5"),
            wrote(COMPANION_CONF.format("24.11"), COMPANION),
        ),
        f"/etc/slurm/plugstack.conf: include {COMPANION_CONF.format('24.11*')}",
    ),
    warning("companion-helper", changed(OURS, "timeout=500", "helper=/opt/none")),
    critical(
        "companion-absent",
        both(
            wrote(OURS, ""),
            settings("redirect: bind\npartitions:\n  gpu:\n    redirect: spank\n"),
        ),
    ),
    warning("through-no-fuse", both(removed(PYXIS, "/dev/fuse"), settings("redirect: spank\n"))),
    warning(
        "through-no-spank",
        settings("redirect: spank\npartitions:\n  gpu:\n    cold: through\n    redirect: bind\n"),
        "partitions.gpu.redirect: spank, with the companion in plugstack.conf",
    ),
    warning(
        "spank-job-prolog",
        both(
            wrote(f"{PARTS}/90-other.conf", "optional /opt/other.so"),
            lambda node: node.plugin("/opt/other.so", "slurm_spank_job_prolog"),
        ),
        f"{PARTS}/90-other.conf: without line 1",
    ),
    critical(
        "spank-job-prolog",
        both(
            without_companion,
            wrote(f"{PARTS}/90-other.conf", "optional /opt/other.so"),
            lambda node: node.plugin("/opt/other.so", "slurm_spank_job_prolog"),
        ),
        f"{PARTS}/90-other.conf: without line 1, or `optional {COMPANION_SO}` before pyxis",
    ),
    warning(
        "pyxis-old",
        both(changed(PYXIS, " use_squashfuse=1", ""), lambda node: node.plugin(PYXIS_SO, "enroot")),
    ),
    warning(
        "pyxis-unpacks",
        changed(PYXIS, "use_squashfuse=1", "use_squashfuse=0"),
        f"{PYXIS}:1: required pyxis.so runtime_path=/run/pyxis use_squashfuse=1",
    ),
    critical("fuse-device", lambda node: node.at("/dev/fuse").chmod(0o600)),
    critical("fuse-device", both(removed("/dev/fuse"), settings("redirect: bind\n"))),
    critical("squashfuse-missing", removed("/usr/bin/squashfuse")),
]

IMPORTER = "/usr/lib/forestage/bin/forestage-importer"


def importing(text: str = "", mode: int = 0o1777) -> Callable[[GoodNode], object]:
    """pyxis asks forestage's importer, and all that an import needs is there."""

    def plant(node: GoodNode) -> None:
        node.change(PYXIS, "use_squashfuse=1", f"use_squashfuse=1 importer={IMPORTER}")
        for program in (IMPORTER, "/usr/bin/enroot"):
            node.write(program, "#!/bin/sh\n", 0o755)
        node.at("/etc/enroot").mkdir(exist_ok=True)
        node.at("/lustre/store").mkdir()
        node.at("/lustre/store").chmod(mode)
        node.config(f"registry:\n  store: /lustre/store\n{text}")

    return plant


LOCAL = "mnt/nvme/store"  # beside the cache


def local_store(node: GoodNode) -> None:
    node.at(LOCAL).mkdir()
    node.at(LOCAL).chmod(0o1777)
    node.config(f"registry:\n  store: /{LOCAL}\n")


def asked_in_vain(node: GoodNode) -> None:
    """A step an hour ago; nobody listens there now either."""
    outcome = RequestOutcome("declined", "registry-silent", request="127.0.0.1:1#a/b:1")
    events.append_events(node.places.events, [EventRecord(NOW - 3600, "step", 7, outcome)])


REGISTRY = [
    critical(
        "enroot-fails",
        both(importing(), wrote("/usr/bin/enroot", "#!/bin/sh\nexit 3\n", 0o755)),
    ),
    warning(
        "enroot-old",
        both(importing(), wrote("/usr/bin/enroot", "#!/bin/sh\necho 3.0.0\n", 0o755)),
    ),
    warning("registry-silent", asked_in_vain),
    critical("importer-missing", both(importing(), removed(IMPORTER))),
    critical("enroot-missing", both(importing(), removed("/usr/bin/enroot"))),
    critical("store-missing", both(importing(), lambda node: node.at("/lustre/store").rmdir())),
    warning("store-mode", importing(mode=0o755), "chmod 1777 /lustre/store"),
    warning("store-mode", importing(mode=0o777), "chmod 1777 /lustre/store"),
    warning("registry-no-spank", importing("redirect: bind\n")),
    warning(
        "no-store",
        both(importing(), settings("")),
        f"mkdir -m 1777 /lustre/forestage; {YAML}: registry: {{store: /lustre/forestage}}",
    ),
    warning(  # no directory for users is proposed on the disk of the cache
        "no-store",
        both(
            importing(),
            wrote("/etc/forestage/conf.d/x.yaml", "sources: [/mnt/nvme/images]\n"),
            lambda node: node.at("/mnt/nvme/images").mkdir(),
            settings(""),
        ),
        f"{YAML}: registry.store, a directory of mode 1777 that all nodes share",
    ),
    critical("store-local", both(importing(), local_store)),
    critical("store-local", both(importing(), local_store, lambda node: node.at(LOCAL).rmdir())),
    critical(
        "store-local",
        both(
            importing(),
            local_store,
            lambda node: node.link("/lustre/link", f"../{LOCAL}"),
            settings("registry:\n  store: /lustre/link\n"),
        ),
        f"{YAML}: registry.store on a file system that the nodes share",
    ),
    warning(
        "registry-not-asked",
        settings("registry:\n  store: /lustre\n"),
        "install pyxis 0.21 or later",
    ),
    warning(
        "registry-not-asked",
        both(
            settings("registry:\n  store: /lustre\n"),
            lambda node: node.plugin(PYXIS_SO, "enroot", "use_squashfuse=", "importer="),
        ),
        f"{PYXIS}:1: required pyxis.so runtime_path=/run/pyxis use_squashfuse=1"
        f" importer={IMPORTER}",
    ),
]

DISK = [
    critical("cache-not-mounted", lambda node: node.unmount("/mnt/nvme")),
    critical(
        "cache-other-disk",
        both(
            lambda node: node.unmount("/mnt/nvme"),
            wrote("/etc/forestage/conf.d/x.yaml", "require_mount: false\n"),
            wrote(
                "/var/lib/forestage/caches.json",
                '{"version": 1, "caches": [{"root": "/mnt/nvme/forestage", "point": "/mnt/nvme",'
                ' "file_system": "xfs 0"}]}',
            ),
        ),
        "mount /mnt/nvme; or, if the cache is to lie on the disk of / from now on:"
        " forestage check --accept-disk",
    ),
    warning(
        "cache-left",
        both(
            wrote(
                "/var/lib/forestage/caches.json",
                '{"version": 1, "caches": [{"root": "/mnt/nvme/old", "point": "/mnt/nvme",'
                ' "file_system": "xfs 0"}, {"root": "/mnt/nvme/gone", "point": "/mnt/nvme",'
                ' "file_system": "xfs 0"}]}',
            ),
            wrote("/mnt/nvme/old/format", "1\n"),
            wrote("/mnt/nvme/old/entries/0a/image", "bytes"),
        ),
        "forestage evict --all --cache /mnt/nvme/old (or set `cache:` to it again)",
    ),
    critical("cache-on-network", mount_of_cache("xfs /dev/md0", "nfs4 server:/x")),
    critical("cache-on-network", mount_of_cache("xfs /dev/md0", "fuse.sshfs server:/x")),
    critical("cache-read-only", mount_of_cache("/mnt/nvme rw,noatime", "/mnt/nvme ro,noatime")),
    critical("cache-read-only", mount_of_cache("/dev/md0 rw", "/dev/md0 ro,errors=remount-ro")),
    critical("cache-read-only", mount_of_cache("/dev/md0 rw", "/dev/md0 rw,emergency_ro")),
    critical(
        "cache-hidden",
        both(
            slurm("ClusterName=good", "JobContainerType=job_container/tmpfs"),
            wrote("/etc/slurm/job_container.conf", "AutoBasePath=true BasePath=/mnt/nvme/jobs\n"),
            wrote("/etc/forestage/conf.d/x.yaml", "cache: /mnt/nvme/jobs/c\n"),
        ),
        "/etc/forestage/conf.d/x.yaml: cache: /mnt/nvme/forestage",
    ),
    warning("cache-quota", mount_of_cache("/dev/md0 rw", "/dev/md0 rw,usrquota,prjquota")),
    warning("cache-quota", mount_of_cache("/dev/md0 rw", "/dev/md0 rw,grpjquota=aquota.group")),
    critical(
        "disk-errors",
        wrote("/run/forestage/disk.json", '{"since": 1.0, "why": "I/O error, dev nvme0n1"}'),
    ),
    critical("cache-not-ours", lambda node: node.at("/mnt/nvme/forestage").chmod(0o755)),
    critical(
        "cache-not-ours",
        lambda node: node.at("/mnt/nvme").chmod(0o777),
        "give it to root, `chmod go-w /mnt/nvme`, or set `cache:` to another path",
    ),
    critical("cache-full", wrote("/etc/forestage/conf.d/x.yaml", "min_free: 100%\n")),
    warning(
        "enroot-beside",
        wrote("/etc/enroot/enroot.conf", "ENROOT_DATA_PATH /mnt/nvme/enroot/${UID}\n"),
        f"{YAML}: min_free: 20%",
    ),
    warning(
        "enroot-beside",
        both(
            wrote("/etc/enroot/enroot.conf", "ENROOT_DATA_PATH /mnt/nvme/enroot\n"),
            wrote("/etc/forestage/conf.d/x.yaml", "min_free: 1%\nunpack_ratio: 0\n"),
        ),
        f"{YAML}: unpack_ratio: 3",
    ),
    warning("cache-small", lambda node: node.use("/lustre/big.sqsh", 1 << 50)),
]

REST = [
    critical("config", settings("deadline: soon\n"), f"{YAML}: deadline"),
    critical(
        "no-sources",
        wrote("/etc/forestage/conf.d/none.yaml", "sources: []\n"),
        "/etc/forestage/conf.d/none.yaml: sources: [/path/of/the/shared/file/system]",
    ),
    critical("source-missing", lambda node: node.at("/lustre").rmdir()),
    warning("source-not-mounted", lambda node: node.unmount("/lustre")),
    warning(
        "source-in-memory",
        changed("/proc/self/mountinfo", "lustre 10.0.0.1@o2ib:/big rw,flock", "tmpfs tmpfs rw"),
        f"{YAML}: sources without /lustre; or have its files replaced (mv), never changed",
    ),
    critical(
        "source-of-user",
        users_lustre,
        f'if it is a service of the site, {YAML}: user_mounts: {{"/lustre":"fuse.juicefs 994"}}',
    ),
    critical(
        "source-of-user",
        both(
            users_lustre,
            lambda node: node.at("/lustre/a").mkdir(),
            wrote(
                "/etc/forestage/conf.d/x.yaml",
                "sources: [/lustre/a]\nuser_mounts: {/x: fuse 9, /lustre: fuse.juicefs 5}\n",
            ),
        ),
        "if it is a service of the site, /etc/forestage/conf.d/x.yaml: user_mounts:"
        ' {"/x":"fuse 9","/lustre":"fuse.juicefs 994"}',
    ),
    warning("switched-off", wrote("/run/forestage/disabled", "INC-42\n")),
    warning("switched-off", settings("enabled: false\n")),
    critical("program-missing", removed("/usr/bin/setpriv")),
    critical(
        "setpriv-old",
        both(
            # Everything that is started by it fails: this is said, and no interpreter is blamed.
            wrote("/usr/bin/setpriv", "#!/bin/sh\ncase $1 in --pdeathsig) exit 1 ;; esac\n", 0o755),
            removed("/usr/lib/forestage/bin/python3"),
        ),
    ),
    warning("kernel-old", linux("5.13.0-52-generic")),
    warning("few-open-files", open_files("256", "256")),
    warning("few-open-files", open_files("1023", "1023")),
    warning("kernel-old", linux("4.18.0-553.el8_10.x86_64")),
    critical("program-missing", settings("engine: rsync\n")),
    critical("mount-namespaces", wrote("/proc/sys/user/max_mnt_namespaces", "0\n")),
    warning(
        "slurmd-mounts",
        both(removed("/proc/77/ns/mnt"), lambda node: node.link("/proc/77/ns/mnt", "mnt:[2]")),
    ),
    warning("timer-off", removed("/etc/systemd/system/timers.target.wants/forestage.timer")),
    *(
        warning("unit-gone", lambda node, path=path: node.write(f"/etc/systemd/system/{path}", ""))
        for path in (
            *("forestage-sweep.service.d/slurm.conf", "forestage-prefetch.service.d/x.conf"),
            *("timers.target.wants/forestage-sweep.timer", "forestage-metrics.timer"),
            *("timers.target.wants/forestage-room.timer", "forestage-prefetch.timer.d/x.conf"),
            "multi-user.target.wants/forestage-boot.service",
            "sockets.target.wants/forestage-ask.socket",
        )
    ),
    warning("config-listable", wrote("/run/forestage/called.prolog", "1")),
    warning("no-systemd", removed_systemd),
    warning("no-systemd", both(removed_systemd, health("/usr/sbin/nhc"))),
    warning("hold-absent", lambda node: shutil.rmtree(node.at("/run/forestage/hold"))),
    warning("hold-bounded", wrote("/run/forestage/hold/memory.high", "1073741824\n")),
    warning("hold-bounded", wrote("/run/forestage/hold/serve/memory.max", "1073741824\n")),
    warning("hold-bounded", wrote("/run/forestage/hold/cpu.max", "200000 100000\n")),
    warning("peer-service", peers("  port: 7716\n")),
    warning("peer-service", both(peers(), removed(PEER_LINK))),
    warning("peer-proof", both(peers(), lambda node: (node.root / "key").chmod(0o644))),
    warning("peer-port", both(peers(), GoodNode.drop_sign)),
    warning("peer-loopback", both(peers(), listening("0100007F"))),
    note("peer-service", changed("/proc/net/tcp", ":1E25", ":1E26")),
    note("peer-service", removed(PEER_LINK)),
    note("peer-proof", lambda node: node.at("/key").chmod(0o644)),
    note(
        "peer-service",
        both(
            *(removed_systemd, health("/usr/lib/forestage/bin/forestage-health")),
            changed("/proc/net/tcp", ":1E25", ":1E26"),
        ),
        "slurm.conf: HealthCheckProgram=/usr/lib/forestage/bin/forestage-health starts it",
    ),
    note("peer-port", GoodNode.drop_sign),
    note("peer-loopback", listening("0100007F")),
    note("peer-loopback", both(removed("/proc/net/tcp"), listening6(LOOPBACK6))),
    note("peer-silent", both(peers(), silent("n7"))),
    note("peer-silent", silent("n7", "n8")),
    unknown("not-root", lambda node: setattr(node, "is_root", False)),
]

SEEN = both(
    lambda node: node.use("/lustre/a.sqsh", 20 << 20),
    lambda node: node.use("/lustre/b.sqsh", 30 << 20),
)
ENROOT = '#!/bin/bash\nconfig::export ENROOT_SYSCONF_PATH "{}"\n'
LEFT = "/raid/enroot/data/1001/pyxis_77.0"

SETTINGS = [
    warning(
        "removed-key",
        settings("partitions: {gpu: {on_error: drain}}\non_error: continue\n"),
        f"{YAML}: remove on_error",
    ),
    warning(
        "partition-unknown",
        both(
            slurm("ClusterName=good", "PartitionName=gpu Nodes=n1\nPartitionName=DEFAULT State=UP"),
            settings("partitions: {gpuu: {enabled: false}, gpu: {enabled: true}}\n"),
        ),
        f"{YAML}: partitions: one of gpu",
    ),
    warning(
        "deadline-launch",
        settings("redirect: spank\ncold: wait\ndeadline: 30m\n"),
        f"{YAML}: deadline: 8m",
    ),
    warning(
        "deadline-launch",
        settings("partitions: {gpu: {redirect: spank, cold: wait, deadline: 30m}}\n"),
        f"{YAML}: deadline: 8m",
    ),
    critical(
        "source-in-cache",
        both(
            wrote("/etc/forestage/conf.d/x.yaml", "sources: [/lustre, /mnt/nvme/forestage/x]\n"),
            lambda node: node.at("/mnt/nvme/forestage/x").mkdir(),
        ),
        "/etc/forestage/conf.d/x.yaml: sources without /mnt/nvme/forestage/x",
    ),
    warning(
        "cache-in-source",
        wrote("/etc/forestage/conf.d/x.yaml", "sources: [/lustre, /mnt/nvme]\n"),
        "/etc/forestage/conf.d/x.yaml: sources: the shared file systems only",
    ),
    critical(
        "max-image-size-small",
        both(SEEN, settings("max_image_size: 1MiB\n")),
        f"{YAML}: max_image_size: 30MiB",
    ),
    warning("keeps-nothing", settings("low_watermark: 0%\n"), f"{YAML}: low_watermark"),
    warning(
        "bind-over-redirects",
        wrote(
            "/etc/enroot/mounts.d/50-site.fstab", "# ours\n/lustre /lustre none bind,nosuid 0 0\n"
        ),
        "/etc/enroot/mounts.d/50-site.fstab: rbind instead of bind in line 2",
    ),
    warning(
        "bind-over-redirects",
        both(
            wrote("/usr/local/bin/enroot", ENROOT.format("/usr/local/etc/enroot"), 0o755),
            wrote("/usr/local/etc/enroot/mounts.d/50-site.fstab", "/lustre bind\n"),
        ),
        "/usr/local/etc/enroot/mounts.d/50-site.fstab: rbind instead of bind in line 1",
    ),
    warning(
        "bind-over-redirects",
        both(
            wrote("/proc/7/comm", "slurmd\n"),
            wrote("/proc/7/status", OF_ROOT),
            wrote("/proc/7/environ", "A=b\0PATH=/opt/enroot/bin:/usr/bin\0"),
            wrote("/opt/enroot/bin/enroot", ENROOT.format("/opt/enroot/etc"), 0o755),
            wrote("/opt/enroot/etc/mounts.d/50-site.fstab", "/lustre bind\n"),
        ),
        "/opt/enroot/etc/mounts.d/50-site.fstab: rbind instead of bind in line 1",
    ),
    Planted(
        "unknown",
        "enroot-unread",
        wrote("/usr/local/bin/enroot", "#!/bin/sh\nexec somewhere\n", 0o755),
        "ln -s DIRECTORY /etc/enroot, where enroot's configuration lies in another",
    ),
    warning(
        "bind-by-hook",
        both(
            wrote("/etc/enroot/hooks.d/50-site.sh", 'echo /lustre bind >> "${ENROOT_MOUNTS}"\n'),
            wrote("/etc/enroot/hooks.d/10-home.sh", 'echo "${HOME}" >> "${ENROOT_MOUNTS}"\n'),
            wrote("/etc/enroot/hooks.d/20-site.sh", "export A=b\n"),
        ),
        "/etc/enroot/hooks.d/50-site.sh: rbind in what it writes to ENROOT_MOUNTS",
    ),
    warning(
        "bind-over-redirects",
        both(
            wrote("/etc/enroot/enroot.conf", "ENROOT_MOUNT_HOME   yes # as ever\n"),
            wrote("/etc/forestage/conf.d/x.yaml", "sources: [/lustre, /home/images]\n"),
            lambda node: node.at("/home/images").mkdir(parents=True),
        ),
    ),
    warning(
        "containers-left",
        both(
            wrote("/etc/enroot/enroot.conf", "ENROOT_DATA_PATH /raid/enroot/data/$(id -u)\n"),
            lambda node: node.at(LEFT).mkdir(parents=True),
        ),
        "as their owner: enroot remove --force pyxis_77.0 (forestage deletes nothing of enroot's)",
    ),
]


def found_bad(result: str, seconds_ago: float) -> Callable[[GoodNode], object]:
    gone = ("ab" * 16,) if result == "evicted" else ()
    bad = BadEntryOutcome(
        "bad", image="/lustre/a.sqsh", key="ab" * 16, since=NOW - 9 * 86400, evicted=gone
    )
    event = EventRecord(NOW - seconds_ago, "sweep", 0, bad)
    return lambda node: events.append_events(node.places.events, [event])


BAD = [
    critical(
        "wrong-bytes",
        found_bad("evicted", 6 * 86400),
        "`forestage explain JOBID` marks each such job; for the disk see `dmesg`",
    ),
    critical(
        "wrong-bytes",
        found_bad("stays", 60),
        "`forestage explain JOBID` marks each such job; for the disk see `dmesg`, and"
        f" `forestage evict {'ab' * 16}`",
    ),
]

CACHE = "/mnt/nvme/forestage"


def entry(key: str, seconds_ago: float, *files: str) -> Callable[[GoodNode], object]:
    """An entry whose record says nothing; its directory was changed last so long ago."""

    def plant(node: GoodNode) -> None:
        directory = f"{CACHE}/entries/{key}"
        node.at(directory).mkdir(parents=True)
        for name in files:
            node.write(f"{directory}/{name}", "")
        os.utime(node.at(directory), (NOW, NOW - seconds_ago))

    return plant


VANISHED = [
    warning(
        "entries-vanish",
        both(
            entry("ab" * 16, 60, "entry.json", "map"),
            entry("ac" * 16, 3600, "image"),
            entry("ad" * 16, 8 * 86400, "entry.json"),
            entry("ae" * 16, 7200, "entry.json", "image"),
        ),
        f"leave out {CACHE} where the site's Epilog, or a timer, deletes users' files",
    ),
]

LOGIN = [
    warning(
        "login-no-option",
        both(as_login, wrote(OURS, "")),
        "install the package forestage-spank for this host's Slurm,"
        " and the line that `forestage enable` prints",
    ),
    warning(
        "login-no-option",
        both(as_login, wrote(OURS, INCLUDE)),
        "install the package forestage-spank for this host's Slurm",
    ),
    warning("login-no-option", both(as_login, removed(COMPANION_SO))),
    warning("login-no-check", both(as_login, changed(OURS, "timeout=500", "helper=/opt/none"))),
    warning("companion-required", both(as_login, changed(OURS, "optional", "required"))),
    unknown("slurm-conf", both(as_login, removed(CONF))),
    unknown("plugstack-conf", both(as_login, loop(OURS))),
]

SQUEUE = '#!/bin/sh\nn=$(echo "$SQUEUE_FORMAT2" | sed "s/^[^|]*|\\([0-9a-f]*\\)<.*/\\1/")\n'
WAITING = SQUEUE + 'echo "7|$n<1000|1|gpu|Priority|0|(null)|$n>stage=/lustre/a"\n'
SDIAG = "#!/bin/sh\necho 'Jobs pending:   {}'\n"


def prefetch_host(**programs: str) -> Callable[[GoodNode], object]:
    """The host that reads the queue, with a list that it has just made."""
    answers = {"squeue": WAITING, "sinfo": "#!/bin/sh\necho 'gpu|2|n[1-2]'\n"}
    answers |= {"sdiag": SDIAG.format(1), **programs}

    def plant(node: GoodNode) -> None:
        peers("prefetch: {host: n1}\n")(node)
        for name, text in answers.items():
            node.write(f"/usr/bin/{name}", text, 0o755)
        expected_list.write_list(node.places, ExpectedImageList(1, NOW - 30, NOW + 900))

    return plant


def prefetch_node(node: GoodNode) -> None:
    peers("prefetch: {host: '127.0.0.1:1'}\n")(node)


PREFETCH = [
    warning(
        "prefetch-peers",
        both(
            prefetch_host(),
            settings("prefetch: {host: n1}\npeers: {enabled: false}\n"),
        ),
    ),
    warning("prefetch-queue", prefetch_host(squeue="#!/bin/sh\necho no >&2; exit 1\n")),
    warning("prefetch-queue", prefetch_host(sinfo="#!/bin/sh\nexit 1\n")),
    warning("prefetch-queue", prefetch_host(sdiag="#!/bin/sh\necho 'Jobs running: 3'\n")),
    warning("prefetch-hidden", prefetch_host(sdiag=SDIAG.format(400))),
    warning(
        "prefetch-old",
        both(
            prefetch_host(),
            lambda node: expected_list.write_list(
                node.places, ExpectedImageList(1, NOW - 600, NOW)
            ),
        ),
    ),
    warning("prefetch-old", both(prefetch_host(), removed("/run/forestage/expected.json"))),
    warning("prefetch-host", prefetch_node),
]

PLANTED = [
    *(*BAD, *SLURM, *PLUGINS, *REGISTRY, *DISK, *REST, *SETTINGS, *VANISHED, *LOGIN, *PREFETCH),
]


@pytest.mark.parametrize("mistake", PLANTED, ids=lambda one: one.id)
def test_check_finds_each_planted_mistake_with_its_change_and_nothing_else(
    node: GoodNode, mistake: Planted
) -> None:
    mistake.plant(node)
    done = node.check()
    assert [(one.id, one.level) for one in done.findings] == [(mistake.id, mistake.level)]
    change = done.findings[0].change.replace(str(node.root), "")
    assert change
    if mistake.change:
        assert change == mistake.change
    word = "OK" if mistake.level == "note" else mistake.level.upper()
    assert words(done).splitlines()[0] == f"forestage {word} - 1 finding: {mistake.id}"
    assert (done.code == 0) == (mistake.level == "note")


def findings_made() -> set[str]:
    """The id of each Finding that the source makes."""
    package = Path(check.__file__).parents[1]
    calls = (
        call
        for file in (*package.glob("check/*.py"), *package.glob("features/*/checks.py"))
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "CheckFinding"
    )
    return {ast.literal_eval(call.args[0]) for call in calls}


def test_each_finding_has_a_planted_mistake() -> None:
    """Whoever adds a finding adds how it comes about."""
    made = findings_made()
    assert len(made) > 40
    elsewhere = {"source-hangs", "striping", "max-size-small"}
    elsewhere |= {"check-hangs", "store-hangs", "store-unwritable", "cache-hangs"}
    elsewhere |= {"prefetch-clock", "prefetch-bandwidth"}
    elsewhere |= {"peer-names", "peer-unproven", "slurmds-share-run", "run-full", "log-full"}
    assert made == {one.id for one in PLANTED} | elsewhere


@pytest.mark.parametrize("lack", ["space", "inodes"])
@pytest.mark.parametrize(
    ("folder", "found"),
    [
        ("/run/forestage", ("run-full", "critical")),
        ("/var/log/forestage", ("log-full", "warning")),
    ],
)
def test_check_finds_a_full_file_system_of_run_or_log_files(
    node: GoodNode, folder: str, found: tuple[str, str], lack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RootedTree.find_statvfs
    blocks, inodes = (3, 50) if lack == "space" else (3000, 0)
    # f_bsize, f_frsize, f_blocks, f_bfree, f_bavail, f_files, f_ffree, f_favail, f_flag, f_namemax
    full = os.statvfs_result((4096, 4096, 4000, blocks, blocks, 100, inodes, inodes, 0, 255))
    monkeypatch.setattr(
        RootedTree,
        "find_statvfs",
        lambda files, path: full if path == folder else real(files, path),
    )
    (one,) = node.check().findings
    assert (one.id, one.level) == found
    assert one.what == f"the file system of {folder} has no {lack} left"


def test_read_only_configuration_directory_that_users_may_list_is_only_a_note(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an image that all nodes boot, or a ConfigMap."""
    node.write("/run/forestage/called.epilog", "1")
    disk = RootedTree.find_statvfs

    def read_only(files: RootedTree, path: str) -> object:
        return (
            SimpleNamespace(f_flag=os.ST_RDONLY) if path == "/etc/forestage" else disk(files, path)
        )

    monkeypatch.setattr(RootedTree, "find_statvfs", read_only)
    done = node.check()
    assert [(one.id, one.level) for one in done.findings] == [("config-listable", "note")]
    assert (done.status, done.code) == ("ok", 0)
    assert words(done).startswith("forestage OK - 1 finding: config-listable\n")


def test_operations_page_lists_the_id_of_each_finding() -> None:
    section = (REPO / "docs/operations.md").read_text().split("## Is the node set up well?")[1]
    listed = re.findall(r"`([a-z-]+)`", section.split("| about | ids |")[1].split("\n\n")[0])
    assert sorted(listed) == sorted(findings_made())


@pytest.mark.parametrize("why", ["missing", "release"])
def test_required_companion_that_cannot_be_loaded_is_critical(node: GoodNode, why: str) -> None:
    node.change(OURS, "optional", "required")
    if why == "missing":
        node.remove("/usr/lib/forestage/spank/forestage.so")
    else:
        node.companion_for("24.11.5")
    first, second = node.check().findings
    assert (first.id, first.level) == (f"companion-{why}", "critical")
    assert second.id == "companion-required"
    assert second.change == f"{OURS}: {COMPANION.strip()}"


GOOD: dict[str, Callable[[GoodNode], object]] = {
    "wrong bytes were found long ago": found_bad("evicted", 8 * 86400),
    "images of registries go to a store": importing(),
    "a service's FUSE is named": both(
        users_lustre, settings("user_mounts: {/lustre: fuse.juicefs 994}\n")
    ),
    "pyxis asks another importer": both(
        changed(PYXIS, "use_squashfuse=1", "use_squashfuse=1 importer=/opt/other"),
        settings("registry:\n  store: /none\n"),
    ),
    "images of registries are left alone": both(
        importing("  enabled: false\n", 0o700), removed(IMPORTER)
    ),
    "peers are served and proven": peers(),
    "peers are switched off": both(
        settings("peers: {enabled: false}\n"), removed(PEER_LINK), GoodNode.drop_sign, silent("n7")
    ),
    "an engine that has no peers": both(
        settings("engine: rsync\n"),
        wrote("/usr/bin/rsync", "#!/bin/sh\n", 0o755),
        removed(PEER_LINK),
        GoodNode.drop_sign,
    ),
    "the peer service listens at an address of the node's, and at the loopback's too": both(
        listening("0100007F"), listening6(ADDRESS6)
    ),
    "the peer service of a container, which no systemd has enabled": both(
        removed(PEER_LINK), removed_systemd, health("/usr/lib/forestage/bin/forestage-health")
    ),
    "a plugin that does not run enroot is no pyxis": both(
        lambda node: node.plugin(PYXIS_SO), removed("/dev/fuse"), settings("redirect: bind\n")
    ),
    "redirect: auto, and the companion in a part of plugstack.conf": settings("redirect: auto\n"),
    "the companion by the file of its package": both(
        wrote(OURS, INCLUDE), wrote(COMPANION_CONF.format("22.05"), COMPANION)
    ),
    "the admin has chosen to do without the companion": without_companion,
    "no pyxis": removed(PYXIS),
    "nobody reads through": both(
        removed(PYXIS, "/dev/fuse"), settings("redirect: spank\ncold: shared\n")
    ),
    "enroot on another disk": wrote("/etc/enroot/enroot.conf", "ENROOT_DATA_PATH /home/.enroot\n"),
    "enroot wherever the user says": wrote("/etc/enroot/enroot.conf", "ENROOT_DATA_PATH $HOME\n"),
    "enroot beside the cache, with room": both(
        wrote("/etc/enroot/enroot.conf", "ENROOT_DATA_PATH /mnt/nvme/enroot\n"),
        wrote("/etc/forestage/conf.d/x.yaml", "min_free: 1\n"),
    ),
    "a flag implies Alloc": flags("Contain,DeferBatch"),
    "no Prolog waits so long": settings("deadline: 5m\n"),
    "Slurm allows that deadline": settings("cold: wait\ndeadline: 15s\n"),
    "no /proc, as in a container": lambda node: node.at("/proc").rename(node.at("/none")),
    "a companion of an unknown release": removed(f"{COMPANION_SO}.release"),
    "a companion of a release without numbers": wrote(f"{COMPANION_SO}.release", "nonsense\n"),
    "a slurmd that fails": both(
        lambda node: node.companion_for("24.11.5"),
        wrote("/usr/sbin/slurmd", "#!/bin/sh\nexit 1\n", 0o755),
    ),
    "a slurmd that says nothing of use": both(
        lambda node: node.companion_for("24.11.5"),
        wrote("/usr/sbin/slurmd", "#!/bin/sh\necho nonsense\n", 0o755),
    ),
    "the oldest Linux, and a redirect of the node": both(
        linux("5.14.0-503.el9.x86_64"), settings("redirect: bind\n")
    ),
    "a release of Linux that says nothing": linux("next"),
    "a slurmd that may open as many files as by default": open_files("256", "1024"),
    "a slurmd that may open any number of files": open_files("1024", "unlimited"),
    "no systemd, and slurmd's health check": both(
        removed_systemd, health("/usr/lib/forestage/bin/forestage-health")
    ),
    "no systemd, and a health check that calls ours": both(
        removed_systemd,
        health("/etc/slurm/health"),
        wrote("/etc/slurm/health", "#!/bin/sh\n/usr/lib/forestage/bin/forestage-health\n", 0o755),
    ),
    "no slurmd": both(removed("/usr/sbin/slurmd"), lambda node: node.companion_for("24.11.5")),
    "our hooks' own interpreter, which has their modules": wrote(
        "/usr/lib/forestage/bin/python3",
        # By two lines: where the clone's folder is named forestage, its line names us.
        f'#!/bin/sh\ncd {Path(sys.executable).parent}\nexec ./python3 "$@"\n',
        0o755,
    ),
    "another interpreter in a wrapper of ours": both(
        removed(f"{PROLOG_D}/50-forestage"),
        wrote("/opt/python3", "#!/bin/sh\nexit 1\n", 0o755),
        wrote(
            f"{PROLOG_D}/50-site",
            "#!/bin/sh\n/opt/python3 /opt/health.py\n"
            "/usr/libexec/forestage/prolog  # and not forestage by /opt/python3\n",
            0o755,
        ),
    ),
}


@pytest.mark.parametrize("plant", GOOD.values(), ids=GOOD.keys())
def test_check_has_no_finding_for_each_valid_variant_of_the_setup(
    node: GoodNode, plant: Callable[[GoodNode], object]
) -> None:
    plant(node)
    assert node.ids() == []


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (as_user.ChildTimeout("no answer"), ["source-hangs"]),
        (OSError(5, "I/O"), ["source-hangs"]),
        (PermissionError(13, "no"), []),  # as where the file server squashes root
    ],
)
def test_source_that_does_not_answer_is_found_and_its_striping_is_not_queried(
    node: GoodNode,
    lfs: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
    found: list[str],
) -> None:
    def call(*_: object) -> object:
        raise fault

    asked = lfs("echo 8")
    node.use("/lustre/a.sqsh", G)
    monkeypatch.setattr(as_user, "run_in_child", call)
    assert [one for one in node.ids() if one != "cache-small"] == found
    assert bool(asked.read_text()) == (not found)


def hung(node: GoodNode, path: str, ago: float = 60.0, result: str = "declined") -> None:
    outcome = RequestOutcome(result, "source-hangs" if result == "declined" else "", request=path)
    events.append_events(node.places.events, [EventRecord(NOW - ago, "prolog", 7, outcome)])


def test_check_probes_a_path_that_recently_hung_for_a_job(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.source_findings, "SOURCE_TIMEOUT", 0.2)
    hung(node, "/lustre/link/a.sqsh")
    assert node.ids() == [], "it answers now"
    monkeypatch.setattr(check.source_findings, "_read_from_path", hangs)
    (found,) = node.check().findings
    assert (found.id, found.level) == ("source-hangs", "critical")
    assert "/lustre/link/a.sqsh did not answer a job at " in found.what
    hung(node, "/lustre/link/a.sqsh", 30, "hit")
    assert node.ids() == [], "it has answered a job since"
    hung(node, "/lustre/old.sqsh", 2 * 86400)
    assert node.ids() == [], "that is long ago"


def test_check_finds_a_hanging_file_system_that_is_mounted_below_a_source(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check.source_findings, "SOURCE_TIMEOUT", 0.2)
    mounted = "/proc/self/mountinfo"
    nfs = "30 26 0:61 / /lustre/project rw - nfs4 server:/p rw\n"
    node.write(mounted, node.at(mounted).read_text() + nfs)
    assert node.ids() == []
    monkeypatch.setattr(check.source_findings, "_read_from_path", hangs)
    (found,) = node.check().findings
    assert found.what == "/lustre/project, which is mounted below a source, does not answer"


def test_hanging_fuse_mount_of_a_user_is_no_finding(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user could have the check of every node say that a source hangs."""
    mounted = "/proc/self/mountinfo"
    theirs = "30 26 0:61 / /lustre/alice rw - fuse.sshfs x rw,user_id=1000,group_id=1000\n"
    node.write(mounted, node.at(mounted).read_text() + theirs)
    hung(node, "/lustre/alice/a.sqsh")
    monkeypatch.setattr(check.source_findings, "_read_from_path", hangs)
    assert node.ids() == []


def test_hanging_part_of_check_is_reported_after_the_other_findings(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any file that is read may lie on a file system that hangs, slurm.conf as well."""
    node.config("enabled: true\nmax_size: 60\n")
    monkeypatch.setattr(check, "MESSAGE_TIMEOUT", 5.0)
    monkeypatch.setattr(check.node_findings, "list_findings", hangs)
    done = node.check()
    assert [one.id for one in done.findings] == ["max-size-small", "check-hangs"]
    assert "the node could not be looked at: no answer after 5 s" in done.findings[-1].what
    monkeypatch.setattr(check.sites, "read_named_site", hangs)
    done = node.check()
    assert ([one.id for one in done.findings], done.code) == (["check-hangs"], 3)


def test_failing_part_of_check_raises_an_error_that_names_the_part(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(check.node_findings, "list_findings", fails)
    with pytest.raises(Failed, match=r"the node could not be looked at: RuntimeError\('odd'\)"):
        node.check()
    monkeypatch.setattr(check.node_findings, "list_findings", lambda *_: os._exit(1))
    with pytest.raises(Failed, match="its process died"):
        node.check()


@pytest.mark.usefixtures("as_root")
def test_image_store_that_users_cannot_reach_is_a_finding(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing()(node)
    monkeypatch.setattr(registry_checks, "NOBODY", User("", 65534, 65534))
    node.root.chmod(0o700)
    assert node.ids() == ["store-unwritable"]


@pytest.mark.usefixtures("as_root")
def test_image_store_in_which_users_cannot_create_files_is_a_finding(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mode says that they can; a mount that is read-only, or a quota, says no."""
    importing()(node)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    (finding,) = node.check().findings
    assert (finding.id, "Read-only" in finding.what) == ("store-unwritable", True)


def test_image_store_that_hangs_is_a_finding(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing()(node)
    monkeypatch.setattr(registry_checks, "TIMEOUT", 0.2)
    monkeypatch.setattr(registry_checks, "_try_store", hangs)
    assert node.ids() == ["store-hangs"]


def test_silent_registry_is_a_finding_until_the_registry_answers_again(node: GoodNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = f"127.0.0.1:{server.getsockname()[1]}#a/b:1"
        silent = RequestOutcome("declined", "registry-silent", request=name)
        events.append_events(node.places.events, [EventRecord(NOW - 3600, "step", 7, silent)])
        assert node.ids() == []
    assert node.ids() == ["registry-silent"]
    events.append_events(
        node.places.events,
        [EventRecord(NOW - 60, "step", 8, RequestOutcome("hit", request=name, digest="sha256:0"))],
    )
    assert node.ids() == []


def test_registry_that_was_silent_two_days_ago_is_no_finding(node: GoodNode) -> None:
    outcome = RequestOutcome("declined", "registry-silent", request="127.0.0.1:1#a/b:1")
    events.append_events(node.places.events, [EventRecord(NOW - 2 * 86400, "step", 7, outcome)])
    assert node.ids() == []


# --- Lustre, by a fake lfs


def test_check_finds_narrow_lustre_striping_of_the_most_used_large_images(
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
    shown = words(done)
    assert "/lustre/d/narrow.sqsh (1 GiB) lies on 1 OST\n" in shown
    assert "/lustre/d/two.sqsh (1 GiB) lies on 2 OSTs\n" in shown
    assert "lfs setstripe -E -1 -c -1 -S 1M /lustre/d " in shown


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "echo 8"])
def test_lfs_output_without_a_small_stripe_count_is_no_finding(
    node: GoodNode, lfs: Callable[[str], Path], script: str
) -> None:
    asked = lfs(script)
    node.use("/lustre/a.sqsh", G)
    assert "striping" not in node.ids()
    assert asked.read_text()


# --- slurm.conf and plugstack.conf as sites write them


def test_cache_smaller_than_each_image_is_found(node: GoodNode) -> None:
    SEEN(node)
    node.config("max_size: 1MiB\n")
    found = {one.id: one.change for one in node.check().findings}
    assert found["max-size-small"] == f"{node.at(YAML)}: max_size"


def test_max_size_without_a_unit_is_found_before_any_job_has_run(node: GoodNode) -> None:
    node.config("max_size: 60\n")
    told = {one.id: one.what for one in node.check().findings}["max-size-small"]
    assert told == "max_size: the cache may take 60 B, less than any image has"


def test_container_root_file_system_is_a_finding_only_after_its_step_has_ended(
    node: GoodNode, as_root: None
) -> None:
    node.write("/etc/enroot/enroot.conf.d/data.conf", 'ENROOT_DATA_PATH "/raid/enroot/data/${UID}"')
    for name in ("pyxis_77.0", "pyxis_mine", "other"):
        node.at(f"/raid/enroot/data/1001/{name}").mkdir(parents=True)
    node.write("/proc/500/status", "Uid:\t0\t0\t0\t0\n")
    node.write("/proc/500/cmdline", "slurmstepd: [77.0]\0")
    assert node.check().findings == ()
    node.write("/proc/500/cmdline", "slurmstepd: [78.0]\0")
    assert [one.id for one in node.check().findings] == ["containers-left"]


@pytest.mark.parametrize(
    "line",
    [
        "/lustre /lustre none rbind 0 0",
        "/scratch /scratch none bind 0 0",
        "${HOME} ${HOME} none bind 0 0",
        "tmpfs /tmp tmpfs size=1G 0 0",
        "#/lustre /lustre none bind 0 0",
        "/lustre",
    ],
)
def test_enroot_mount_that_covers_no_redirect_is_no_finding(node: GoodNode, line: str) -> None:
    node.write("/etc/enroot/mounts.d/50-site.fstab", f"{line}\n")
    node.write("/etc/enroot/mounts.d/readme", "/lustre /lustre none bind 0 0\n")
    assert node.check().findings == ()


def test_check_reports_which_enroot_configuration_was_read(node: GoodNode) -> None:
    assert node.check().enroot == ""
    node.write("/usr/bin/enroot", ENROOT.format("/etc/enroot"), 0o755)
    node.write("/etc/enroot/mounts.d/50-site.fstab", "/a /a none bind\n/b bind\n/c rbind\n")
    said = (
        "/usr/bin/enroot, configured in /etc/enroot; /etc/enroot/mounts.d: 1 fstab, 2 binds"
        " without what is mounted below"
    )
    assert node.check().enroot == said
    assert words(node.check()).splitlines()[-1] == f"read    {said}"


@pytest.mark.cases(2)
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(
    ("path", "id"),
    [
        (CONF, "slurm-conf"),
        ("/etc/slurm/plugstack.conf", "plugstack-conf"),
        (OURS, "plugstack-conf"),
    ],
)
def test_unreadable_slurm_file_is_a_finding_and_the_companion_is_not_called_absent(
    node: GoodNode, path: str, id: str, marked: bool
) -> None:
    """Nothing is said of a companion that is absent: it may be named there."""
    loop(path)(node)
    node.places.run.mkdir(parents=True, exist_ok=True)
    node.places.loaded.touch() if marked else None
    done = node.check().findings
    assert [one.id for one in done] == [id]
    assert done[0].what == f"{node.at(path)} cannot be read: Too many levels of symbolic links"


def test_slurm_conf_with_too_many_includes_is_an_unknown_finding(node: GoodNode) -> None:
    node.write("/etc/slurm/p.conf", "")
    node.write(CONF, "Include p.conf\n" * MAX_FILES)
    (found,) = node.check().findings
    assert (found.id, found.level) == ("slurm-conf", "unknown")
    assert found.what == f"/etc/slurm/p.conf: more than {MAX_FILES} files are included"


def test_auto_redirect_is_none_while_a_plugstack_conf_that_was_loaded_cannot_be_read(
    node: GoodNode,
) -> None:
    files, settings = RootedTree(node.root), load_config(node.places.etc)
    loop(OURS)(node)
    found = sites.read_named_site(files, "")
    assert (
        plugstack_findings.resolve_auto_redirects(
            files, found, settings, is_marked=True
        ).config.redirect
        == "none"
    )
    assert (
        plugstack_findings.resolve_auto_redirects(
            files, found, settings, is_marked=False
        ).config.redirect
        == "bind"
    )
    assert (
        plugstack_findings.resolve_auto_redirects(
            files, None, settings, is_marked=True
        ).config.redirect
        == "none"
    )


def test_companion_named_before_an_unreadable_plugstack_file_makes_the_redirect_spank(
    node: GoodNode,
) -> None:
    loop(PYXIS)(node)
    assert node.ids() == ["plugstack-conf"]
    found = sites.read_named_site(RootedTree(node.root), "")
    settings = load_config(node.places.etc)
    decided = plugstack_findings.resolve_auto_redirects(
        RootedTree(node.root), found, settings, is_marked=True
    )
    assert decided.config.redirect == "spank"


@pytest.mark.parametrize("path", [CONF, "/etc/slurm/plugstack.conf", OURS])
def test_non_utf8_byte_in_a_slurm_file_is_no_finding(node: GoodNode, path: str) -> None:
    node.write(path, b"# f\374r M\374ller\n" + node.at(path).read_bytes())
    assert node.ids() == []


def test_non_utf8_byte_in_a_plugins_path_is_printed_escaped(node: GoodNode) -> None:
    node.write(OURS, COMPANION.encode() + b"required /opt/f\374r.so\n")
    node.plugin(os.fsdecode(b"/opt/f\374r.so"), "slurm_spank_job_prolog")
    done = node.check()
    assert [one.what for one in done.findings] == [
        "/opt/f\\udcfcr.so defines slurm_spank_job_prolog"
    ]


def test_job_container_conf_is_a_finding_if_missing_but_not_for_a_non_utf8_byte(
    node: GoodNode,
) -> None:
    path = "/etc/slurm/job_container.conf"
    node.slurm("ClusterName=good", "JobContainerType=job_container/tmpfs")
    node.write(path, "BasePath=/mnt/none\n")
    assert node.ids() == []
    node.remove(path)
    assert node.ids() == ["job-container-conf"]
    node.write(path, b"BasePath=/mnt/nvme # f\374r\n")
    assert "job-container-conf" not in node.ids()


CONFIGLESS = "/run/slurm/conf/slurm.conf"


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("release", "found"),
    [("23.11.4", []), ("", []), ("23.02.7", ["hook-missing"]), ("22.05.8", ["hook-missing"])],
)
def test_hook_named_without_a_directory_is_found_beside_slurm_conf_since_slurm_23_11(
    node: GoodNode, release: str, found: list[str]
) -> None:
    """As slurmctld sends it to a configless node."""
    node.slurm(f"Prolog={PROLOG_D}/*", "Prolog=prolog.sh")
    for name in ("slurm.conf", "plugstack.conf"):
        node.write(f"/run/slurm/conf/{name}", node.at(f"/etc/slurm/{name}").read_bytes())
    node.write("/run/slurm/conf/plugstack.conf", f"{COMPANION}{PYXIS}")
    node.write("/run/slurm/conf/prolog.sh", f"#!/bin/sh\nexec {PROLOG}\n", 0o755)
    node.conf = CONFIGLESS
    node.companion_for(release)
    node.write("/usr/sbin/slurmd", f"#!/bin/sh\necho slurm-wlm {release}\n", 0o755)
    # To an older Slurm it is no file, whatever lies there.
    assert [one for one in node.ids() if one != "prolog-absent"] == found
    node.remove("/run/slurm/conf/prolog.sh")
    assert "hook-missing" in node.ids()


@pytest.mark.parametrize("listed", [False, True])
def test_check_notes_peer_nodes_with_unresolvable_names(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    """By root's own list where there is one; a name service that hangs is no answer."""
    monkeypatch.setattr(peers_checks, "HANGS", 3.0)
    monkeypatch.setattr(
        peers_checks, "is_resolvable", lambda name: hangs() if name == "n2" else name > "n3"
    )
    node.slurm("ClusterName=good", "ClusterName=good\nNodeName=n[1-4] CPUs=8")
    if listed:
        node_list.write_list(node.places, node_list.PeerNodeList(NOW, {"n2": "", "n4": ""}))
    peers()(node)
    (one,) = node.check().findings
    what = "1 of 2 nodes that were tried have no address here: n2"
    if not listed:
        what = "3 of 4 nodes that were tried have no address here: n1, n2, n3"
    assert (one.id, one.level, one.what) == ("peer-names", "note", what)
    node.config("peers: {enabled: false}\n")
    assert node.ids() == []


def test_munge_key_not_yet_proven_by_another_node_is_a_note(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key of its own, as Debian's package makes it, lets a node read its own credential."""
    monkeypatch.setattr(
        peers_checks.auth, "make_authenticator", lambda *_: auth.MungeAuthenticator()
    )
    monkeypatch.setattr(peers_checks.auth, "check_authenticator", lambda prover: None)
    monkeypatch.setattr(peers_checks, "is_resolvable", lambda name: True)
    assert node.ids() == [], "one node has no other"
    node.slurm("ClusterName=good", "ClusterName=good\nNodeName=n[1-2] CPUs=8")
    for text in ("", "peers: {enabled: true}\n"):
        node.config(text)
        done = node.check()
        assert ([one.id for one in done.findings], done.code) == (["peer-unproven"], 0)
    proven_node.record_proven_node(node.places, "n2", NOW)
    assert node.ids() == []


def test_node_name_that_does_not_resolve_is_no_finding_if_slurm_knows_a_valid_address(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_checks, "is_resolvable", lambda name: name in ("n1", "10.0.0.2"))
    node.slurm("ClusterName=good", "ClusterName=good\nNodeName=n[1-3] CPUs=8")
    now = time.time()
    listed = PeerNodeList(now, {"n1": "", "n2": "10.0.0.2", "n3": "10.0.0.3"})
    monkeypatch.setattr(peers_checks.node_list, "_find_recent_list", lambda *_: listed)
    (one,) = node.check().findings
    assert one.what == "1 of 3 nodes that were tried have no address here: n3"


def test_check_resolves_only_16_node_names_of_a_large_cluster(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_checks, "is_resolvable", lambda _: False)
    node.slurm("ClusterName=good", "ClusterName=good\nNodeName=n[1-9000] CPUs=8")
    peers()(node)
    what = node.check().findings[0].what
    assert what.startswith("16 of 16 nodes")
    assert what.endswith(" and 8 more")


def slurmd_runs(node: GoodNode, pid: int, parent: int, run: str) -> None:
    node.write(f"/proc/{pid}/comm", "slurmd\n")
    node.write(f"/proc/{pid}/status", OF_ROOT)
    node.write(f"/proc/{pid}/stat", f"{pid} (slurmd) S {parent}" + " 0" * 20)
    node.at(f"{run}/run/forestage").mkdir(parents=True, exist_ok=True)
    if not node.at(f"/proc/{pid}/root").is_symlink():
        node.at(f"/proc/{pid}/root").symlink_to(node.at(run))


def test_two_slurmds_that_share_run_forestage_are_a_finding(node: GoodNode) -> None:
    slurmd_runs(node, 77, 1, "/")
    slurmd_runs(node, 91, 77, "/")  # a child that is about to be another program
    slurmd_runs(node, 92, 1, "/elsewhere")
    assert node.ids() == []
    slurmd_runs(node, 93, 1, "/")
    (one,) = node.check().findings
    assert one.id == "slurmds-share-run"
    assert one.what == "2 slurmds (processes 77, 93) have the same /run/forestage"


def test_users_process_named_slurmd_does_not_count_as_slurmd(node: GoodNode) -> None:
    """By its real id: su(1), started by a link of that name, has an effective one of root's."""
    node.remove("/proc/77/status")  # the node's own
    node.write("/proc/7/comm", "slurmd\n")
    node.write("/proc/7/status", "Name:\tslurmd\nUid:\t4242\t0\t0\t0\n")
    node.link("/proc/7/ns/mnt", "mnt:[9]")
    open_files("8", "16", pid=7)(node)
    node.write("/proc/7/environ", "PATH=/home/bob/bin\0")
    node.write("/home/bob/bin/enroot", ENROOT.format("/home/bob/etc"), 0o755)
    node.write("/home/bob/etc/mounts.d/x.fstab", "/lustre bind\n")
    assert node.ids() == []
    node.write("/proc/7/status", f"Name:\tslurmd\n{OF_ROOT}")
    assert set(node.ids()) == {"slurmd-mounts", "few-open-files", "bind-over-redirects"}


def test_step_manager_that_is_just_being_started_is_no_second_slurmd(
    node: GoodNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurmd_runs(node, 77, 1, "/")
    slurmd_runs(node, 93, 1, "/")
    become = functools.partial(node.write, "/proc/93/comm", "slurmstepd\n")
    monkeypatch.setattr(check.node_findings, "sleep", lambda _: become())
    assert node.ids() == []


def test_check_counts_the_entries_that_lost_a_file_within_a_week(node: GoodNode) -> None:
    VANISHED[0].plant(node)
    (one,) = node.check().findings
    assert one.what == (
        f"files vanish from entries (2 since {format_local_time(NOW - 3600)}): does something on"
        " this node delete by owner?"
    )


def test_damaged_entry_with_all_its_files_does_not_count_as_vanished(node: GoodNode) -> None:
    entry("ae" * 16, 7200, "entry.json", "image")(node)
    node.write(f"{CACHE}/entries/stray", "")
    assert node.ids() == []


def test_slurm_conf_with_a_missing_include_is_a_finding(node: GoodNode) -> None:
    node.conf = "/opt/slurm.conf"
    node.write("/opt/slurm.conf", "Include /nowhere\n")
    assert node.ids() == ["slurm-conf"]


@pytest.mark.parametrize("text", ["Serial", "Serial,RunInJob", "X11,Serial"])
def test_findings_about_prolog_flags_propose_one_common_line(node: GoodNode, text: str) -> None:
    flags(text)(node)
    found = [one for one in node.check().findings if one.id.startswith("prolog-")]
    assert len(found) >= 2
    (line,) = {one.change.partition("PrologFlags=")[2] for one in found}
    assert not {"Serial", "RunInJob"} & set(line.split(","))
    assert "DeferBatch" in line


def test_hook_called_by_a_wrapper_script_is_recognized(node: GoodNode) -> None:
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
    [("prolog", "Prolog=/etc/slurm/prolog.d/*\n"), ("epilog", f"Epilog={NodePaths().epilog}\n")],
)
def test_hook_line_removed_from_slurm_conf_after_jobs_ran_is_a_finding(
    node: GoodNode, name: str, line: str
) -> None:
    """As when configuration management puts an old slurm.conf back."""
    node.use("/lustre/a.sqsh", 1, hook="prolog")
    node.use("/lustre/a.sqsh", 1, hook="epilog")
    assert node.ids() == []
    node.slurm(line, "")
    assert node.ids() == [f"{name}-absent"]


def test_broken_configuration_does_not_hide_findings_about_slurm(node: GoodNode) -> None:
    node.config("deadline: soon\nengine: magic\n")
    node.slurm("PrologFlags=Alloc,DeferBatch", "PrologFlags=Alloc,DeferBatch,Serial")
    assert node.ids() == ["config", "config", "prolog-serial"]


def test_directory_among_the_prolog_scripts_is_found_as_not_executable(node: GoodNode) -> None:
    """`Prolog=/etc/slurm/prolog.d/*` matches it, too, and slurmd would try to run it."""
    node.write("/etc/slurm/prolog.d/40-old/prolog", "#!/bin/sh\n", 0o755)
    node.remove("/etc/slurm/prolog.d/50-forestage")
    assert node.ids() == ["hook-not-executable", "prolog-absent"]


def test_script_name_with_control_characters_is_printed_escaped(node: GoodNode) -> None:
    odd = os.fsencode(node.at("/etc/slurm/prolog.d/")) + b"/caf\xe9\x1b[2J"
    os.symlink("nowhere", odd)
    done = node.check()
    assert [one.id for one in done.findings] == ["hook-missing"]
    assert msgspec.json.encode(done)
    assert "caf\\udce9\\x1b[2J" in words(done)


@pytest.mark.usefixtures("as_root", "open_path")
def test_check_by_an_ordinary_user_finds_only_not_root(node: GoodNode) -> None:
    node.is_root = False
    os.seteuid(65534)
    try:
        found = node.ids()
    finally:
        os.seteuid(0)
    assert found == ["not-root"]


# --- the command


def invoke(node: GoodNode, *args: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["check", *args], obj=CommandContext(node.places, Frozen()))
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_check_exits_like_a_nagios_plugin_by_the_worst_level(node: GoodNode, as_root: None) -> None:
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


@pytest.mark.parametrize(
    ("levels", "status", "code"),
    [
        ((), "ok", 0),
        (("unknown",), "unknown", 3),
        (("unknown", "warning"), "warning", 1),
        (("unknown", "critical", "warning"), "critical", 2),
    ],
)
def test_check_status_of_a_known_problem_takes_precedence_over_unknown(
    levels: tuple[FindingLevel, ...], status: str, code: int
) -> None:
    report = check.make_report(
        CheckFinding("x", level, "what", "why", "change") for level in levels
    )
    assert (report.status, report.code) == (status, code)


def test_check_changes_no_file(node: GoodNode) -> None:
    def tree() -> set[tuple[str, float]]:
        files = node.root.rglob("*")
        return {(str(f), os.lstat(f).st_mtime) for f in files}

    before = tree()
    node.check()
    assert tree() == before


@pytest.mark.parametrize("host", [prefetch_host(), prefetch_host(sdiag=SDIAG.format(21))])
def test_prefetch_host_that_reads_the_queue_has_no_finding(
    node: GoodNode, host: Callable[[GoodNode], object]
) -> None:
    host(node)
    assert node.ids() == []


@pytest.mark.parametrize(
    ("ahead", "known", "ids"),
    [
        (-30.0, PrefetchRecord(), []),
        (prefetch_checks.SKEW + 1, PrefetchRecord(), ["prefetch-clock"]),
        (-prefetch_checks.LATE - 1, PrefetchRecord(), ["prefetch-old"]),
        (-30.0, PrefetchRecord(idle=BUSY), ["prefetch-bandwidth"]),
        (-30.0, PrefetchRecord((ImageInspection("/a", 7, 1.0, 1.0),), idle=BUSY), []),
    ],
)
def test_check_finds_a_skewed_or_old_prefetch_list_and_unmeasured_bandwidth(
    node: GoodNode,
    monkeypatch: pytest.MonkeyPatch,
    ahead: float,
    known: PrefetchRecord,
    ids: list[str],
) -> None:
    prefetch_node(node)
    prefetch_record.write_record(node.places, known)
    told = ExpectedImageList(1, NOW + ahead, NOW + 900)
    monkeypatch.setattr(expected_list, "fetch_list", lambda *_: told)
    assert node.ids() == ids
