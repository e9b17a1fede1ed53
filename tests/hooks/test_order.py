"""In which order Prolog, step, Epilog, sweep and tend do their work, with the reason of each pair.

A piece of work is known by the function that does it. PIECES alone says where that is: a function
that moves or gets another name changes a line there, and no row. What is of a feature that the tree
does not have (tests/delete_feature) is left out of all tables here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pkgutil
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner

from forestage.clock import Clock
from forestage.commands.main import CommandContext, main
from forestage.commands.tend import TendPart
from forestage.config import Config
from forestage.features import FEATURES
from forestage.features.data import data_view
from forestage.slurm.slurm_client import SlurmClient
from forestage.slurm.step_protocol import PROTOCOL_GREETING
from forestage.system import processes
from forestage.system.sha256 import sha256
from helper import Helper, environ
from node import BOB, HANGS, Idle, Node, content, start_hook, unmount, until

JOB = 7
REFERENCE = "registry.example#image:1"
pytestmark = pytest.mark.always
ANSWERS = ("use", "leave", "through", "later")

PIECES = {
    # The core
    "Prolog's process ended": "forestage.hooks.background_prolog:stop_prolog",
    "Prolog's process awaited": "forestage.hooks.background_prolog:wait_for_prolog",
    "time limits": "forestage.slurm.timeouts:read_limits",
    "earlier job released": "forestage.hooks.earlier_job:release_earlier_job",
    "files' marks": "forestage.cache.step_record:format_config_lines",
    "off switch": "forestage.config.switch:find_off_file_reason",
    "configuration": "forestage.hooks.hook_work:read_partition_config",
    "user's groups": "forestage.system.as_user:query_name_service",
    "source opened": "forestage.sources.opening:open_image_for_hook",
    "lease taken": "forestage.hooks.leases:hold_entry",
    "copy begun": "forestage.stage.copy_wait:ensure_copy_started",
    "copy awaited": "forestage.stage.copy_wait:wait_for_copy",
    "further steps' record": "forestage.hooks.step:record_images_for_steps",
    "bad hints noted": "forestage.hooks.prolog:record_hint_problems",
    "user told": "forestage.hooks.user_messages:write_messages",
    "step answered": "forestage.slurm.step_protocol:encode_line",
    "disk asked": "forestage.cache.disk_probe:probe_disk",
    "use noted": "forestage.hooks.epilog:record_last_use",
    "lease dropped": "forestage.cache.lease:LeaseDirectory.drop_lease",
    "redirects claimed": "forestage.bind.redirect:claim_unneeded_binds",
    "redirects unmounted": "forestage.bind.unmount:unmount_binds",
    "disk's errors looked at": "forestage.cache.disk_errors:scan_kernel_log",
    "evicted": "forestage.cache.evict:evict_to_watermark",
    "Prolog's events": "forestage.events:record_outcomes",
    "step's events": "forestage.events:record_outcomes",
    "Epilog's events": "forestage.events:record_outcomes",
    "disk must answer": "forestage.cache.disk_probe:check_writable",
    "Slurm asked about leases": "forestage.commands.sweep:list_stale_leases",
    "keepers looked at": "forestage.views.through.keeper_cleanup:list_hanging_keepers",
    "earlier caches found": "forestage.cache.earlier_caches:list_earlier_caches",
    "dead parts deleted": "forestage.commands.sweep:_SweepRun.delete_dead_parts",
    "entries due": "forestage.commands.sweep:list_due_entries",
    "sweep noted": "forestage.commands.sweep:record_sweep_time",
    "users' events forgotten": "forestage.events.user_files:remove_idle_users",
    "sweep's events": "forestage.events:record_events",
    # Images of registries
    "reference taken out": "forestage.features.registry.prolog:drop_reference",
    "import begun": "forestage.features.registry.step_image:start_import_process",
    "steps' images forgotten": "forestage.features.registry.step_files:delete_job_files",
    "images' leftovers": "forestage.features.registry.step_files:list_leftovers",
    "store collected": "forestage.features.registry.store_commands:collect_some_users",
    # Data
    "data noted": "forestage.features.data.requests:_record_wanted",
    "directory begun": "forestage.features.data.directory:start_in_prolog",
    "data looked up": "forestage.features.data.requests:show_job_data",
    "directory shown": "forestage.features.data.directory:show_in_step",
    "job's data released": "forestage.features.data.release:release_job_data",
    "all data released": "forestage.features.data.release:release_ended_jobs_data",
    # Peers
    "wrong entries looked at": "forestage.features.peers.wrong_data_notices:list_keys_with_notices",
    "node list renewed": "forestage.features.peers.node_list:renew_if_due",
    # Metrics
    "old metrics dropped": "forestage.features.metrics.textfile:find_last_textfile",
}
COUNTS: dict[str, Callable[..., bool]] = {
    "step answered": lambda *fields: fields[0] in ANSWERS,
    "Prolog's events": lambda _, now, hook, *more: hook == "prolog",
    "step's events": lambda _, now, hook, *more: hook == "step",
    "Epilog's events": lambda _, now, hook, *more: hook == "epilog",
}
"""Which calls of a function that does other work as well are this piece."""

PARTS = {"metrics": "metrics", "prefetch": "prefetch", "stage": "prepare"}
"""Of which feature a part of the minute's work is, where it is not the core's."""

FEATURE = re.compile(r"forestage\.features\.(\w+)")
OF_FEATURES = PARTS | {
    name: found[1] for name, place in PIECES.items() if (found := FEATURE.match(place))
}
GONE = {name for name, of in OF_FEATURES.items() if of not in {row.name for row in FEATURES}}
"""The pieces and parts of features that were deleted."""

IMPORT = "import begun"
START_PART = "forestage.commands.tend:start_part"  # begins a part of the minute's work


class Pair(NamedTuple):
    """In this hook each `first` comes before each `then`; `in_turn`: the nth before the nth."""

    hook: str
    first: str
    then: str
    why: str
    in_turn: bool = False

    def holds(self, done: list[str]) -> bool:
        first, then = (
            [at for at, one in enumerate(done) if one == name] for name in (self.first, self.then)
        )
        if self.in_turn:
            return len(first) == len(then) and all(map(int.__lt__, first, then))
        return first[-1] < then[0]


ORDER = [
    # A Prolog of a job with an image of a registry, one of a file and a directory; an earlier job
    # of its number has left a lease.
    Pair("prolog", "time limits", "earlier job released", "slurmd's limit holds for that, too"),
    Pair(
        "prolog",
        "earlier job released",
        "configuration",
        "that one's lease says which cache it used; today's configuration may be broken",
    ),
    Pair("prolog", "earlier job released", "lease taken", "two jobs share no lease"),
    Pair(
        "prolog",
        "files' marks",
        "off switch",
        "a file that changes while it is read has another mark than the record says",
    ),
    Pair("prolog", "off switch", "configuration", "that may be why an admin has switched it off"),
    Pair(
        "prolog",
        "configuration",
        "user's groups",
        "by the configuration it is known how long the Prolog may wait for them",
    ),
    Pair("prolog", "user's groups", "source opened", "it is opened as the user, with all groups"),
    Pair(
        "prolog",
        "reference taken out",
        "source opened",
        "registry before the core: to the core it would be a path, and declined",
    ),
    Pair("prolog", "source opened", "lease taken", "the open file says which entry is meant", True),
    Pair("prolog", "lease taken", "copy begun", "nothing evicts what a lease names", True),
    Pair("prolog", "copy begun", "copy awaited", "all copies of a job come in at the same time"),
    Pair(
        "prolog",
        "copy awaited",
        "further steps' record",
        "the record says what each image came to",
    ),
    Pair(
        "prolog",
        "copy begun",
        "data noted",
        "core before data: a container does not start without its image",
    ),
    Pair(
        "prolog",
        "further steps' record",
        "data noted",
        "core before data: a step may be there already, and needs no helper by that record",
    ),
    Pair(
        "prolog",
        "data noted",
        "directory begun",
        "with a lease: the sweep takes away what jobs without one have of data",
    ),
    Pair(
        "prolog",
        "directory begun",
        "bad hints noted",
        "the user's first step is told of data that came to nothing as well",
    ),
    Pair("prolog", "bad hints noted", "Prolog's events", "the event tells all that was done"),
    # A step of that job.
    Pair(
        "step",
        "files' marks",
        "Prolog's process awaited",
        "a file that changes meanwhile has another mark than the record says",
    ),
    Pair(
        "step",
        "Prolog's process awaited",
        "configuration",
        "the Prolog's process may have learned what the configuration says now",
    ),
    Pair(
        "step",
        "Prolog's process awaited",
        "data looked up",
        "the Prolog notes what data is asked for",
    ),
    Pair("step", "off switch", "configuration", "that may be why an admin has switched it off"),
    Pair("step", "configuration", "import begun", "it names the store"),
    Pair(
        "step",
        "import begun",
        "source opened",
        "registry before the core: an import takes longest, and has a time limit of its own",
    ),
    Pair(
        "step",
        "import begun",
        "reference taken out",
        "what has begun is no request of the core's any more",
    ),
    Pair(
        "step",
        "reference taken out",
        "source opened",
        "registry before the core: to the core it would be a path, and declined",
    ),
    Pair("step", "source opened", "lease taken", "the open file says which entry is meant", True),
    Pair("step", "lease taken", "copy begun", "nothing evicts what a lease names", True),
    Pair(
        "step",
        "copy awaited",
        "data looked up",
        "core before data: who serves a mounted file waits for the tasks, and these for the image",
    ),
    Pair("step", "directory shown", "user told", "the user reads of data in the same lines"),
    Pair("step", "user told", "step answered", "after its answer nobody reads what a helper says"),
    Pair(
        "step",
        "data looked up",
        "step answered",
        "the companion mounts what it was told before the answer",
    ),
    Pair("step", "step answered", "further steps' record", "the step does not wait for it"),
    Pair("step", "step answered", "step's events", "the log can wait, the step does not"),
    # Its Epilog.
    Pair(
        "epilog",
        "Prolog's process ended",
        "configuration",
        "what a Prolog takes after its job's Epilog would stay",
    ),
    Pair(
        "epilog",
        "steps' images forgotten",
        "disk asked",
        "registry first: it lies in /run, and goes also where the disk hangs",
    ),
    Pair(
        "epilog",
        "steps' images forgotten",
        "lease dropped",
        "a process that takes a lease for a step later knows by that to give it back",
    ),
    Pair("epilog", "disk asked", "use noted", "a note on a disk that hangs would hang the Epilog"),
    Pair(
        "epilog",
        "use noted",
        "lease dropped",
        "without a lease and without that note the entry would be the first to be evicted",
    ),
    Pair("epilog", "lease dropped", "redirects claimed", "what no lease names any more goes"),
    Pair("epilog", "redirects claimed", "redirects unmounted", "one process unmounts each of them"),
    Pair(
        "epilog",
        "redirects unmounted",
        "job's data released",
        "core before data: a redirect outlives its job for everybody on the node",
    ),
    Pair(
        "epilog",
        "lease dropped",
        "job's data released",
        "data after the lease: what no job's lease wants any more goes",
    ),
    Pair(
        "epilog",
        "disk's errors looked at",
        "evicted",
        "an error of the disk is known before a write to it may end the Epilog",
    ),
    Pair("epilog", "job's data released", "evicted", "the job's own directory may be room enough"),
    Pair("epilog", "evicted", "Epilog's events", "the event tells what was evicted"),
    # A sweep, where the job has ended without its Epilog.
    Pair("sweep", "disk must answer", "Slurm asked about leases", "else all is left to the next"),
    Pair(
        "sweep",
        "earlier caches found",
        "lease dropped",
        "a lease may be all that names a cache that was configured before",
    ),
    Pair("sweep", "Slurm asked about leases", "lease dropped", "none of a running job goes"),
    Pair("sweep", "use noted", "lease dropped", "as in the Epilog"),
    Pair(
        "sweep",
        "lease dropped",
        "images' leftovers",
        "what steps of jobs with a lease were shown stays",
    ),
    Pair("sweep", "lease dropped", "all data released", "what no job's lease wants any more goes"),
    Pair("sweep", "lease dropped", "evicted", "their entries may be evicted from now on"),
    Pair(
        "sweep",
        "images' leftovers",
        "dead parts deleted",
        "what needs no cache is done before what does",
    ),
    Pair(
        "sweep",
        "keepers looked at",
        "dead parts deleted",
        "what needs no cache is done before what does; and a keeper may use a part",
    ),
    Pair("sweep", "dead parts deleted", "evicted", "that may be room enough"),
    Pair("sweep", "all data released", "evicted", "that may be room enough"),
    Pair(
        "sweep",
        "evicted",
        "wrong entries looked at",
        "one that was just evicted for room is wrong no more",
    ),
    Pair("sweep", "wrong entries looked at", "entries due", "a wrong entry need not be read"),
    Pair("sweep", "evicted", "entries due", "what is evicted need not be read"),
    Pair(
        "sweep",
        "entries due",
        "store collected",
        "the node's own first: what is shared by all nodes may hang",
    ),
    Pair("sweep", "store collected", "sweep noted", "a sweep that hangs has not been"),
    Pair("sweep", "old metrics dropped", "sweep noted", "a sweep that hangs has not been"),
    Pair("sweep", "sweep noted", "node list renewed", "Slurm may take long"),
    Pair("sweep", "all data released", "sweep's events", "the events tell all that was done"),
    Pair("sweep", "node list renewed", "sweep's events", "the events tell how long it took"),
    # The minute's work, by the commands.
    Pair("tend", "evict", "metrics", "jobs may be waiting for room"),
    Pair("tend", "metrics", "prefetch", "they tell of a node whose Slurm is silent"),
    Pair("tend", "prefetch", "stage", "for these images jobs wait already"),
    Pair("tend", "stage", "sweep leftovers", "nobody waits for what may outlive the minute"),
    Pair("tend", "sweep leftovers", "sweep entries", "what a crash left need not be read"),
]


ORDER = [pair for pair in ORDER if GONE.isdisjoint(pair[1:3])]


class Trouble(NamedTuple):
    """Which pieces a hook still does, and which no more."""

    hook: str
    what: str
    done: tuple[str, ...]
    left_out: tuple[str, ...]
    why: str

    @property
    def is_of_deleted_feature(self) -> bool:
        """Whether only deleted features have work to do in this trouble."""
        return bool(self.done) and GONE.issuperset(self.done)


IN_TROUBLE = [
    Trouble(
        "prolog",
        "off",
        ("earlier job released", "data noted", "bad hints noted"),
        (
            *("reference taken out", "user's groups", "source opened", "lease taken"),
            *("copy begun", "directory begun"),
        ),
        "nothing is staged; what an earlier job left goes, and steps hear that there is no data",
    ),
    Trouble(
        "prolog",
        "broken",
        ("earlier job released", "data noted"),
        ("reference taken out", "user's groups", "lease taken", "copy begun", "directory begun"),
        "nobody knows what the admin forbids; what was released before needs no configuration",
    ),
    Trouble(
        "prolog",
        "hanging",
        ("earlier job released", "reference taken out", "lease taken", "data noted"),
        ("directory begun", "job's data released", "evicted"),
        "a hit writes nothing to the disk; data would",
    ),
    Trouble(
        "step",
        "off",
        ("Prolog's process awaited", "data looked up", "step answered"),
        ("import begun", "lease taken", "copy begun", "directory shown"),
        "a step is shown nothing new, but what earlier steps have put into the job's own directory",
    ),
    Trouble(
        "step",
        "broken",
        ("Prolog's process awaited", "data looked up", "step answered"),
        ("import begun", "lease taken", "copy begun", "directory shown"),
        "as where staging is off",
    ),
    Trouble(
        "step",
        "hanging",
        ("import begun", "lease taken", "copy begun", "data looked up", "step answered"),
        ("directory shown",),
        "a hit only reads; what is mounted from such a disk would hang the tasks",
    ),
    Trouble(
        "epilog",
        "off",
        ("steps' images forgotten", "lease dropped", "job's data released", "evicted"),
        (),
        "what a job has goes, whatever is staged now",
    ),
    Trouble(
        "epilog",
        "broken",
        ("steps' images forgotten", "use noted", "lease dropped", "job's data released"),
        ("evicted",),
        "the lease says which cache it is; how much of it may be full the configuration says",
    ),
    Trouble(
        "epilog",
        "broken without a lease",
        ("configuration", "steps' images forgotten", "Epilog's events"),
        ("lease dropped", "job's data released", "evicted"),
        "nobody knows which cache the job used, and the sweep does it; steps' images are in /run",
    ),
    Trouble(
        "epilog",
        "hanging",
        ("steps' images forgotten", "lease dropped", "redirects unmounted"),
        ("use noted", "job's data released", "evicted"),
        "Slurm waits for an Epilog, so it writes nothing to the disk; the sweep does the rest",
    ),
    Trouble(
        "sweep",
        "off",
        ("lease dropped", "images' leftovers", "all data released", "evicted", "store collected"),
        (),
        "what jobs left goes, whatever is staged now",
    ),
    Trouble(
        "sweep",
        "broken",
        (),
        ("disk must answer", "lease dropped", "images' leftovers", "store collected"),
        "the command says what is wrong, and which cache is meant nobody knows",
    ),
    Trouble(
        "sweep",
        "hanging",
        ("disk must answer",),
        ("lease dropped", "images' leftovers", "all data released", "store collected"),
        "all stays as it is for the next one",
    ),
    Trouble(
        "sweep",
        "unmounted",
        (
            *("lease dropped", "redirects claimed", "keepers looked at", "images' leftovers"),
            *("store collected", "old metrics dropped", "sweep noted", "node list renewed"),
        ),
        (
            *("dead parts deleted", "all data released", "evicted", "wrong entries looked at"),
            *("disk's errors looked at", "entries due"),
        ),
        "what lies in /run or is shared needs no cache, and what lies below its disk is none",
    ),
    Trouble(
        "tend",
        "off",
        ("evict", "metrics", "prefetch", "stage", "sweep leftovers", "sweep entries"),
        (),
        "each part is a command, which knows what it may not do",
    ),
    Trouble(
        "tend",
        "broken",
        ("metrics",),
        ("evict", "prefetch", "stage", "sweep leftovers", "sweep entries"),
        "the metrics say that the configuration is broken",
    ),
    Trouble(
        "tend",
        "hanging",
        ("evict", "metrics", "prefetch", "stage", "sweep leftovers", "sweep entries"),
        (),
        "each part is a process, and one that hangs holds up no other",
    ),
    Trouble(
        "tend",
        "prefetch host",
        ("prefetch",),
        ("evict", "metrics", "stage", "sweep leftovers", "sweep entries"),
        "a host on which no job runs has no cache",
    ),
]
IN_TROUBLE = [row for row in IN_TROUBLE if not row.is_of_deleted_feature]


class Played:
    """A node on which each hook has all of its work to do; `run` plays one of them."""

    def __init__(self, node: Node, notes: Path, patch: pytest.MonkeyPatch) -> None:
        self.node = node
        self.notes = notes
        self.patch = patch
        self.image, self.other = node.put("alice/1.sqsh"), node.put("alice/2.sqsh", content(2))
        self.configure()
        conf = f"optional spank_pyxis.so importer={node.places.root}/forestage-importer\n"
        (node.places.root / "plugstack.conf").write_text(conf)

    def configure(self, prefetch_host: str = "elsewhere") -> None:
        written = self.node.places.root / "metrics"
        written.mkdir(exist_ok=True)
        keys: dict[str, object] = {
            "registry": {"store": str(self.node.shared)},
            "metrics": {"textfile": str(written / "forestage.prom")},
            "prefetch": {"host": prefetch_host},
            "warm_at_boot": [str(self.image)],
        }
        known = {key: keys[key] for key in keys if key in Config.__struct_fields__}
        self.node.configure(redirect="spank", **known)

    def environ(self) -> dict[str, str]:
        asked = f"stage={self.image},{self.other},{self.node.shared}/none/ stage-tell=yes"
        return self.node.environ(JOB, REFERENCE, comment=asked)

    def run(self, hook: str, trouble: Callable[[], object] | None = None) -> list[str]:
        """The pieces of a hook's work in their order, each as often as it was done."""
        if hook != "tend":
            self._be_used(hook)
        if trouble:
            trouble()
        self._listen()
        {"sweep": self._sweep, "tend": self._tend}.get(hook, lambda: self._start(hook))()
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line.split("\t")[1] for line in lines]

    def _be_used(self, hook: str) -> None:
        """Has the image copied, and leaves what the hook finds of its job, or of an earlier one."""
        self.node.prolog(1, comment=f"stage={self.image},{self.other}")
        for key in (self.node.identity(path).key for path in (self.image, self.other)):
            until(lambda key=key: key in self.node.entries() and self.node.is_idle(key), "a copy")  # type: ignore[misc]
        self.node.epilog(1)
        if hook == "prolog":
            self.node.prolog(JOB, self.image, user=BOB)
        else:
            self.node._run("prolog", self.environ(), None)
            until(self._is_settled, "the end of what looks for the directory")
        self.node.places.images.mkdir(parents=True, exist_ok=True)
        (self.node.places.images / f"{JOB}.asked").touch()
        self.node.places.loaded.touch()  # as the companion does it

    def _is_settled(self) -> bool:
        """Whether what looks for the directory, which is not there, has ended."""
        trees = data_view.read_job_data(self.node.leases, JOB).trees.values()
        return [tree.state for tree in trees] == ["declined"]

    def _listen(self) -> None:
        """Has each piece noted as it is begun, by this process or a hook's that is forked."""
        for name, place in PIECES.items():
            if name in GONE:
                continue
            of, _, function = place.rpartition(":")
            where, _, method = function.rpartition(".")
            owner = pkgutil.resolve_name(f"{of}:{where}" if where else of)
            real = getattr(owner, method)
            real = (lambda *_: ("later", "socket")) if name == IMPORT else real
            self.patch.setattr(owner, method, self._noting(name, real))

    def _noting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        counts = COUNTS.get(name, lambda *_, **__: True)

        def called(*args: Any, **kwargs: Any) -> Any:
            if counts(*args, **kwargs):
                self._note(name)
            return real(*args, **kwargs)

        return called

    def _note(self, name: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {os.getppid()}\t{name}\n")

    def _start(self, hook: str) -> None:
        """As Slurm or the companion does it."""
        if hook == "step":
            conf = {"SLURM_CONF": self.environ()["SLURM_CONF"]}
            helper = Helper(self.node, environ(self.node, JOB, REFERENCE) | conf, {})
            pid = helper.process.pid
            out, _ = helper.process.communicate(timeout=HANGS)
            assert out.startswith(PROTOCOL_GREETING.encode())
        else:
            process = start_hook(self.node, hook, self.environ(), subprocess.DEVNULL)  # type: ignore[arg-type]
            pid = process.pid
            process.communicate(timeout=HANGS)
        # What the processes do that it has started stands in no order to its own work.
        lines = self.notes.read_text().splitlines()
        pids = [tuple(map(int, line.split("\t")[0].split())) for line in lines]
        worker = next(own for own, parent in pids if parent == pid)
        begun = [own for own, _ in pids].index(worker)
        own = [
            line
            for n, (line, (who, _)) in enumerate(zip(lines, pids, strict=True))
            if who == worker or (who == pid and n < begun)
        ]
        self.notes.write_text("".join(f"{line}\n" for line in own))

    def _sweep(self) -> None:
        self.patch.setattr(SlurmClient, "from_environ", lambda _: Idle("", node="n1"))
        self._command("sweep")

    def _command(self, name: str) -> None:
        CliRunner().invoke(main, [name], obj=CommandContext(self.node.places, Clock()))

    def _tend(self) -> None:
        def start(environ: object, part: TendPart, held: int | None) -> Ended:
            words = (word for word in part.command if not word.startswith("-") and word != "0")
            self._note(" ".join(words))
            return Ended()

        module, _, function = START_PART.partition(":")
        self.patch.setattr(pkgutil.resolve_name(module), function, start)
        self._command("tend")

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """The cache's disk takes no writes, as a process that asked it long ago remembers."""
        folder = self.node.places.probes
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"cache-{sha256(os.fsencode(self.node.cache.root))[:16]}"
        with file.open("w") as asking, subprocess.Popen(["sleep", "inf"]) as hung:
            try:
                of_it = Path(f"/proc/{hung.pid}")
                until(lambda: processes.read_stat(of_it).state == "S", "a process that waits")
                fcntl.flock(asking, fcntl.LOCK_EX)
                asking.write(f"writes {time.monotonic() - 1000:f} {hung.pid}")
                asking.flush()
                yield
            finally:
                hung.kill()


class Ended:
    """The process of a part, whose work is none of this test's."""

    pid = 0
    exit_code = 0

    def wait(self, seconds: float) -> bool:
        return True


@pytest.fixture
def played(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    with monkeypatch.context() as patch:
        yield Played(node, tmp_path / "notes", patch)


@pytest.mark.parametrize("hook", ["prolog", "step", "epilog", "sweep", "tend"])
def test_hook_does_its_work_in_the_required_order(played: Played, hook: str) -> None:
    done = played.run(hook)
    missing = {name for pair in ORDER if pair.hook == hook for name in pair[1:3]} - {*done}
    assert missing == set(), done
    wrong = [
        f"not {pair.first} before {pair.then}, as {pair.why}\n"
        for pair in ORDER
        if pair.hook == hook and not pair.holds(done)
    ]
    assert "".join(wrong) == "", done


@pytest.mark.parametrize("row", IN_TROUBLE, ids=lambda row: f"{row.hook}-{row.what}")
def test_hook_in_trouble_does_the_required_work_and_leaves_out_the_rest(
    played: Played, row: Trouble
) -> None:
    node = played.node
    with contextlib.ExitStack() as stack:
        done = played.run(
            row.hook,
            {
                "off": lambda: node.switch_off("repair"),
                "broken": lambda: node.write_config("{"),
                "broken without a lease": lambda: (
                    node.write_config("{"),
                    node.leases.drop_lease(JOB),
                ),
                "hanging": lambda: stack.enter_context(played.hanging()),
                "unmounted": lambda: unmount(node.nvme),
                "prefetch host": lambda: played.configure(os.uname().nodename),
            }[row.what],
        )
    assert {*row.done} - {*done} - GONE == set(), (row.why, done)
    assert {*row.left_out} & {*done} == set(), (row.why, done)
