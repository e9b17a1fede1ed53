"""The tables behind bench/prefetch: images of jobs that wait, on a real slurmctld with 8 nodes.

The clusters are those of bench/peers, links and file server shaped. Random jobs of one to four
whole nodes run 8 to 45 s, with limits of 2 or 6 times that, which Slurm rounds up to minutes; ten
wait at any time, as long as there are more. Their images are drawn of 20 by Zipf's law; a node's
cache holds half of these, and is empty at first. Each seed's jobs run once each way:

    none      a job's own copy only, for which it does not wait (`cold: auto`)
    queue     `prefetch:` as it is shipped, with `prefetch.bandwidth`
    popular   the same nodes with another list: the images that started most often so far
    warm      all images of these jobs are on all nodes, whose caches hold them
    again     with --again, in place of `popular`: `none` once more, how far two such runs differ

Two ways run at once, on a cluster each. Host and nodes make a pass every few seconds here, not
every minute, as jobs are that much shorter. On each node a job's step reads the whole image, as
unpacking does, and then sleeps for as long as the job runs. `s` is from slurmctld's start of the
job to the image's last byte on a node, of all nodes of the jobs that waited for more than a second;
Slurm's own start of job and step is in it. `later`: jobs that started more than a second later than
without prefetch, since the first one was submitted; `by`: the most. `read`: images that the file
server gave, for each start on a node.

Then a pass of the prefetch host on a slurmctld of its own, with 10,000 jobs (prefetch_pending.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True
REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests/slurm"), str(REPO / "tests")]

import busy  # noqa: E402
import net  # noqa: E402
import prefetch_pending  # noqa: E402
from cluster import Cluster, ClusterError  # noqa: E402
from fleet import EVENTS, MIB, Fleet, networked  # noqa: E402
from host import wait_until  # noqa: E402
from jobs import CLI  # noqa: E402
from memory import print_in_memory  # noqa: E402
from peers_watch import read_processor_ticks  # noqa: E402
from prefetch_model import draw_zipf  # noqa: E402
from spec import ALICE, LOGIN, STORE, USERS, Net  # noqa: E402

from forestage import events  # noqa: E402
from forestage.features.prefetch import expected_list, prefetch_record, service  # noqa: E402
from forestage.features.prefetch.expected_list import ExpectedImageList  # noqa: E402
from forestage.features.prefetch.policy import ExpectedStarts  # noqa: E402
from forestage.paths import NodePaths  # noqa: E402
from forestage.slurm.nodelist import expand_nodelist  # noqa: E402

NODES, QUEUE, IMAGES = 8, 10, 20
PAIRS = (("none", "queue"), ("popular", "warm"))
NOTHING = ("none", "again")  # ways without prefetch
MOST_NODES = 4  # of a job
LIMITS = (2, 6)  # times as much
EVERY = 5.0  # seconds from the end of a pass to the next one
UNSHAPED = 20_000  # Mbit/s
READ = "/mnt/nvme/read"  # on each node: when each job's image had been read
SCRIPT = """\
#!/bin/sh
srun --ntasks-per-node=1 sh -c '
    cat {image} >/dev/null
    date +%s.%N >{read}/$SLURM_JOB_ID
    sleep {seconds}'
"""
AT = r"^\[(\S+)\] "
STARTED = re.compile(
    AT + r"(?:sched: Allocate|sched/backfill: _start_job: Started) JobId=(\d+) "
    r"(?:NodeList=|in \S+ on )(\S+)",
    re.MULTILINE,
)
SUBMITTED = re.compile(AT + r"_slurm_rpc_submit_batch_job: JobId=(\d+)", re.MULTILINE)
ENDED = re.compile(AT + r"_job_complete: JobId=(\d+) done", re.MULTILINE)


class PrefetchJob(NamedTuple):
    image: str
    user: str
    nodes: int
    seconds: int
    limit: int  # minutes


class ImageRead(NamedTuple):
    """Of a node of a job that waited: seconds until it had read the image; `cold`: no copy was."""

    job: int  # the first is 0
    node: str
    seconds: float
    cold: bool


@dataclass(frozen=True)
class PrefetchRun:
    """One seed's jobs, one way. `asked`, `starts`: by job, in seconds since the first was asked."""

    reads: Sequence[ImageRead]
    asked: Sequence[float]
    starts: Sequence[float]
    makespan: float
    wait: float
    read: float
    busy: float


