"""What a fault of a node looks like to who is called at night: status, check, explain, the metrics.

Each is made for real, on one node; docs/evidence.md has the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from host import wait_until
from jobs import CACHE, CLI, Site
from spec import ClusterSpec, plugstack_conf
from steps import accompanied

pytestmark = (
    pytest.mark.ci
)  # what one command says of one fault: processes/commands, processes/check

NVME = "/mnt/nvme"
TEXTFILES = "/var/lib/prometheus/node-exporter"
STACK = "/etc/slurm/plugstack.conf"
PLUGIN = "/etc/other/forestage.so"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return accompanied(1)


@pytest.fixture
def site(site: Site) -> Site:
    site.configure(redirect="auto", deadline="auto")
    site.root(["mkdir", "-p", TEXTFILES], "n1")
    return site


def full(site: Site) -> Callable[[], object]:
    free = int(site.root(["df", "--output=avail", "-B1", NVME], "n1").split()[-1])
    # What the file system needs for the file itself is left.
    site.root(["fallocate", "--length", str(free - (16 << 20)), f"{NVME}/other"], "n1")
    return lambda: site.root(["rm", f"{NVME}/other"], "n1")


def read_only(site: Site) -> Callable[[], object]:
    site.await_stagers()
    site.root(["mount", "-o", "remount,ro", NVME], "n1")
    return lambda: site.root(["mount", "-o", "remount,rw", NVME], "n1")


def not_mounted(site: Site) -> Callable[[], object]:
    site.await_stagers()
    # A loop device goes with its last mount.
    site.root(["mkdir", "-p", "/run/kept"], "n1")
    site.root(["mount", "--bind", NVME, "/run/kept"], "n1")
    site.root(["umount", NVME], "n1")

    def mend() -> None:
        site.root(["mount", "--bind", "/run/kept", NVME], "n1")
        site.root(["umount", "/run/kept"], "n1")

    return mend


def on_other_disk(site: Site) -> Callable[[], object]:
    """Its own is not mounted, and below is one that is no root disk."""
    mend = not_mounted(site)
    above = NVME.rpartition("/")[0]
    site.root(["mount", "-t", "tmpfs", "below", above], "n1")
    site.root(["mkdir", NVME], "n1")

    def mend_all() -> None:
        assert site.root(["ls", NVME], "n1") == "", "nothing was made there"
        site.root(["umount", above], "n1")
        mend()

    return mend_all


def frozen(site: Site) -> Callable[[], object]:
    site.root(["fsfreeze", "--freeze", NVME], "n1")
    return lambda: site.root(["fsfreeze", "--unfreeze", NVME], "n1")


def other_release(site: Site) -> Callable[[], object]:
    """As after an upgrade of Slurm: the line is there, and what it names cannot be loaded."""
    site.cluster.write(PLUGIN, "no plugin of this Slurm\n")
    site.cluster.write(STACK, plugstack_conf(site.cluster.spec).replace("required", "optional", 1))
    text = site.cluster.read(STACK)
    line = text.splitlines()[0]
    site.cluster.write(STACK, text.replace(line, f"optional {PLUGIN}", 1))
    # slurmd has loaded the right one; as if it had been started anew.
    site.root(["touch", "--date=1 hour ago", "/run/forestage/companion"], "n1")
    return lambda: site.cluster.write(STACK, plugstack_conf(site.cluster.spec))


def off(site: Site) -> Callable[[], object]:
    site.command("off", "INC-42")
    return lambda: site.command("on")


def broken_configuration(site: Site) -> Callable[[], object]:
    was = site.cluster.read("/etc/forestage/forestage.yaml")
    site.cluster.write("/etc/forestage/forestage.yaml", "sources: [shared]\n")
    return lambda: site.cluster.write("/etc/forestage/forestage.yaml", was)


@dataclass(frozen=True)
class Fault:
    """`make` returns what mends it. The rest is what is read while it lasts."""

    make: Callable[[Site], Callable[[], object]]
    state: str
    finding: str
    explained: str
    series: tuple[str, ...]


UNUSABLE = "forestage_cache_usable 0.0"
FAULTS = {
    "full": Fault(full, "full", "cache-full", "(no-room)", (UNUSABLE,)),
    "read-only": Fault(read_only, "read-only", "cache-read-only", "failed (io)", (UNUSABLE,)),
    "not-mounted": Fault(
        not_mounted, "unusable", "cache-not-mounted", "(cache-not-mounted)", (UNUSABLE,)
    ),
    "other-disk": Fault(
        on_other_disk, "unusable", "cache-other-disk", "(cache-other-disk)", (UNUSABLE,)
    ),
    "frozen": Fault(frozen, "hangs", "cache-hangs", "(cache-hangs)", (UNUSABLE,)),
    "no-companion": Fault(
        other_release, "no-companion", "", "No step of this job asked forestage", ()
    ),
    "off": Fault(off, "off", "switched-off", "(disabled)", ("forestage_switched_off 1.0",)),
    "configuration": Fault(
        broken_configuration, "", "config", "(config)", ("forestage_config_valid 0.0",)
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_node_fault_is_reported_by_status_check_explain_and_metrics(site: Site, name: str) -> None:
    fault = FAULTS[name]
    site.srun(site.image("before"))  # the cache is there
    mend = fault.make(site)
    try:
        ran = site.srun(site.image(name), comment="stage-tell=yes")
        assert (ran.code, f'NAME="{name}"' in ran.stdout) == (0, True), "the job is as without"
        told = site.cluster.run([CLI, "check", "--json"], user="root", node="n1", check=False)
        found = [one["id"] for one in json.loads(told.stdout)["findings"]]
        assert fault.finding in ["", *found], found

        def line() -> str:
            words = [CLI, "status", "--oneline"]
            return site.cluster.run(words, user="root", node="n1", check=False).stdout

        wait_until(lambda: f"state={fault.state} " in f"{line()}state= ", 60, line)
        explained = " ".join(site.command("explain", str(ran.job)).split())
        assert fault.explained in explained, explained
        site.cluster.run([CLI, "metrics"], user="root", node="n1", check=False)
        series = site.cluster.read(f"{TEXTFILES}/forestage.prom", "n1")
        wanted = fault.series
        if fault.state:
            wanted = (*wanted, f'forestage_state{{state="{fault.state}"}} 1.0')
        assert [one for one in wanted if one not in series] == []
    finally:
        mend()
    assert site.srun(site.image("after")).code == 0
    wait_until(lambda: "state=ok " in line() or "state=failing " in line(), 60, line)
    assert site.root(["ls", CACHE], "n1")
