"""A node of a cluster whose slurmd runs in a container of an image that buildah has made.

The image is the layer of packaging/container on a Debian tree with Slurm. crun starts it as
Kubernetes starts a container: mounts and processes of its own, its volumes as bind mounts, a /dev
of its own, which lacks loop devices that are newer, and no systemd. If it is privileged, it has all
capabilities; else those of docs/sites.md, and less of /proc. The first process keeps slurmd going.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from cluster import Cluster
from host import wait_until
from packaged import RELEASES
from spec import INSIDE_STATE, REPO, USERS
from suite import prepared

from forestage import events
from forestage.events import EventRecord, RequestOutcome

NODE = "n1"
CACHE = "/mnt/nvme/forestage"
INIT = f"""\
mkdir -p /run/munge /var/spool/slurmd /var/log/munge
chown munge:munge /run/munge /etc/munge/munge.key /var/log/munge
chmod 400 /etc/munge/munge.key
setpriv --reuid=munge --regid=munge --clear-groups munged
while :; do
    slurmd -D -N {NODE} &
    echo $! >/run/slurmd.new
    mv /run/slurmd.new /run/slurmd.main
    wait $!
done
"""
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SETS = ("bounding", "effective", "permitted", "inheritable", "ambient")
# crun starts nothing beside a cgroup2 with controllers of its own, as a mount beside those of v1.
PLAIN = ("unshare", "--mount", "--propagation=private", "sh", "-c")
PLAIN += ('umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"', "sh")
CAPABILITIES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE"
    " NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO"
    " SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME"
    " SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG"
    " WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)
(LEAST,) = re.findall(r"^    add: \[(.*)\]$", (REPO / "docs/sites.md").read_text(), re.MULTILINE)
# As containerd has them where a container is not privileged.
MASKED = ("acpi", "kcore", "keys", "latency_stats", "timer_list", "sched_debug", "scsi")
READ_ONLY = ("asound", "bus", "fs", "irq", "sys", "sysrq-trigger")
OWN_DEV: tuple[tuple[str, str, list[str]], ...] = (
    ("/dev", "tmpfs", ["mode=0755"]),
    ("/dev/pts", "devpts", ["newinstance", "ptmxmode=0666", "mode=0620"]),
    ("/dev/shm", "tmpfs", ["mode=1777"]),
)
DEVICES = ("/dev/fuse", "/dev/loop-control")


class Store:
    """Buildah's images and containers of a test, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._own = [f"--root={folder}/images", f"--runroot={folder}/run"]

    def buildah(self, *argv: str) -> str:
        done = subprocess.run(
            ["buildah", *self._own, *argv], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{argv}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def tree(self, image: str) -> Path:
        """The root of a new container of that image."""
        return Path(self.buildah("mount", self.buildah("from", "--pull-never", image)))

    def close(self) -> None:
        self.buildah("rm", "--all")


@contextlib.contextmanager
def layered(folder: Path, packages: Path) -> Iterator[Store]:
    """A store with the image `layer`, made as docs/sites.md says."""
    store = Store(folder)
    try:
        base = Path(store.buildah("mount", made := store.buildah("from", "scratch")))
        subprocess.run(["cp", "-a", f"{prepared('bookworm')}/.", base], check=True)
        shutil.rmtree(base / "usr/lib/forestage")
        store.buildah("commit", "--quiet", made, "localhost/slurmd:debian12")
        context = folder / "context"
        context.mkdir()
        shutil.copy(REPO / "packaging/container/Containerfile", context)
        for name in ("forestage_", "forestage-spank_"):
            (package,) = packages.glob(f"{name}{RELEASES[0]}*.deb")
            shutil.copy(package, context)
        arguments = ["--build-arg=BASE=localhost/slurmd:debian12", "--tag=layer", "--pull-never"]
        # No network: the base has all that the packages need.
        store.buildah("build", "--isolation=chroot", *arguments, str(context))
        yield store
    finally:
        store.close()


class Container:
    """The container, which ends with `with`; its volumes stay: the cache, and /run/forestage."""

    def __init__(
        self, store: Store, cluster: Cluster, volumes: Path, privileged: bool = True
    ) -> None:
        self.cluster = cluster
        self._privileged = privileged
        self.root = store.tree("layer")
        self._bundle = volumes / f"bundle-{self.root.parent.name}"
        self._bundle.mkdir()
        self._name = f"forestage-{secrets.token_hex(4)}-{self.root.parent.name[:12]}"
        self._fill()
        (self._bundle / "config.json").write_text(json.dumps(self._config(volumes)))
        self.log = self._bundle / "log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*PLAIN, *self._crun("run"), f"--bundle={self._bundle}", self._name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(self._runs, 60, self.log.read_text)
            self.await_slurmd()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """At once, with all that runs in it, as when a pod is deleted by force."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._leader(), signal.SIGKILL)
            self._process.wait()
        subprocess.run(self._crun("delete", "--force", self._name), capture_output=True)

    def run(self, *argv: str, check: bool = True) -> str:
        enter = ["nsenter", f"--target={self._leader()}", "--mount", "--pid", "--uts", "--net"]
        done = subprocess.run(
            [*enter, "env", "-i", PATH, "HOME=/root", *argv], capture_output=True, text=True
        )
        assert not check or done.returncode == 0, (argv, done.stdout, done.stderr)
        return done.stdout

    def end_slurmd(self) -> None:
        """slurmd alone; the first process starts another one."""
        main = self.root / "run/slurmd.main"
        before = self.run("cat", "/run/slurmd.main")
        self.run("kill", before.strip())
        wait_until(
            lambda: self.run("cat", "/run/slurmd.main") != before, 60, lambda: f"{main} {before}"
        )
        self.await_slurmd()

    def await_slurmd(self) -> None:
        def registered() -> bool:
            ask = ["sinfo", "--noheader", f"--nodes={NODE}", "--format=%T"]
            state = self.cluster.run(ask, user="root", check=False).stdout.strip()
            return state in ("idle", "mixed", "allocated")

        wait_until(registered, 120, lambda: f"{self.cluster.overview()}{self.log.read_text()}")

    def events(self) -> list[EventRecord]:
        return list(events.read_events(self.root / "var/log/forestage/events.jsonl"))

    def results(self, job: int, hook: str = "step") -> list[str]:
        found = [one.outcome for one in self.events() if (one.job, one.hook) == (job, hook)]
        return [one.result for one in found if isinstance(one, RequestOutcome)]

    def leases(self) -> list[str]:
        listed = self.run("sh", "-c", "ls /run/forestage/leases 2>/dev/null || true")
        return [name for name in listed.split() if name.endswith(".json")]

    def _runs(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        state = subprocess.run(self._crun("state", self._name), capture_output=True, text=True)
        return state.returncode == 0 and json.loads(state.stdout)["status"] == "running"

    def _leader(self) -> int:
        done = subprocess.run(
            self._crun("state", self._name), capture_output=True, text=True, check=True
        )
        return int(json.loads(done.stdout)["pid"])

    def _crun(self, *argv: str) -> list[str]:
        return ["crun", f"--root={self._bundle}/state", "--cgroup-manager=disabled", *argv]

    def _fill(self) -> None:
        """What a pod gets of its cluster: Slurm's files, the key, the users."""
        for file in ("/etc/slurm/slurm.conf", "/etc/slurm/plugstack.conf", "/etc/hosts"):
            target = self.root / file.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self.cluster.read(file))
        for kind in ("prolog", "epilog"):
            folder = self.root / f"etc/slurm/{kind}.d"
            folder.mkdir(exist_ok=True)
            shutil.copy(REPO / f"packaging/{kind}.d/50-all-forestage", folder)
        key = self.root / "etc/munge/munge.key"
        key.write_bytes(self.cluster.host_path("/etc/munge/munge.key").read_bytes())
        with (self.root / "etc/passwd").open("a") as passwd:
            for user in USERS:
                passwd.write(f"{user.name}:x:{user.uid}:{user.uid}::/:/bin/sh\n")
        with (self.root / "etc/group").open("a") as group:
            for user in USERS:
                group.write(f"{user.name}:x:{user.uid}:\n")
        (self.root / "etc/forestage/conf.d").mkdir(parents=True, exist_ok=True)
        for mounted in (CACHE, "/shared", str(INSIDE_STATE), "/var/log/slurm"):
            (self.root / mounted.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def configure(self, **keys: object) -> None:
        """JSON is YAML."""
        text = json.dumps({"sources": ["/shared"], "low_watermark": "100%", **keys})
        (self.root / "etc/forestage/conf.d/50-site.yaml").write_text(text)

    def _config(self, volumes: Path) -> dict[str, object]:
        own = int(re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
        names = enumerate(CAPABILITIES.split())
        wanted = (
            names if self._privileged else [one for one in names if one[1] in LEAST.split(", ")]
        )
        capabilities = [f"CAP_{name}" for bit, name in wanted if own >> bit & 1]
        state = self.cluster.state
        binds = {
            "/mnt/nvme": volumes / "nvme",
            "/run/forestage": volumes / "run",
            "/shared": state / "shared",
            str(INSIDE_STATE): state,
        }
        mounts: list[dict[str, object]] = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", "ro"]},
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["mode=0755"]},
            *(
                {"destination": place, "type": kind, "source": kind, "options": options}
                for place, kind, options in OWN_DEV
            ),
        ]
        for target, source in binds.items():
            source.mkdir(exist_ok=True)
            options = ["rbind", "rslave"]
            mounts.append(
                {"destination": target, "type": "none", "source": str(source), "options": options}
            )
        network = f"/proc/{self.cluster.leader}/ns/net"
        kinds: Sequence[str] = ("pid", "mount", "uts", "ipc")
        less: dict[str, object] = {}
        if not self._privileged:
            less["maskedPaths"] = [f"/proc/{name}" for name in MASKED]
            less["readonlyPaths"] = [f"/proc/{name}" for name in READ_ONLY]
        return {
            "ociVersion": "1.0.0",
            "hostname": NODE,
            "root": {"path": str(self.root)},
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": ["/bin/sh", "-c", INIT],
                "env": [PATH],
                "cwd": "/",
                "capabilities": dict.fromkeys(SETS, capabilities),
            },
            "mounts": mounts,
            "linux": {
                "namespaces": [
                    *({"type": kind} for kind in kinds),
                    {"type": "network", "path": network},
                ],
                "rootfsPropagation": "rslave",
                "devices": [_device(Path(name)) for name in DEVICES],
                **less,
            },
        }


def _device(path: Path) -> dict[str, object]:
    facts = path.stat()
    major, minor = os.major(facts.st_rdev), os.minor(facts.st_rdev)
    kind = "b" if stat.S_ISBLK(facts.st_mode) else "c"
    return {"path": str(path), "type": kind, "major": major, "minor": minor, "fileMode": 0o666}
