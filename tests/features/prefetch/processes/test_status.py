"""What `forestage status` says of pending jobs' images."""

from __future__ import annotations

from commands import NOW, Site
from forestage.cache.layout import DiskUsage
from forestage.cache.lease import EntryUse
from forestage.commands import status
from forestage.features.prefetch import expected_list, prefetch_record
from forestage.features.prefetch.expected_list import ExpectedImageList
from forestage.features.prefetch.prefetch_record import ImageInspection, PrefetchRecord
from forestage.features.prefetch.prefetch_state import PrefetchState, format_rows

G = 1 << 30


def test_prefetch_status_rows_list_expected_images_and_unused_entries() -> None:
    unused = DiskUsage(2, 46 * G)
    found = PrefetchState(NOW - 40, 3, 71 * G, 2, 1, unused, idle="a job runs on this node")
    assert format_rows(found, NOW) == [
        ("expected", "3 images of pending jobs (71 GiB), 2 here, 1 refused"),
        ("list", "40s old"),
        ("not copied", "a job runs on this node"),
        ("ahead", "46 GiB in 2 entries that no job has used"),
    ]


def prefetched(site: Site) -> PrefetchState | None:
    found = status.read_node_status(site.node).find_field("prefetched")
    assert found is None or isinstance(found, PrefetchState)
    return found


def test_status_and_metrics_count_expected_images_and_unused_prefetched_entries(site: Site) -> None:
    assert prefetched(site) is None
    names = ("new", "used", "held")
    new, used, held = (site.publish(site.image(name), expected=NOW - 99) for name in names)
    site.node.cache.record_use(used, NOW - 5)
    site.lease(7, EntryUse(held))
    looks = tuple(
        ImageInspection(f"/{key}", 7, NOW, NOW - 99, key, 5 * G) for key in (new, used, "absent")
    )
    refused = ImageInspection("/refused", 7, NOW, NOW, why="missing", tries=1)
    prefetch_record.write_record(site.places, PrefetchRecord((*looks, refused)))
    found = prefetched(site)
    assert found is not None
    assert (found.images, found.bytes, found.here, found.refused) == (3, 15 * G, 2, 1)
    assert (found.made, found.unused.number) == (0.0, 1)
    expected_list.write_list(site.places, ExpectedImageList(1, NOW - 5, NOW + 900))
    found = prefetched(site)
    assert found is not None
    assert found.made == NOW - 5
    assert (
        f"ahead_waiting_bytes {float(found.unused.bytes)}" in site.run("metrics", "--print").output
    )
