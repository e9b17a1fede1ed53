"""Steps that read their image while it is copied: from a source that is slow, hangs, or changes.

What is read through is told by the mount that the task finds at its image's path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import images
import pytest
import slow
from cluster import Cluster
from host import wait_until
from jobs import CACHE, Ran, Site
from slow import SlowSource
from spec import ClusterSpec
from steps import accompanied, served

from forestage import events
from forestage.cache.part import PROCESS_NAME as STAGER
from forestage.events import RequestOutcome
from forestage.views.through.keeper import PROCESS_NAME as KEEPER
from forestage.views.through.keeper import SERVER_NAME as SERVER

HOLD = 8  # MiB of an image that a hanging source still gives: what a container needs to start
MIB = 24  # of an image that hangs
# Opened first: a container's programs come through the same file.
LOOK = "exec <{image}; sha256sum; cat /proc/self/mountinfo"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    """Other than elsewhere nobody has read the image before the task does."""
    # Else Slurm kills what does not end by itself, after 30 s, and nobody sees that it did not.
    spec = accompanied(2, KillWait="600")
    return dataclasses.replace(spec, plugstack=("required {state}/pyxis.so",))


@pytest.fixture(scope="module")
def far(site_cluster: Cluster) -> Iterator[SlowSource]:
    with slow.mounted(site_cluster) as source:
        yield source


@pytest.fixture
def through(far: SlowSource, spank: Site) -> Iterator[Site]:
    """Nodes on which cold images are read through, and where nothing stays of that."""
    far.behaves()
    spank.configure(redirect="spank", cold="through", chunk_size="1MiB")
    yield spank
    far.behaves()
    spank.cluster.wait_idle()
    spank.await_stagers()
    spank.await_keepers()
    assert left(spank) == []


def left(site: Site) -> list[Path]:
    """What is in /run/forestage/through but the locks of keepers that have ended."""
    folders = [site.cluster.host_path("/run/forestage/through", n) for n in site.cluster.nodes]
    return [one for f in folders for one in f.glob("*/*") if one.name != "lock"]


def clean_up(site: Site) -> None:
    """What killed processes have left, by the sweep that comes a minute later."""
    site.cluster.wait_idle()
    later = ["find", "/run/forestage/through", "-exec", "touch", "-d", "1 hour ago", "{}", "+"]
    for _ in range(2):  # those that hang, then what they have left, if no stager needs it
        site.root(later, "n1")
        site.command("sweep")
        site.await_keepers()
        site.await_stagers()
    assert left(site) == []
    site.root(["sh", "-c", f"rm -rf {CACHE}/parts/*"], "n1")  # a later copy would go on with it


def looks(image: str) -> str:
    """What a task does that reads its image whole."""
    return f"sh -c '{LOOK.format(image=image)}'"


def read_through(said: str) -> list[str]:
    """The digests that tasks read, by their output, if each of them did so through the copy."""
    digests = [line.split()[0] for line in said.splitlines() if line.endswith("  -")]
    return digests if said.count(" fuse.forestage ") == len(digests) else []


# How a user may ask; two steps at once have one keeper.
WAYS: dict[str, Callable[[Site, str], Ran]] = {
    "srun": lambda site, image: site.run(
        ["srun", f"--container-image={image}", "sh", "-c", LOOK.format(image=image)]
    ),
    "inner": lambda site, image: site.sbatch(f"srun --container-image={image} {looks(image)}"),
    "salloc": lambda site, image: site.run(
        ["salloc", "srun", f"--container-image={image}", "sh", "-c", LOOK.format(image=image)], "n2"
    ),
    "at-once": lambda site, image: site.sbatch(
        "\n".join(
            [f"srun -n2 --overlap --container-image={image} {looks(image)} &"] * 2 + ["wait"]
        ),
        "--ntasks=2",
        node="n2",
    ),
}


@pytest.mark.always
def test_cold_steps_start_before_the_copy_is_whole_and_read_the_right_bytes(
    through: Site, far: SlowSource
) -> None:
    names = list(WAYS)
    paths = [far.image(name, mib=8, seed=seed) for seed, name in enumerate(names)]
    far.behaves(reads=20)
    # Four seconds: a step waits for one for so small an image, unless its Prolog has begun it.
    keys = {"cold": "through", "chunk_size": "1MiB", "bandwidth": "2MiB"}
    through.configure(redirect="spank", **keys)
    with ThreadPoolExecutor() as pool:
        rans = list(pool.map(lambda way, image: WAYS[way](through, image), names, paths))
    through.await_stagers()
    for name, image, ran in zip(names, paths, rans, strict=True):
        node = "n1" if name in ("srun", "inner") else "n2"
        tasks = 4 if name == "at-once" else 1
        assert read_through(ran.stdout) == [far.sha256(name)] * tasks, ran
        assert {one.result for one in served(through, ran.job, node)} == {"through"}
        assert began_before_copy_was_whole(through, ran.job, image, node)
        assert "through" in through.command("explain", str(ran.job), node=node)


def test_step_reads_through_its_prologs_keeper_without_a_helper(
    through: Site, far: SlowSource
) -> None:
    image, digest = far.image("known", mib=MIB), far.sha256("known")
    far.behaves(hold=HOLD)
    go = through.source("/shared/alice/go")
    go.unlink(missing_ok=True)
    script = f"#!/bin/sh\nuntil test -e go; do sleep 0.05; done\nsrun {looks(image)}\n"
    where = ["--nodelist=n1", "--output=known", f"--container-image={image}"]
    job = through.cluster.submit(script, *where)
    keepers = through.cluster.host_path("/run/forestage/through", "n1")
    wait_until(lambda: any(keepers.glob("*/sock")), 60, lambda: "no keeper listens")
    go.touch()
    wait_until(lambda: waits(through), 60, lambda: "the step does not read")
    far.behaves()
    through.wait_over(job)
    assert read_through(through.cluster.read("/shared/alice/known")) == [digest]
    steps = served(through, job, "n1")
    assert [one.result for one in steps] == ["through"] * len(steps) != []
    assert [one.wait for one in steps if isinstance(one, RequestOutcome)][-1] == 0.0


def began_before_copy_was_whole(site: Site, job: int, image: str, node: str) -> bool:
    log = events.read_events(site.cluster.host_path("/var/log/forestage/events.jsonl", node))
    of_image = [event for event in log if getattr(event.outcome, "image", "") == image]
    steps = [event.time for event in of_image if event.hook == "step" and event.job == job]
    (copy,) = [event for event in of_image if event.hook == "stager"]
    return copy.outcome.result == "copied" and max(steps) < copy.time


# In the middle of it


@dataclasses.dataclass
class Reading:
    """A step on n1 that reads an image from a source that gives no more."""

    site: Site
    far: SlowSource
    name: str
    image: str
    step: subprocess.Popen[str]

    def pid(self, name: str, besides: str = "") -> str:
        """Of the keeper, the server or the stager; waits until there is one."""
        found: list[str] = []

        def there() -> bool:
            found[:] = [pid for pid in self.site.named("n1", name) if pid != besides]
            return bool(found)

        wait_until(there, 60, lambda: f"no {name}")
        return found[0]

    def signal(self, number: int, name: str) -> str:
        """Its pid; of what was killed nothing is left then."""
        pid = self.pid(name)
        self.site.root(["kill", f"-{number}", pid], "n1")
        if number == signal.SIGKILL:
            wait_until(
                lambda: pid not in self.site.named("n1", name), 60, lambda: f"{name} lives on"
            )
        return pid

    def ended(self) -> tuple[str, str]:
        """What the step said."""
        return self.step.communicate(timeout=120)


@contextlib.contextmanager
def reading(site: Site, far: SlowSource, name: str, *options: str) -> Iterator[Reading]:
    image = far.image(name, mib=MIB)
    far.behaves(hold=HOLD)
    before = far.calls()["held"]
    argv = ["srun", f"--job-name={name}", "--nodelist=n1", f"--container-image={image}", *options]
    step = site.cluster.popen([*argv, "sh", "-c", LOOK.format(image=image)])
    try:
        wait_until(
            lambda: step.poll() is not None or (waits(site) and far.calls()["held"] > before),
            60,
            lambda: f"the step does not read\n{site.cluster.overview()}",
        )
        assert step.poll() is None, step.communicate()
        yield Reading(site, far, name, image, step)
    finally:
        far.behaves()
        if step.poll() is None:
            site.cluster.run(["scancel", f"--name={name}"], user="root")
            step.communicate(timeout=60)


def waits(site: Site) -> bool:
    """Whether the task on n1 hangs where the source does; read-ahead is less than 2 MiB."""
    for pid in site.named("n1", "sha256sum"):
        process = site.cluster.host_path(f"/proc/{pid}", "n1")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            read = int((process / "fdinfo/0").read_text().split()[1])
            return read > (HOLD - 2) * images.MIB and "\tD " in (process / "status").read_text()
    return False


def kill_server(at: Reading) -> None:
    at.pid(SERVER, besides=at.signal(signal.SIGKILL, SERVER))


def stop_server(at: Reading) -> None:
    """Its keeper finds it silent, and starts another."""
    at.pid(SERVER, besides=at.signal(signal.SIGSTOP, SERVER))


def kill_stager(at: Reading) -> None:
    at.signal(signal.SIGKILL, STAGER)


def kill_keeper(at: Reading) -> None:
    at.signal(signal.SIGKILL, KEEPER)


def end_another_job(at: Reading) -> None:
    """With its Epilog; it has the same image."""
    at.site.run(["srun", "--overcommit", f"--container-image={at.image}", "true"])


def restart_slurmd(at: Reading) -> None:
    at.site.root(["sh", "-c", "kill -9 $(cat /run/slurmd.pid); exec slurmd -N n1"], "n1")


def sweep(at: Reading) -> None:
    at.site.command("sweep")


def replace_source(at: Reading) -> None:
    at.site.cluster.run(
        ["sh", "-c", f"echo other >{slow.FOLDER}/x; mv {slow.FOLDER}/x {at.far.hidden(at.name)}"]
    )


def unlink_source(at: Reading) -> None:
    at.site.cluster.run(["rm", at.far.hidden(at.name)])


# Nothing starts another server once the keeper is gone: that comes last.
MISHAPS: Sequence[Callable[[Reading], None]] = (
    kill_server,
    stop_server,
    end_another_job,
    restart_slurmd,
    sweep,
    replace_source,
    kill_stager,
    unlink_source,
    kill_keeper,
)
EACH = [pytest.param([one], id=one.__name__, marks=pytest.mark.long) for one in MISHAPS]


@pytest.mark.parametrize("mishaps", [*EACH, pytest.param(MISHAPS, id="all")])
def test_step_reading_through_gets_right_bytes_despite_killed_processes_and_changes(
    through: Site, far: SlowSource, mishaps: Sequence[Callable[[Reading], None]]
) -> None:
    with reading(through, far, "on") as at:
        digest = far.sha256(at.name)
        for happen in mishaps:
            happen(at)
        far.behaves()
        stdout, stderr = at.ended()
        assert read_through(stdout) == [digest], (stdout, stderr)
    clean_up(through)


def test_step_fails_with_not_connected_after_its_keeper_and_server_were_killed(
    through: Site, far: SlowSource
) -> None:
    with reading(through, far, "both") as at:
        at.signal(signal.SIGKILL, KEEPER)
        at.signal(signal.SIGKILL, SERVER)
        stdout, stderr = at.ended()
    assert "Transport endpoint is not connected" in stderr, (stdout, stderr)
    clean_up(through)


def stop_all(at: Reading) -> None:
    at.signal(signal.SIGSTOP, KEEPER)
    at.signal(signal.SIGSTOP, SERVER)


def hang(at: Reading) -> None:
    """The source does, as it is."""


@pytest.mark.parametrize("trouble", [hang, stop_all])
def test_hanging_source_or_server_blocks_neither_df_nor_scancel_nor_the_node(
    through: Site, far: SlowSource, trouble: Callable[[Reading], None]
) -> None:
    with reading(through, far, "hung") as at:
        trouble(at)
        for command in (["df"], ["findmnt"], ["lsof", "-w"]):
            done = through.cluster.run(command, user="root", node="n1", timeout=60, check=False)
            assert command[0] == "lsof" or at.image not in done.stdout
        through.cluster.run(["scancel", f"--name={at.name}"])
        at.ended()
        through.cluster.wait_idle()
    if trouble is stop_all:
        clean_up(through)


def test_step_reading_through_uses_the_published_entry_and_a_later_step_hits(
    through: Site, far: SlowSource
) -> None:
    image, digest = far.image("entry", mib=MIB), far.sha256("entry")
    far.behaves(hold=HOLD)
    on, off = (through.source(f"/shared/alice/{name}") for name in ("on", "off"))
    on.unlink(missing_ok=True)
    off.unlink(missing_ok=True)
    wait = "touch /shared/alice/on; until test -e /shared/alice/off; do sleep 0.05; done"
    argv = ["srun", "--nodelist=n1", f"--container-image={image}", "sh", "-c"]
    step = through.cluster.popen([*argv, f"{wait}; {LOOK.format(image=image)}"])
    try:
        wait_until(on.exists, 60, lambda: "no start")
        far.behaves()
        through.await_stagers()
        later = through.srun(image)
        assert [one.result for one in served(through, later.job, "n1")] == ["hit"]
        (key,) = through.entries()
        wait_until(lambda: has_open(through, SERVER, key), 60, lambda: "it is not looked for")
        far.behaves(reads=-1)  # and nothing but the copy, which is removed, has the bytes
        through.root(["rm", "-rf", f"{CACHE}/entries/{key}"], "n1")
    finally:
        off.touch()
        stdout, stderr = step.communicate(timeout=120)
    assert read_through(stdout) == [digest], (stdout, stderr)


def has_open(site: Site, name: str, key: str) -> bool:
    """Whether such a process on n1 has the entry open."""
    files = [site.cluster.host_path(f"/proc/{pid}/fd", "n1") for pid in site.named("n1", name)]
    wanted = f"/entries/{key}/image"
    return any(str(fd.readlink()).endswith(wanted) for one in files for fd in one.iterdir())


@pytest.mark.long
def test_requeued_job_reads_through_the_copy_again(through: Site, far: SlowSource) -> None:
    image, digest = far.image("again", mib=MIB), far.sha256("again")
    far.behaves(hold=HOLD)
    script = f"#!/bin/sh\nsrun --container-image={image} {looks(image)}\n"
    where = ["--nodelist=n1", "--output=again", "--requeue", "--open-mode=append"]
    job = through.cluster.submit(script, *where)
    wait_until(lambda: waits(through), 60, lambda: "the step does not read")
    through.cluster.run(["scontrol", "requeue", str(job)], user="root")
    wait_until(lambda: not waits(through), 60, lambda: "the step goes on")
    wait_until(lambda: waits(through), 240, lambda: "the job does not come back", 0.5)
    far.behaves()
    through.wait_over(job)
    assert read_through(through.cluster.read("/shared/alice/again")) == [digest]
