"""What a test cluster looks like: plain values, shared by the host's side and the inside."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

LOGIN = "login"
STORE = "store"  # the file server of a cluster with `net`
PYXIS_REPORT = "/shared/pyxis.jsonl"
# Where the state directory appears inside the cluster, whatever its path on the host.
INSIDE_STATE = Path("/var/lib/cluster")
VENV = "/usr/lib/forestage"  # where the hooks look for their interpreter
NO_VENV = "/nonexistent"  # as a spec's `venv`: nothing is bound there
FIRST_SLURMD_PORT = 17001
# With `net`: each node has a munged of its own besides, for all that is not Slurm.
SLURM_MUNGE = "/var/spool/munge"


@dataclass(frozen=True)
class User:
    """A user that exists only inside the clusters."""

    name: str
    uid: int


ALICE = User("alice", 21001)
BOB = User("bob", 21002)
CAROL = User("carol", 21003)
USERS = (ALICE, BOB, CAROL)
LAB_GID = 21100  # the group "lab", which all of them are in


@dataclass(frozen=True)
class Net:
    """How fast the links of a cluster with a network are, in Mbit/s each way.

    With `squash`, root of the nodes is nobody for the file server.
    """

    node_mbit: float = 200
    store_mbit: float = 400
    squash: bool = False


@dataclass(frozen=True)
class ClusterSpec:
    """Everything that may differ between two clusters. Paths are those inside the cluster.

    `slurm_conf` replaces or adds lines of slurm.conf; the value None removes one.
    `files` are written before the daemons start, mode 0755, so scripts can be run.
    `plugstack` replaces plugstack.conf; `{state}/pyxis.so` is the stand-in for pyxis.
    `companion` are the SPANK companion's arguments: with them ("" for none) it is listed before
    all that `plugstack` says, without them (None) there is no companion.
    `node_dirs` are kept by each node for itself, over its reboots as a local disk would.
    `lower` is the read-only tree to run in, a path on the host: "/" or a debootstrap tree of
    another release, with Slurm, Python and gcc. `venv`, on the host as well, is bound to VENV.
    `net` gives each node a network namespace and a shaped link of its own, GlusterFS as /shared,
    a disk in memory and an own munged; without, they share one loopback, and /shared is local.
    """

    nodes: int = 4
    nvme_mib: int = 1024
    prolog: str = str(REPO / "prolog/forestage")
    epilog: str = str(REPO / "epilog/forestage")
    slurm_conf: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    plugstack: tuple[str, ...] = (f"required {{state}}/pyxis.so report={PYXIS_REPORT}",)
    companion: str | None = None
    node_dirs: tuple[str, ...] = ("/var/log/forestage", "/var/lib/forestage")
    lower: str = "/"
    venv: str = str(REPO / ".venv")
    net: Net | None = None

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{number}" for number in range(1, self.nodes + 1))

    @property
    def addresses(self) -> dict[str, str]:
        hosts = (LOGIN, *self.node_names, *([STORE] if self.net else []))
        return {host: f"10.77.{index >> 8}.{index & 255}" for index, host in enumerate(hosts, 1)}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ClusterSpec:
        values = json.loads(text)
        values["plugstack"] = tuple(values["plugstack"])
        values["node_dirs"] = tuple(values["node_dirs"])
        values["net"] = values["net"] and Net(**values["net"])
        return cls(**values)


def slurm_conf(spec: ClusterSpec) -> str:
    """The cluster's slurm.conf. What is not named here is at Slurm's own default."""
    last_port = FIRST_SLURMD_PORT + spec.nodes - 1
    lines: dict[str, str | None] = {
        "ClusterName": "forestage",
        "SlurmctldHost": LOGIN,
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "StateSaveLocation": "/var/spool/slurmctld",
        "SlurmdSpoolDir": "/var/spool/slurmd",
        "SlurmctldPidFile": "/run/slurmctld.pid",
        "SlurmdPidFile": "/run/slurmd.pid",
        "SlurmctldLogFile": "/var/log/slurm/slurmctld.log",
        "SlurmdLogFile": "/var/log/slurm/%n.log",
        "SlurmdDebug": "verbose",
        # No cgroups: nodes share one kernel, and a container may not let us have any.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        # The nodes claim more cores than this machine has, so that jobs can share one.
        "SlurmdParameters": "config_overrides",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "ReturnToService": "2",
        # By default a batch job waits for up to 3 s for others that may come, one of several
        # parts, which the backfill scheduler alone starts, for up to 30 s, and one whose time has
        # come, as that of a requeued one, for up to 60 s if nothing else happens.
        "SchedulerParameters": "batch_sched_delay=0,bf_interval=1,sched_interval=1",
        "PrologFlags": "Alloc,DeferBatch",
        "Prolog": spec.prolog,
        "Epilog": spec.epilog,
        "NodeName": (
            f"n[1-{spec.nodes}] NodeHostname={LOGIN} NodeAddr=n[1-{spec.nodes}]"
            f" Port=[{FIRST_SLURMD_PORT}-{last_port}] CPUs=8 State=UNKNOWN"
        ),
        "PartitionName": "all Nodes=ALL Default=YES OverSubscribe=YES State=UP",
    }
    if spec.net:
        # Links are slow, and a Prolog waits no longer than these allow.
        lines["AuthInfo"] = f"socket={SLURM_MUNGE}/munge.socket.2,cred_expire=900"
        lines["BatchStartTimeout"] = "900"
    lines.update(spec.slurm_conf)
    return "".join(f"{key}={value}\n" for key, value in lines.items() if value is not None)


def plugstack_conf(spec: ClusterSpec) -> str:
    first = () if spec.companion is None else (f"required {{state}}/forestage.so {spec.companion}",)
    return "".join(line.format(state=INSIDE_STATE) + "\n" for line in (*first, *spec.plugstack))
