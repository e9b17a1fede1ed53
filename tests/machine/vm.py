"""A virtual machine: boots, runs what a test says, stands still, loses its power.

qemu emulates the processors (TCG), so nothing of this computer's kernel takes part, and all is 10
to 50 times slower than a node: tests wait for events, with generous limits. There is no network. An
agent in the machine (guest/usr/local/lib/agent.py) runs scripts.

    with VM.of(layer, folder) as vm:        # a layer is a folder of disks, see disks.py
        vm.boot()
        assert vm.run("uname -r").out == ...
        job = vm.begin("srun sleep 100", user="alice")
        vm.until("squeue -h -t R | grep -q .")
        with vm.standing_still():
            vm.copy_disks(folder / "copy")  # what a power cut would leave
        vm.cut_power()
        vm.boot()
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from host import LONGEST_LOOK
from suite import TREES

PATIENCE = 900  # seconds that a busy computer may need for what takes a minute
PROGRAM = "qemu-system-x86_64"
ROOT, NVME = "root", ("nvme0", "nvme1")
DISKS = (ROOT, *NVME)
MEMORY = "3G"
# Not random, not watched, not protected from programs that nobody runs here; and with patience. The
# kernel's own check of its timer is one without: on a busy computer it ends the boot in a panic.
KERNEL = (
    "console=ttyS0 no_timer_check 8250.nr_uarts=1 quiet loglevel=4 panic=1 nokaslr mitigations=off"
    " nowatchdog"
    " audit=0 apparmor=0 selinux=0 random.trust_cpu=on systemd.show_status=false"
    f" systemd.default_timeout_start_sec={PATIENCE} systemd.default_device_timeout_sec={PATIENCE}"
)


class VMError(Exception):
    """The machine, or what ran in it, did not do what the test needs."""


@dataclass(frozen=True)
class Done:
    """How a script ended."""

    code: int
    out: str
    err: str


class Running:
    """A script that was begun."""

    def __init__(self, vm: VM, script: str) -> None:
        self._vm = vm
        self._script = script
        self.answer = queue.SimpleQueue[Done | None]()  # None: the machine has ended

    def wait(self, limit: float = PATIENCE) -> Done:
        """Its end. Raises VMError if it does not come, or the machine ends first."""
        try:
            done = self.answer.get(timeout=limit)
        except queue.Empty:
            raise VMError(f"{self._script}\nnot over after {limit:g} s{self._vm.told()}") from None
        if done is None:
            raise VMError(f"{self._script}\nthe machine ended{self._vm.told()}")
        return done


class VM:
    """One of them runs on a computer at a time; whoever wants one waits. All ends with `with`."""

    def __init__(self, layer: Path, folder: Path) -> None:
        self.layer = layer
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[int, Running] = {}
        self._port: socket.socket | None = None

    @classmethod
    @contextlib.contextmanager
    def of(cls, layer: Path, folder: Path) -> Iterator[VM]:
        """A machine that is off, with the layer's disks. What it writes goes to `folder`."""
        TREES.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        with (TREES / "machine.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            vm = cls(layer, folder)
            vm.fresh_disks()
            try:
                yield vm
            finally:
                vm.cut_power()

    # The machine

    def fresh_disks(self) -> None:
        """The disks as they are in the layer. Only while it is off."""
        for name in DISKS:
            below = backing(self.layer, name)
            overlay(below, self.disk(name))

    def disk(self, name: str) -> Path:
        return self.folder / f"{name}.qcow2"

    def boot(self) -> None:
        """Switches it on, and returns when systemd has started all there is."""
        self.start()
        # "degraded" is for the test to find out about. With --wait it once waited on.
        self.until("systemctl is-system-running | grep -qxE 'running|degraded'")

    def start(self, without: Sequence[str] = ()) -> None:
        """Returns when the agent answers, which is early in the boot. Some disks may be missing."""
        agent = self.folder / "agent"
        agent.unlink(missing_ok=True)
        argv = [PROGRAM, *self._options(), *self._drives(without)]
        with (self.folder / "qemu.log").open("wb") as log:
            # Whatever becomes of the tests, it ends with them.
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._port = self._connected(agent)
        hello = Running(self, "boot")
        self._asked = {0: hello}
        listening = (self._port, self._asked)
        threading.Thread(target=_listen, args=listening, daemon=True).start()
        hello.wait()

    def power_off(self) -> None:
        """As an admin does it: everything is on the disks."""
        self.begin("systemctl poweroff")
        assert self._process is not None
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise VMError(f"it does not go off{self.told()}") from None
        self.cut_power()

    def cut_power(self) -> None:
        """At once. What the machine has not flushed is lost with qemu's cache."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._port is not None:
            self._port.close()
            self._port = None

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Nothing in it goes on, not even its clock's interrupts."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def copy_disks(self, to: Path) -> None:
        """The NVMe's, as they would be had the power gone. Only while it stands still."""
        to.mkdir(parents=True)
        for name in NVME:
            shutil.copy(self.disk(name), to)

    def monitor(self, command: str) -> str:
        """What qemu's monitor answers: `info block`, `block_set_io_throttle …`."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.folder / "monitor"))
            lines = sock.makefile("rwb")
            lines.readline()  # who it is
            asked = {"command-line": command}
            for name, given in (("qmp_capabilities", {}), ("human-monitor-command", asked)):
                lines.write(json.dumps({"execute": name, "arguments": given}).encode() + b"\n")
                lines.flush()
                said = json.loads(lines.readline())
                while "event" in said:
                    said = json.loads(lines.readline())
        if "return" not in said:
            raise VMError(f"{command}\n{said}")
        return str(said["return"])

    def told(self) -> str:
        """The last words of qemu and of the machine's console, for an error."""
        found = ""
        for name in ("qemu.log", "console"):
            file = self.folder / name
            text = file.read_bytes()[-3000:].decode(errors="replace") if file.exists() else ""
            found += f"\n--- {name}\n{text}" if text else ""
        return found

    # What runs in it

    def run(
        self,
        script: str,
        user: str = "root",
        stdin: str = "",
        check: bool = True,
        limit: float = PATIENCE,
    ) -> Done:
        """Runs a script of sh, with -eu. Raises VMError if it fails, unless `check` is off."""
        done = self.begin(script, user, stdin).wait(limit)
        if check and done.code:
            raise VMError(f"{script}\nexit {done.code}\n{done.out[-4000:]}{done.err[-4000:]}")
        return done

    def begin(self, script: str, user: str = "root", stdin: str = "") -> Running:
        """The same without waiting. What it leaves running must not hold its output."""
        assert self._port is not None, "it is off"
        number = max(self._asked) + 1
        running = self._asked[number] = Running(self, script)
        said = {"id": number, "script": script, "user": user, "stdin": stdin}
        self._port.sendall(json.dumps(said).encode() + b"\n")
        return running

    def until(self, script: str, limit: float = PATIENCE) -> None:
        """Waits until the script succeeds, which is asked in the machine twice a second."""
        script = f"until {script}; do sleep 0.5; done"
        done = self.run(f"timeout {limit:g} sh -c {quoted(script)}", check=False, limit=2 * limit)
        if done.code:
            log = self.run("dmesg | tail -n 15", limit=limit).out
            raise VMError(f"{script}\nnot so after {limit:g} s\n{log}{self.told()}")

    def put(self, path: str, data: bytes) -> None:
        encoded = base64.b64encode(data).decode()
        self.run(f"mkdir -p $(dirname {path}); base64 -d >{path}", stdin=encoded)

    def get(self, path: str) -> bytes:
        return base64.b64decode(self.run(f"base64 -w0 {path}").out)

    def _connected(self, socket_path: Path) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        left, last = float(PATIENCE), time.monotonic()
        while True:
            assert self._process is not None
            if self._process.poll() is not None or left < 0:
                raise VMError(f"qemu does not run{self.told()}")
            try:
                sock.connect(str(socket_path))
                return sock
            except OSError:
                time.sleep(0.05)
            now = time.monotonic()
            left, last = left - min(now - last, LONGEST_LOOK), now

    def _options(self) -> list[str]:
        words = ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        words += [
            "-machine",
            "q35",
            "-accel",
            "tcg,thread=multi,tb-size=512",
            "-cpu",
            "max,la57=off",
        ]
        words += ["-smp", "2", "-m", MEMORY, "-object", "rng-random,id=rng,filename=/dev/urandom"]
        words += ["-device", "virtio-rng-pci,rng=rng"]
        words += ["-kernel", str(self.layer / "vmlinuz"), "-initrd", str(self.layer / "initrd")]
        words += ["-append", KERNEL, "-serial", f"file:{self.folder / 'console'}"]
        words += ["-qmp", f"unix:{self.folder / 'monitor'},server=on,wait=off"]
        words += ["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=a,name=agent"]
        words += ["-chardev", f"socket,id=a,path={self.folder / 'agent'},server=on,wait=on"]
        return words

    def _drives(self, without: Sequence[str]) -> list[str]:
        words = []
        for name in (name for name in DISKS if name not in without):
            kind = "virtio-blk-pci" if name == ROOT else "nvme"
            words += ["-drive", f"if=none,id={name},file={self.disk(name)},cache=writeback"]
            words += ["-device", f"{kind},drive={name},serial={name}"]
        return words


def _listen(port: socket.socket, asked: Mapping[int, Running]) -> None:
    """In a thread: hands each answer to whoever waits for it."""
    with contextlib.suppress(OSError), port.makefile("rb") as answers:
        for line in answers:
            said = json.loads(line)
            asked[said["id"]].answer.put(Done(said["code"], said["out"], said["err"]))
    for running in list(asked.values()):
        running.answer.put(None)


def backing(layer: Path, name: str) -> Path:
    (found,) = layer.glob(f"{name}.*")
    return found


def overlay(below: Path, file: Path) -> None:
    """A disk that is as the one below it until something is written."""
    kind = below.suffix.removeprefix(".")
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(below), "-F", kind, str(file)]
    subprocess.run(argv, check=True)


def quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