def make_jobs(
    seed: int, count: int, runs: tuple[int, int], images: Sequence[str]
) -> list[PrefetchJob]:
    chance = random.Random(seed)
    names = draw_zipf(len(images), chance)
    low, high = runs
    found = []
    for number in range(count):
        seconds = round(low * (high / low) ** chance.random())  # as many short ones as long ones
        nodes = 1 if chance.random() < 0.5 else chance.randint(1, MOST_NODES)
        limit = -(-seconds * chance.choice(LIMITS) // 60)
        image = images[int(next(names)[1:])]
        found.append(PrefetchJob(image, USERS[number % len(USERS)].name, nodes, seconds, limit))
    return found


Work = Callable[[threading.Event], object]
"""Ends early once the event is set."""


class TimerThreads:
    """What systemd's do on real hosts: works that are done now and then, until the end."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._end = threading.Event()
        self._failed: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=(work, EVERY * number / len(works)))
            for number, work in enumerate(works)
        ]

    def _repeat(self, work: Work, first: float) -> None:
        try:
            self._end.wait(first)
            while not self._end.is_set():
                work(self._end)
                self._end.wait(EVERY)
        except Exception as error:
            self._failed.append(error)

    def __enter__(self) -> TimerThreads:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        if self._failed:
            raise self._failed[0]


class PrefetchBench:
    """A cluster with images, on which jobs are run one way and another."""

    def __init__(self, fleet: Fleet, options: argparse.Namespace) -> None:
        self.fleet, self.options = fleet, options
        self.log = fleet.cluster.state / "log/slurmctld.log"
        sizes = random.Random(0)
        self.sizes = {
            fleet.data(f"image-{number}", size): size * MIB
            for number in range(IMAGES)
            for size in [sizes.randint(*options.mib)]
        }
        for path in self.sizes:  # of one that was just written nothing is copied ahead
            os.utime(fleet.source(path), (time.time() - 3600,) * 2)
        self.mean = statistics.mean(self.sizes.values())

    def configure(self, **keys: object) -> None:
        room = int(self.mean * IMAGES / 2)
        own = {"max_size": room, "min_free": "1%", "redirect": "spank", "cold": "auto"}
        self.fleet.configure(**{**own, **peering(self.options), **keys})

    def prepare(self, way: str, chosen: Sequence[PrefetchJob]) -> None:
        """Empty caches, or full ones; nobody knows of a queue."""
        fleet, cluster = self.fleet, self.fleet.cluster
        fleet.reset()
        for node in (None, *cluster.nodes):
            known = places(cluster, node)
            service.locate_list(known).unlink(missing_ok=True)
            prefetch_record.locate_record(known).unlink(missing_ok=True)
        for node in cluster.nodes:
            fleet.root(["sh", "-c", f"rm -rf {READ}; mkdir -m 1777 {READ}"], node)
        self.configure()
        if way == "warm":
            self.stage_all(chosen)
        elif way not in NOTHING:
            self.configure(prefetch={"host": LOGIN, "bandwidth": self.options.bandwidth * MIB})

    def run(self, way: str, chosen: Sequence[PrefetchJob]) -> PrefetchRun:
        fleet, cluster = self.fleet, self.fleet.cluster
        made: dict[int, PrefetchJob] = {}
        skip = self.log.stat().st_size  # what earlier jobs wrote
        ticks, before = read_processor_ticks(), fleet.read_of_store()
        with TimerThreads(self.works(way, made)):
            for job in chosen:
                wait_until(lambda: self.waiting(skip, made) < QUEUE, 600, cluster.overview, 0.2)
                made[self.submit(job)] = job
            cluster.wait_idle(900)
        used, total = (now - then for now, then in zip(read_processor_ticks(), ticks, strict=True))
        read = (fleet.read_of_store() - before) / self.mean
        fleet.end_stagers()
        return self.result(made, skip, read, used / total)

    def works(self, way: str, made: Mapping[int, PrefetchJob]) -> list[Work]:
        if way in (*NOTHING, "warm"):
            return []
        host = partial(self.popular, made) if way == "popular" else partial(self.pass_of, LOGIN)
        return [host, *(partial(self.pass_of, node) for node in self.fleet.cluster.nodes)]

    def pass_of(self, node: str, end: threading.Event) -> None:
        """As the unit has it. Raises ClusterError where it fails."""
        argv = ["nice", "-n19", CLI, "prefetch", "--node", node]
        at = None if node == LOGIN else node
        at_work = self.fleet.cluster.popen(argv, user="root", node=at)
        while at_work.poll() is None and not end.wait(0.2):
            pass
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            self.fleet.cluster.signal(at_work, signal.SIGTERM)
        said = at_work.communicate(timeout=60)
        if at_work.returncode and not end.is_set():
            raise ClusterError(f"{node}: {said}")

    def waiting(self, skip: int, made: Mapping[int, PrefetchJob]) -> int:
        return len(made) - len(STARTED.findall(self.said(skip)))

    def said(self, skip: int) -> str:
        with self.log.open("rb") as file:
            file.seek(skip)
            return file.read().decode(errors="replace")

    def submit(self, job: PrefetchJob) -> int:
        where = [f"--nodes={job.nodes}", "--exclusive", f"--time={job.limit}", "--output=/dev/null"]
        script = SCRIPT.format(image=job.image, read=READ, seconds=job.seconds)
        hint = f"--comment=stage={job.image}"
        return self.fleet.cluster.submit(script, *where, hint, "--no-requeue", user=job.user)

    def popular(self, made: Mapping[int, PrefetchJob], _: threading.Event) -> None:
        """The list of what started most often, as the host writes its own."""
        seen = Counter[str]()
        for _, number, nodes in STARTED.findall(self.said(0)):
            if int(number) in made:
                seen[made[int(number)].image] += len(expand_nodelist(nodes))
        now, nodes = time.time(), f"n[1-{NODES}]"
        rows = tuple(ExpectedStarts("all", image, ALICE.uid, n) for image, n in seen.most_common())
        listed = ExpectedImageList(
            int(now * 1000), now, now + expected_list.LIST_LASTS, {"all": nodes}, rows
        )
        expected_list.write_list(places(self.fleet.cluster, None), listed)

    def stage_all(self, chosen: Sequence[PrefetchJob]) -> None:
        """Has all images of these jobs on all nodes."""
        cluster, links = self.fleet.cluster, self.fleet.links
        self.configure(max_size="99%")
        self.shape(UNSHAPED, UNSHAPED)
        words = [CLI, "stage", *sorted({job.image for job in chosen})]
        at_work = [cluster.popen(words, user="root", node=node) for node in cluster.nodes]
        for process in at_work:
            out, err = process.communicate(timeout=600)
            if process.returncode:
                raise ClusterError(f"not staged: {out}{err}")
        self.shape(links.node_mbit, links.store_mbit)

    def shape(self, node_mbit: float, store_mbit: float) -> None:
        cluster = self.fleet.cluster
        for name in (STORE, *cluster.nodes):
            mbit = store_mbit if name == STORE else node_mbit
            cluster.run(net.shape(net.port(name), mbit), user="root")
            within = ["ip", "netns", "exec", name]
            cluster.run([*within, *net.shape("eth0", mbit)], user="root")

    def result(
        self, made: Mapping[int, PrefetchJob], skip: int, read: float, busy: float
    ) -> PrefetchRun:
        said = self.said(skip)
        asked = {int(number): parse_time(at) for at, number in SUBMITTED.findall(said)}
        ended = {int(number): parse_time(at) for at, number in ENDED.findall(said)}
        began = {
            int(job): (parse_time(at), expand_nodelist(on)) for at, job, on in STARTED.findall(said)
        }
        if not began.keys() == ended.keys() == made.keys():
            raise ClusterError(f"not all jobs ran: {made.keys()} {began} {ended}")
        hits = {node: self.hits(node) for node in self.fleet.cluster.nodes}
        reads = []
        for place, number in enumerate(sorted(made)):
            start, nodes = began[number]
            for node in nodes:
                done = float(self.fleet.cluster.read(f"{READ}/{number}", node))
                if start - asked[number] > 1:
                    reads.append(ImageRead(place, node, done - start, number not in hits[node]))
        first = min(asked.values())
        return PrefetchRun(
            reads=reads,
            asked=[round(asked[number] - first, 3) for number in sorted(made)],
            starts=[round(began[number][0] - first, 3) for number in sorted(made)],
            makespan=max(ended.values()) - first,
            wait=statistics.mean(began[number][0] - asked[number] for number in made),
            read=read / sum(len(nodes) for _, nodes in began.values()),
            busy=busy,
        )

    def hits(self, node: str) -> set[int]:
        """The jobs that found their image on the node."""
        log = self.fleet.cluster.host_path(EVENTS, node)
        prologs = [one for one in events.read_events(log) if one.hook == "prolog"]
        return {one.job for one in prologs if one.outcome.result == "hit"}


def places(cluster: Cluster, node: str | None) -> NodePaths:
    return NodePaths(cluster.host_path("/", node))


def parse_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# The table

Runs = Mapping[str, Mapping[int, PrefetchRun]]  # by way, by seed


def seconds(runs: Mapping[int, PrefetchRun]) -> list[float]:
    return sorted(one.seconds for run in runs.values() for one in run.reads)


def find_quantile(values: Sequence[float], share: float) -> float:
    """The value below which so many of the values are."""
    return values[min(len(values) - 1, int(share * len(values)))]


def list_ratios(runs: Runs, way: str, of: Callable[[PrefetchRun], float]) -> list[float]:
    """To `none`, by seed."""
    return [of(run) / of(runs["none"][seed]) for seed, run in runs[way].items()]


def makespan(run: PrefetchRun) -> float:
    return run.makespan


def wait(run: PrefetchRun) -> float:
    return run.wait


def mean(run: PrefetchRun) -> float:
    return statistics.mean(one.seconds for one in run.reads)


def find_delays(runs: Runs, way: str) -> list[float]:
    """By how much jobs started later than without, of those for which it is over a second."""
    found = []
    for seed, run in runs[way].items():
        pairs = zip(run.starts, runs["none"][seed].starts, strict=True)
        found += [start - without for start, without in pairs if start - without > 1]
    return found


def format_table(runs: Runs) -> Iterator[str]:
    yield "| | starts | cold % | s | to none | from | to | half | nine tenths | most | read |"
    yield "|:--" + "|--:" * 10 + "|"
    for way, one in runs.items():
        took = seconds(one)
        cold = statistics.mean(read.cold for run in one.values() for read in run.reads)
        figures = [f"{len(took)}", f"{100 * cold:.0f}", f"{statistics.mean(took):.2f}"]
        figures += format_spread(list_ratios(runs, way, mean))
        figures += [
            f"{find_quantile(took, 0.5):.1f}",
            f"{find_quantile(took, 0.9):.1f}",
            f"{took[-1]:.1f}",
        ]
        figures.append(f"{statistics.mean(run.read for run in one.values()):.2f}")
        yield f"| {way} | {' | '.join(figures)} |"


def format_makespans(runs: Runs) -> Iterator[str]:
    """What becomes of the jobs as a whole."""
    columns = "s | to none | from | to"
    yield f"| | makespan {columns} | wait {columns} | later | by s | busy % |"
    yield "|:--" + "|--:" * 11 + "|"
    for way, one in runs.items():
        figures = []
        for of in (makespan, wait):
            figures.append(f"{statistics.mean(map(of, one.values())):.0f}")
            figures += format_spread(list_ratios(runs, way, of))
        late = find_delays(runs, way)
        figures += [f"{len(late)}", f"{max(late, default=0):.1f}"]
        figures.append(f"{100 * statistics.mean(run.busy for run in one.values()):.0f}")
        yield f"| {way} | {' | '.join(figures)} |"


def format_spread(values: Sequence[float]) -> list[str]:
    return [f"{one:.2f}" for one in (statistics.mean(values), min(values), max(values))]


def format_summary(runs: Runs) -> str:
    """The p90 beside that of `warm`; all others to `none`."""
    third = next(way for way in runs if way in ("popular", "again"))
    took = {way: seconds(one) for way, one in runs.items()}
    readable = {way: statistics.mean(list_ratios(runs, way, mean)) for way in runs}
    p90 = find_quantile(took["queue"], 0.9) - find_quantile(took["warm"], 0.9)
    spans, waits = (statistics.mean(list_ratios(runs, "queue", of)) for of in (makespan, wait))
    return (
        f"readable={readable['queue']:.2f} {third}={readable[third]:.2f}"
        f" warm={readable['warm']:.2f} p90_over_warm={p90:.1f} makespan={spans:.2f}"
        f" wait={waits:.2f} later={len(find_delays(runs, 'queue'))}"
    )


def run_bench(options: argparse.Namespace) -> Iterator[str]:
    load, begun = busy.MachineLoad(), time.monotonic()
    pairs = (PAIRS[0], ("again", "warm")) if options.again else PAIRS
    found: dict[str, dict[int, PrefetchRun]] = {way: {} for pair in pairs for way in pair}
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())  # ends after the clusters
        benches = [stack.enter_context(start_bench_cluster(options)) for _ in range(2)]
        yield (
            f"{IMAGES} images of {benches[0].mean / MIB:.0f} MiB, node links"
            f" {options.node_mbit:g} Mbit/s, file servers' {options.store_mbit:g},"
            f" prefetch.bandwidth {options.bandwidth} MiB/s, peers.reach {options.reach},"
            f" {options.jobs} jobs for each of {options.seeds} seeds,"
            f" {os.cpu_count()} processors for all of it\n"
        )
        for seed in range(1, 1 + options.seeds):
            chosen = make_jobs(seed, options.jobs, options.runs, list(benches[0].sizes))
            for pair in pairs:
                list(pool.map(PrefetchBench.prepare, benches, pair, [chosen] * 2))
                runs = pool.map(PrefetchBench.run, benches, pair, [chosen] * 2)
                for way, one in zip(pair, runs, strict=True):
                    found[way][seed] = one
                    if options.trace:
                        yield f"{time.monotonic() - begun:.0f} s, seed {seed}, {way}: {one}"
    yield from (*format_table(found), "", *format_makespans(found), "")
    rounds = prefetch_pending.run_passes(options.pending, options.cloud)
    yield from (*prefetch_pending.format_table(rounds), "")
    yield f"{time.monotonic() - begun:.0f} s\n"
    yield load.last(f"{format_summary(found)} {prefetch_pending.format_summary(rounds)}")


def peering(options: argparse.Namespace) -> dict[str, object]:
    return {"peers": {"enabled": True, "listen": "{node}", "reach": options.reach}}


@contextlib.contextmanager
def start_bench_cluster(options: argparse.Namespace) -> Iterator[PrefetchBench]:
    """A cluster of its own."""
    links = Net(node_mbit=options.node_mbit, store_mbit=options.store_mbit)
    spec = networked(NODES, links)
    with Cluster.up(replace(spec, nvme_mib=IMAGES * options.mib[1], companion="")) as cluster:
        fleet = Fleet(cluster)
        fleet.configure(**peering(options))
        fleet.serve(cluster.nodes)
        for node in cluster.nodes:
            fleet.command("sweep", node=node)  # who is there
        with serve_peers(fleet):
            yield PrefetchBench(fleet, options)


@contextlib.contextmanager
def serve_peers(fleet: Fleet) -> Iterator[None]:
    """The peer service of the prefetch host, which is the login."""
    log = fleet.cluster.state / "log/peer-login.log"
    argv = [CLI, "peer", "--node", LOGIN]
    with log.open("w") as out:
        service = fleet.cluster.popen(argv, user="root", stdout=out, stderr=out)
    wait_until(lambda: "serves at" in log.read_text(), 60, log.read_text)
    yield
    with contextlib.suppress(ProcessLookupError):
        fleet.cluster.signal(service, signal.SIGTERM)
    service.communicate(timeout=60)


def main() -> int:
    parser = busy.BenchOptions("prefetch", __doc__, "30 minutes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=20, help="of each seed")
    parser.add_argument("--runs", type=_read_range, default=(8, 45), help="seconds of a job: 8-45")
    parser.add_argument("--mib", type=_read_range, default=(48, 80), help="of the images: 48-80")
    parser.add_argument("--node-mbit", type=float, default=80)
    parser.add_argument("--store-mbit", type=float, default=480)
    parser.add_argument("--bandwidth", type=int, default=6, help="prefetch.bandwidth, MiB/s")
    parser.add_argument(
        "--reach", choices=("job", "cluster"), default="cluster", help="peers.reach"
    )
    parser.add_argument("--pending", type=int, default=10_000, help="jobs of the one pass")
    parser.add_argument("--cloud", type=int, default=2_000, help="nodes there")
    parser.add_argument("--again", action="store_true", help="`none` twice, without `popular`")
    parser.add_argument("--trace", action="store_true", help="what each job's nodes did")
    return print_in_memory(run_bench(parser.begin()))


def _read_range(text: str) -> tuple[int, int]:
    least, most = map(int, text.split("-"))
    return least, most


if __name__ == "__main__":
    sys.exit(main())
