"""Findings about images of pending jobs: the host that reads the queue, and a node that asks it.

On the host squeue, sinfo and sdiag are run once each; a node asks the host for its list. Only where
`prefetch.host` is set.
"""

from collections.abc import Iterator

from forestage.check.finding import CheckFinding
from forestage.clock import Clock
from forestage.config import Config, ServiceAddress
from forestage.errors import Failed, ForestageError, SlurmError
from forestage.features.contexts import CheckFacts
from forestage.features.peers import activation, auth
from forestage.features.prefetch import (
    expected_list,
    prefetch_host,
    prefetch_node,
    prefetch_record,
    slurm_queries,
)
from forestage.features.prefetch.expected_list import ExpectedImageList
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient
from forestage.system.terminal import format_age

LATE = 300.0  # seconds without a new list, of a timer that runs each minute
SKEW = 5.0  # seconds between two clocks, above which something is wrong with one
MAX_CHANGING_JOBS = 20  # jobs that come and go while squeue and sdiag answer
_HOST = "No node knows what is expected: nothing is copied before a job starts"


def findings(facts: CheckFacts) -> Iterator[CheckFinding | str]:
    """What is found, and before what may take its time, what that is."""
    config, target = facts.settings.node_config, facts.target
    places, slurm, clock = target.places, target.slurm, target.clock
    host = prefetch_host.find_host(config)
    if host is None:
        return
    if prefetch_host.is_prefetch_host(host.host, slurm):
        yield from _find_host_problems(places, config, slurm, clock)
    else:
        yield from _find_node_problems(places, config, host, clock)


def _find_host_problems(
    places: NodePaths, config: Config, slurm: SlurmClient, clock: Clock
) -> Iterator[CheckFinding | str]:
    if not activation.is_on(config, places, clock.monotonic()):
        yield CheckFinding(
            "prefetch-peers",
            "warning",
            "this is prefetch.host, and peers are off here",
            f"{_HOST}, as the peer service does not answer here",
            "systemctl enable --now forestage-peer, and no peers.enabled: false",
        )
    yield "Slurm's queue"
    try:
        made = prefetch_host.run_host_pass(places, slurm, clock, dry_run=True)
        yield "Slurm's count of jobs"
        count = slurm_queries.count_pending_jobs(slurm)
    except (SlurmError, Failed, OSError) as error:
        yield CheckFinding(
            "prefetch-queue",
            "warning",
            f"Slurm's queue cannot be read: {error}",
            _HOST,
            "squeue, sinfo and sdiag must answer root here; their directory belongs into PATH",
        )
        return
    if made.tasks is not None and 2 * made.tasks + MAX_CHANGING_JOBS < count:
        yield CheckFinding(
            "prefetch-hidden",
            "warning",
            f"squeue shows {made.tasks} pending jobs, and slurmctld has {count} (sdiag)",
            "Images of the others are not expected anywhere",
            "run it as root on a host where root sees all jobs (PrivateData, AuthAltTypes)",
        )
    yield from _find_old_list(
        expected_list.find_list(places), clock.wall(), "journalctl -u forestage"
    )


def _find_node_problems(
    places: NodePaths, config: Config, at: ServiceAddress, clock: Clock
) -> Iterator[CheckFinding | str]:
    host = at.host
    yield f"prefetch.host {host}"
    try:
        told = expected_list.fetch_list(at, auth.make_authenticator(config.peers.key_file, places))
    except (ForestageError, OSError) as error:
        yield CheckFinding(
            "prefetch-host",
            "warning",
            f"prefetch.host: {error}",
            "This node copies nothing before a job starts",
            f"forestage check on {host}; the peer service there listens at port {at.port}",
        )
        return
    now = clock.wall()
    if told.made > now + SKEW:
        yield CheckFinding(
            "prefetch-clock",
            "warning",
            f"the clock of {host} is {format_age(told.made - now)} ahead of this node's",
            f"A list counts only up to {expected_list.MAX_CLOCK_AHEAD:.0f} s ahead;"
            " munge has limits too",
            "set both clocks (chrony)",
        )
    yield from _find_old_list(told, now, f"journalctl -u forestage on {host}")
    known = prefetch_record.read_record(places)
    if known.idle == prefetch_node.BUSY and not known.looks:
        yield CheckFinding(
            "prefetch-bandwidth",
            "warning",
            "no image was looked at so far: jobs run here, and prefetch.bandwidth is null",
            "A node that is never empty stays cold",
            "prefetch.bandwidth: what copies may read each second while jobs run",
        )


def _find_old_list(
    listed: ExpectedImageList | None, now: float, where: str
) -> Iterator[CheckFinding]:
    if listed is not None and now - listed.made <= LATE:
        return
    what = f"the list is {format_age(now - listed.made)} old" if listed else "there is no list yet"
    yield CheckFinding(
        "prefetch-old",
        "warning",
        f"{what}, or the clocks differ" if listed else what,
        f"A list counts for {expected_list.LIST_LASTS / 60:.0f} minutes; then nothing is copied",
        where,
    )
