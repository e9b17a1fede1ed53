"""What `forestage check` prints, for a good node and for one with findings of each subsystem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from forestage.errors import Failed
from forestage.features.peers import node_list
from forestage.features.registry import checks as registry_checks
from forestage.system.as_user import User
from goldens import as_text, compare, must_be_as_kept, normalise
from goodnode import GoodNode, words

PARTS = "/etc/slurm/plugstack.conf.d"
OURS, PYXIS = f"{PARTS}/10-forestage.conf", f"{PARTS}/20-pyxis.conf"
YAML = "/etc/forestage/conf.d/x.yaml"
IMPORTER = "/usr/lib/forestage/bin/forestage-importer"


def of_slurm(node: GoodNode) -> None:
    node.slurm("PrologFlags=Alloc,DeferBatch", "PrologFlags=RunInJob,Serial\nPrologTimeout=10")
    node.slurm("Epilog=/usr/libexec/forestage/epilog", "Epilog=/opt/epilog")
    node.remove("/etc/slurm/prolog.d/50-forestage")
    node.write("/etc/slurm/prolog.d/README", "read me")
    node.slurm("ClusterName=good", "ClusterName=good\nPartitionName=gpu Nodes=n1")
    node.config("partitions: {gpuu: {enabled: false}}\nredirect: bind\ncold: wait\ndeadline: 5m\n")


def of_companion(node: GoodNode) -> None:
    node.at(OURS).rename(node.at(f"{PARTS}/30-forestage.conf"))
    node.change(f"{PARTS}/30-forestage.conf", "optional", "required")
    node.companion_for("24.11.5")
    node.write(f"{PARTS}/90-other.conf", "optional /opt/other.so")
    node.plugin("/opt/other.so", "slurm_spank_job_prolog")


def without_companion(node: GoodNode) -> None:
    node.write(OURS, "")
    node.config("redirect: bind\npartitions:\n  gpu:\n    redirect: spank\n    cold: through\n")


def of_pyxis(node: GoodNode) -> None:
    node.change(PYXIS, "use_squashfuse=1", "use_squashfuse=0")


def of_fuse(node: GoodNode) -> None:
    node.remove("/usr/bin/squashfuse")
    node.at("/dev/fuse").chmod(0o600)


def of_enroot(node: GoodNode) -> None:
    node.write("/etc/enroot/enroot.conf", "ENROOT_DATA_PATH /mnt/nvme/enroot/${UID}\n")
    node.write("/etc/enroot/mounts.d/50-site.fstab", "/lustre /lustre none bind,nosuid 0 0\n")
    node.write("/etc/enroot/hooks.d/50-site.sh", 'echo /lustre bind >> "${ENROOT_MOUNTS}"\n')
    node.at("/mnt/nvme/enroot/1001/pyxis_77.0").mkdir(parents=True)


def of_cache(node: GoodNode) -> None:
    node.change("/proc/self/mountinfo", "/dev/md0 rw", "/dev/md0 rw,usrquota")
    node.at("/mnt/nvme/forestage").chmod(0o755)
    node.write("/run/forestage/disk.json", '{"since": 1.0, "why": "I/O error, dev nvme0n1"}')
    node.use("/lustre/big.sqsh", 1 << 50)


def of_sources(node: GoodNode) -> None:
    node.unmount("/lustre")
    node.write(YAML, "sources: [/lustre, /gone, /mnt/nvme]\nlow_watermark: 0%\n")


def of_kernel_and_units(node: GoodNode) -> None:
    node.write("/proc/sys/kernel/osrelease", "4.18.0-553.el8_10.x86_64\n")
    node.write("/proc/sys/user/max_mnt_namespaces", "0\n")
    node.remove("/proc/77/ns/mnt")
    node.link("/proc/77/ns/mnt", "mnt:[2]")
    node.remove("/etc/systemd/system/timers.target.wants/forestage.timer")
    node.write("/etc/systemd/system/multi-user.target.wants/forestage-boot.service", "")
    node.write("/run/forestage/hold/memory.high", "1073741824\n")
    node.write("/run/forestage/called.prolog", "1")


def of_switch(node: GoodNode) -> None:
    node.write("/run/forestage/disabled", "INC-42\n")
    node.config("enabled: false\non_error: continue\n")
    node.is_root = False


def of_configuration(node: GoodNode) -> None:
    node.config("deadline: soon\nnonsense: 1\n")


def importing(node: GoodNode, text: str = "  store: /lustre/store\n") -> None:
    node.change(PYXIS, "use_squashfuse=1", f"use_squashfuse=1 importer={IMPORTER}")
    for program in (IMPORTER, "/usr/bin/enroot"):
        node.write(program, "#!/bin/sh\n", 0o755)
    node.at("/etc/enroot").mkdir(exist_ok=True)
    node.config(f"registry:\n{text}")


def of_registry(node: GoodNode) -> None:
    importing(node)
    node.at("/lustre/store").mkdir(mode=0o755)
    node.remove(IMPORTER)
    node.write("/usr/bin/enroot", "#!/bin/sh\necho 3.0.0\n", 0o755)


def registry_without_store(node: GoodNode) -> None:
    importing(node, "  store: null\n")


def registry_not_asked(node: GoodNode) -> None:
    node.config("registry: {store: /lustre}\n")


def peering(node: GoodNode, text: str = "", mode: int = 0o600) -> None:
    key = node.root / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(mode)
    node.config(f"peers:\n  enabled: true\n  key_file: {key}\n{text}")


def of_peers(node: GoodNode) -> None:
    peering(node, "  port: 7716\n", mode=0o644)


def of_peers_of_the_cluster(node: GoodNode) -> None:
    peering(node, "  reach: cluster\n")
    node_list.write_list(node.places, node_list.PeerNodeList(1.0, {"n1": "", "n2": ""}))


def of_prefetch(node: GoodNode) -> None:
    node.config('prefetch: {host: "127.0.0.1:1"}\n')  # nobody listens there


def of_the_prefetch_host(node: GoodNode) -> None:
    node.config("prefetch: {host: n1}\npeers: {enabled: false}\n")


def of_login_node(node: GoodNode) -> None:
    node.login = True
    for path in ("/usr/sbin/slurmd", "/proc/self/mountinfo", "/etc/forestage/forestage.yaml"):
        node.remove(path)


def of_login_node_without_companion(node: GoodNode) -> None:
    of_login_node(node)
    node.write(OURS, "")


NODES: dict[str, Callable[[GoodNode], object]] = {
    "good": lambda node: node.use("/lustre/a.sqsh", 1),
    "slurm": of_slurm,
    "companion": of_companion,
    "without companion": without_companion,
    "pyxis": of_pyxis,
    "fuse": of_fuse,
    "enroot": of_enroot,
    "cache that is not mounted": lambda node: node.unmount("/mnt/nvme"),
    "cache": of_cache,
    "sources": of_sources,
    "kernel and units": of_kernel_and_units,
    "switch": of_switch,
    "configuration": of_configuration,
    "registry": of_registry,
    "registry without a store": registry_without_store,
    "registry not asked": registry_not_asked,
    "peers": of_peers,
    "peers of the cluster": of_peers_of_the_cluster,
    "prefetch": of_prefetch,
    "prefetch host": of_the_prefetch_host,
    "login node": of_login_node,
    "login node without companion": of_login_node_without_companion,
}


@pytest.mark.usefixtures("as_root")
def test_output_of_check_equals_the_golden_file(
    open_path: Path, me: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_checks, "NOBODY", me)
    printed: dict[str, list[str]] = {}
    for name, plant in NODES.items():
        node = GoodNode(open_path / name)
        plant(node)
        try:
            done = node.check()
            text = f"{words(done)}\nstatus {done.status}"
        except Failed as failed:
            text = str(failed)
        printed[name] = normalise(text, node.root).splitlines()
    must_be_as_kept(compare("check.txt", as_text(printed)))
