"""What the metrics say of images of pending jobs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from forestage.events.event_log import ByteOrigin
from forestage.features.contexts import MetricFamily, MetricsPart
from forestage.features.prefetch.prefetch_state import PrefetchState

if TYPE_CHECKING:
    from forestage.features.contexts import MetricsFacts


def read_metrics(facts: "MetricsFacts") -> MetricsPart:
    """Return what is expected, and the bytes that were copied for pending jobs. Pure."""
    return MetricsPart(families=tuple(_list_families(facts)))


def _list_families(facts: "MetricsFacts") -> Iterator[MetricFamily]:
    due = facts.status.find_field("prefetched") if facts.status else None
    if isinstance(due, PrefetchState):
        for name, text, value in (
            (
                "expected_images",
                "Images of pending jobs that this node has looked at.",
                due.images,
            ),
            ("expected_bytes", "The size of these.", due.bytes),
            (
                "expected_list_timestamp_seconds",
                "When the prefetch host made the list that counts; 0 without one.",
                due.made,
            ),
            (
                "ahead_waiting_bytes",
                "Entries copied for pending jobs that no job has used so far.",
                due.unused.bytes,
            ),
        ):
            yield MetricFamily(name, text, after="redirects", value=value)
    ahead = facts.tally.ahead
    for name, text, numbers in (
        ("copied", "Bytes copied for pending jobs.", ahead.copied),
        ("used", "Those of them that a job had.", ahead.used),
        ("unused", "Those of them that were evicted before a job had them.", ahead.unused),
    ):
        by = {origin: numbers.get(origin, 0) for origin in get_args(ByteOrigin)}
        yield MetricFamily(
            f"ahead_{name}_bytes", text, after="evictions", kind="counter", label="from", values=by
        )
