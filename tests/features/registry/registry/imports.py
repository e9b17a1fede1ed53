"""Workers on a node of their own: a user, a store, and a stand-in for enroot."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from forestage.features.registry import worker
from forestage.features.registry.worker import RegistryWorker
from forestage.features.registry.worker_messages import ImportOrder, WorkerMessage
from forestage.system import mounts, run
from forestage.system.as_user import User

ALICE, BOB = User("", 61001, 61001), User("", 61002, 61002)
ROOT = User("root", 0, 0)
HERE = Path(__file__).parent
IMPORTER = HERE.parents[3] / "src/importer/forestage-importer"
OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64
IMAGE = f"docker://here#image@{OLD}"
PATIENCE = 60.0  # seconds for a word; a test that is well waits for an event


def processes(user: User) -> list[int]:
    """What of a user's lives, in whatever session."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if proc.stat().st_uid == user.uid and run._find_session(int(proc.name)) != -1:
                found.append(int(proc.name))
    return found


class Site:
    """A node in a mount namespace of its own."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.store.mkdir()
        self.store.chmod(0o1777)
        self.home = folder / "home"
        self.temp = folder / "temp"
        self.log = folder / "log"
        for user in (ALICE, BOB):
            for place in (self.home, self.temp):
                path = place / str(user.uid)
                path.mkdir(parents=True)
                os.chown(path, user.uid, user.gid)
        self.log.touch()
        self.log.chmod(0o666)
        self.image = folder / "image.sqsh"
        (folder / "tree").mkdir()
        (folder / "tree/file").write_bytes(os.urandom(100_000))
        argv = ["mksquashfs", folder / "tree", self.image, "-quiet", "-no-progress"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        self.image.chmod(0o644)
        self._install(folder)

    def _install(self, folder: Path) -> None:
        programs = folder / "bin"
        programs.mkdir()
        shutil.copy(HERE / "enroot", programs)
        mounts.mount(str(programs), "/usr/local/sbin", mounts.MS_BIND)
        mounts.mount("tmpfs", "/mnt", 0, "tmpfs")
        for place in ("/etc", "/usr/lib"):  # in which the node has directories of its own
            layers = [Path("/mnt" + place, name) for name in ("upper", "work")]
            for layer in layers:
                layer.mkdir(parents=True)
            options = f"lowerdir={place},upperdir={layers[0]},workdir={layers[1]}"
            mounts.mount("overlay", place, 0, "overlay", options)
        Path("/etc/enroot").mkdir(exist_ok=True)
        self.configure("ENROOT_ALLOW_HTTP yes\n")

    def configure(self, text: str) -> None:
        temp = f"ENROOT_TEMP_PATH {self.temp}/${{UID}}\n"
        Path("/etc/enroot/enroot.conf").write_text(text + temp)

    def start(
        self, user: User = ALICE, environ: dict[str, str] | None = None, **facts: Any
    ) -> RegistryWorker:
        """A worker for an order; by default for an image whose digest is named."""
        named = {"reference": f"here#image@{OLD}", "directory": str(self.store), "host": "n1"}
        block = {
            "HOME": str(self.home / str(user.uid)),
            "STANDIN_LOG": str(self.log),
            "STANDIN_IMAGE": str(self.image),
            **(environ or {}),
        }
        fd = os.memfd_create("environ")
        os.write(fd, b"".join(f"{name}={value}\0".encode() for name, value in block.items()))
        try:
            return worker.start_worker(user, ImportOrder(**{**named, **facts}), fd)
        finally:
            os.close(fd)

    @property
    def imports(self) -> list[str]:
        """A line for each import that was begun."""
        return self.log.read_text().splitlines()

    def folder(self, user: User = ALICE) -> Path:
        return self.store / str(user.uid)

    def names(self, user: User = ALICE) -> set[str]:
        """The kinds of files in a user's directory."""
        return {name.partition(".")[2] or name for name in os.listdir(self.folder(user))}


class Login:
    """A user at a shell, with a configuration and `forestage` where the package has it."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.runtime = site, folder / "pyxis"
        self.runtime.mkdir(mode=0o1777)
        self.runtime.chmod(0o1777)
        home = folder / "lib/bin"
        home.mkdir(parents=True)
        script = (
            f"#!{sys.executable} -I\nfrom forestage.commands.console_script import main\nmain()\n"
        )
        (home / "forestage").write_text(script)
        (home / "forestage").chmod(0o755)
        Path("/usr/lib/forestage").mkdir(exist_ok=True)
        mounts.mount(str(folder / "lib"), "/usr/lib/forestage", mounts.MS_BIND)
        self.configure(f"registry: {{store: {site.store}}}")

    def configure(self, text: str) -> None:
        Path("/etc/forestage").mkdir(exist_ok=True)
        file = Path("/etc/forestage/forestage.yaml")
        file.write_text(f"{text}\n")
        file.chmod(0o644)

    def run(self, *argv: str, user: User = ALICE, **more: str) -> subprocess.CompletedProcess[str]:
        environ = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.site.home / str(user.uid)),
            "STANDIN_LOG": str(self.site.log),
            "STANDIN_IMAGE": str(self.site.image),
            "PYXIS_RUNTIME_PATH": str(self.runtime),
            **more,
        }
        ids = {"user": user.uid, "group": user.gid, "extra_groups": []} if user.uid else {}
        return subprocess.run(
            argv,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            **ids,  # type: ignore[call-overload,no-any-return]
        )

    def forestage(self, *argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.run("/usr/lib/forestage/bin/forestage", "registry", *argv, **more)

    def importer(self, *argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
        step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", **more}
        return self.run(str(IMPORTER), *argv, **step)


def until(at_work: RegistryWorker, *kinds: type) -> list[WorkerMessage]:
    """What a worker says until one of these words, or its last."""
    said: list[WorkerMessage] = []
    poll = select.poll()
    poll.register(at_work.fd, select.POLLIN)
    while not at_work.ended and not any(isinstance(word, kinds) for word in said):
        assert poll.poll(PATIENCE * 1000), f"no word after {said}"
        said += at_work.read_messages()
    return said


def last(at_work: RegistryWorker) -> WorkerMessage:
    """The worker's last word."""
    with at_work:
        return until(at_work)[-1]


class Registry:
    """A registry that says what a tag means, or another status."""

    def __init__(self, digest: str = OLD, status: int = 200) -> None:
        self.digest, self.status, self.asked = digest, status, 0
        ours = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                ours.asked += 1
                self.send_response(ours.status)
                self.send_header("Docker-Content-Digest", ours.digest)
                self.send_header("Content-Length", "0")
                self.send_header("Retry-After", "3600")
                self.end_headers()

            do_GET = do_HEAD

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = Thread(target=self.server.serve_forever)
        self.thread.start()

    def reference(self, tag: str = "v1") -> str:
        return f"127.0.0.1:{self.server.server_port}#image:{tag}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
