"""The prefetch host's part of `forestage prefetch`: what the queue names, as one list.

One question to squeue, and one to sinfo, however many jobs wait. Where Slurm does not answer, the
list that is there stays, until it expires.
"""

import secrets
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from forestage.clock import Clock
from forestage.config import Config, ServiceAddress, parse_address
from forestage.features.prefetch import expected_list, policy, queue_lines, slurm_queries
from forestage.features.prefetch.expected_list import ExpectedImageList
from forestage.features.prefetch.policy import ExpectedStarts
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient
from forestage.system.terminal import OutputBlock, TextLine, TextTable, format_count
from forestage.units import format_duration

MAX_ROWS_OF_USER = expected_list.MAX_ROWS // 4  # rows of a list
MIN_STARTS = 0.01  # expected starts of a row that is worth telling


class PrefetchHostPass(msgspec.Struct, frozen=True):
    """What one pass found: jobs that count, `others` by reason; `told`: the list was written.

    `tasks` as in features/prefetch/queue_lines.
    """

    jobs: int
    others: tuple[tuple[str, int], ...]
    list: ExpectedImageList
    told: bool
    took: float
    tasks: int | None = None


def find_host(config: Config) -> ServiceAddress | None:
    """Return where `prefetch.host` is found: as it is written, not as a node is. Pure."""
    host = config.prefetch.host
    return None if host is None else parse_address(host, config.peers.port)


def is_prefetch_host(host: str, slurm: SlurmClient) -> bool:
    """Whether this host is the one that `prefetch.host` names."""
    return host in (slurm.node, socket.gethostname())


def run_host_pass(
    places: NodePaths, slurm: SlurmClient, clock: Clock, dry_run: bool
) -> PrefetchHostPass:
    """Makes the list, and writes it unless it is a dry run. Raises SlurmError, Failed, OSError."""
    start = clock.monotonic()
    nonce = secrets.token_hex(16)
    partitions = slurm_queries.query_partitions(slurm)
    listing = slurm_queries.query_pending_jobs(slurm, nonce)
    found = queue_lines.parse_queue(listing, nonce, clock.wall())
    now = clock.wall()
    sizes = {name: number for name, (number, _) in partitions.items()}
    rows = limit_rows(policy.compute_expected_starts(found.pending, sizes))
    listed = ExpectedImageList(
        sequence=expected_list.next_sequence(expected_list.find_list(places), now),
        made=now,
        expires=now + expected_list.LIST_LASTS,
        partitions=select_partitions(
            rows, {name: nodes for name, (_, nodes) in partitions.items()}
        ),
        rows=rows,
    )
    if not dry_run:
        expected_list.write_list(places, listed)
    took = round(clock.monotonic() - start, 3)
    return PrefetchHostPass(
        len(found.pending), found.others, listed, not dry_run, took, found.tasks
    )


def limit_rows(rows: Iterable[ExpectedStarts]) -> tuple[ExpectedStarts, ...]:
    """Pure: the rows that are told, most expected first; no user fills the list."""
    own: Counter[int] = Counter()
    found: list[ExpectedStarts] = []
    for row in rows:
        if (
            len(found) < expected_list.MAX_ROWS
            and row.starts >= MIN_STARTS
            and own[row.user] < MAX_ROWS_OF_USER
        ):
            own[row.user] += 1
            found.append(row)
    return tuple(found)


def select_partitions(rows: Iterable[ExpectedStarts], nodes: Mapping[str, str]) -> dict[str, str]:
    """Pure: the partitions that rows are of, with their nodes."""
    return {name: nodes[name] for name in dict.fromkeys(row.partition for row in rows)}


def format_output(done: PrefetchHostPass) -> Iterator[OutputBlock]:
    """Pure: what `prefetch` prints on its host."""
    told = "told" if done.told else "would be told"
    jobs = f"{format_count(done.jobs, 'pending job')} with an image"
    yield TextLine(
        f"{format_count(len(done.list.rows), 'row')} {told}: {jobs},"
        f" in {format_duration(done.took)}",
        heading=True,
    )
    if done.list.rows:
        columns = ("partition", "starts", "user", "image")
        rows = [(r.partition, f"{r.starts:.2f}", str(r.user), r.image) for r in done.list.rows]
        yield TextTable(columns, rows)
    if done.others:
        reasons = ", ".join(f"{number} {reason}" for reason, number in done.others)
        yield TextLine(f"Jobs that do not count: {reasons}")
