"""What Prometheus gets to read: every event once, whatever happens to the logs; bounded; whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from commands import NOW, Site
from forestage import events, features
from forestage.cache.evict import CacheSpace
from forestage.cache.layout import Cache
from forestage.clock import Clock
from forestage.commands import status
from forestage.commands.command_context import ExitStatus
from forestage.commands.event_counters import EventTally, Histogram
from forestage.commands.status import NodeStatus
from forestage.events import CopyOutcome, EventRecord, RequestOutcome, append_events, event_log
from forestage.events.reasons import collect_failures, collect_reasons
from forestage.features.contexts import MetricFamily, MetricsPart, SweepFacts
from forestage.features.metrics import export as metrics
from forestage.features.metrics import sweep, textfile
from forestage.features.metrics.export import MetricsExportFacts
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import lock, records
from made_up import around_all

HERE = Path(__file__).parent
PACKAGING = HERE.parents[3] / "packaging"
RULES = PACKAGING / "prometheus/forestage.rules.yml"
TEXTFILE = "var/lib/prometheus/node-exporter/forestage.prom"


def hit(job: int, **changes: object) -> EventRecord:
    outcome = msgspec.structs.replace(RequestOutcome("hit", redirect="mounted", size=1), **changes)
    return EventRecord(time=float(job), hook="prolog", job=job, outcome=outcome)


def count(places: NodePaths) -> EventTally:
    with metrics.hold_metrics_lock(places):
        return metrics.count_new_events(places)


def hits(tally: EventTally) -> int:
    return tally.requests.get("prolog", {}).get("hit", 0)


@pytest.fixture
def places(tmp_path: Path) -> NodePaths:
    return NodePaths(tmp_path)


# --- every event once


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_metrics_count_each_event_once_across_log_rotations(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr(event_log, "ROTATE_BYTES", 800)  # some eight events
    assert hits(count(places)) == 0, "a node without a log"
    for job in range(1, 100):
        append_events(places.events, [hit(job)])
        if job % every == 0:
            assert [hits(count(places)) for _ in range(2)] == [job, job]
    assert places.events.with_name("events.jsonl.1").exists()


def test_metrics_lose_only_events_that_were_rotated_away_twice_before_they_were_read(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_events(places.events, [hit(1)])
    assert hits(count(places)) == 1
    monkeypatch.setattr(event_log, "ROTATE_BYTES", 800)
    for job in range(2, 100):
        append_events(places.events, [hit(job)])
    left = len(list(events.read_events(places.events)))
    assert left < 98
    assert [hits(count(places)) for _ in range(2)] == [1 + left] * 2


def test_log_rotation_during_a_read_of_new_events_skips_no_event(places: NodePaths) -> None:
    older = places.events.with_name("events.jsonl.1")
    append_events(older, [hit(1)])
    append_events(places.events, [hit(2)])
    seen: dict[str, int] = {}
    reader = events.read_new_events(places.events, seen)
    got = [next(reader).job]  # it is at the older log now
    places.events.rename(older)
    append_events(places.events, [hit(3)])
    got += [one.job for one in reader]
    assert got == [1, 3]
    assert [one.job for one in events.read_new_events(places.events, seen)] == [2]
    assert list(events.read_new_events(places.events, seen)) == []


def test_new_event_log_with_the_old_logs_inode_and_length_is_counted(places: NodePaths) -> None:
    append_events(places.events, [hit(job) for job in range(10, 20)])
    assert hits(count(places)) == 10
    size, inode = places.events.stat().st_size, places.events.stat().st_ino
    with places.events.open("r+b") as file:  # truncated and written anew: it is the same inode
        file.truncate(0)
    append_events(places.events, [hit(job) for job in range(20, 30)])
    assert (places.events.stat().st_size, places.events.stat().st_ino) == (size, inode)
    assert hits(count(places)) == 20


def test_metrics_go_on_after_a_log_is_truncated_and_skip_damaged_lines(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_LINE_BYTES", 1000)
    append_events(places.events, [hit(1), hit(2)])
    one = places.events.stat().st_size // 2
    assert hits(count(places)) == 2
    os.truncate(places.events, one)
    assert hits(count(places)) == 2
    with places.events.open("ab") as file:
        file.write(b"x" * 2500 + b'\n{"time":')
    append_events(places.events, [hit(3)])
    assert [hits(count(places)) for _ in range(2)] == [3, 3]


def test_unfinished_event_line_is_counted_after_it_is_completed(places: NodePaths) -> None:
    append_events(places.events, [hit(1), hit(2)])
    whole = places.events.read_bytes()
    places.events.write_bytes(whole[:-5])
    assert hits(count(places)) == 1
    with places.events.open("ab") as file:
        file.write(whole[-5:])
    assert hits(count(places)) == 2


def test_metrics_run_that_cannot_write_its_tally_counts_no_event(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_events(places.events, [hit(1)])
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(records, "write", full)
        with pytest.raises(OSError, match="No space"):
            count(places)
    assert hits(count(places)) == 1


def test_parallel_metrics_runs_count_each_event_of_hooks_once(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some 205 events: rotated once. What a hook writes to a log that was rotated twice since it
    # opened it is lost, and here a thread may stand still for as long.
    monkeypatch.setattr(event_log, "ROTATE_BYTES", 24_000)
    monkeypatch.setattr(metrics, "LOCK_TIMEOUT", 600.0)

    def hooks(number: int) -> None:
        for job in range(100):
            append_events(places.events, [hit(1000 * number + job)])
            if job % 20 == 0:
                count(places)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hooks, range(1, 5)))
    assert hits(count(places)) == 400


def test_parallel_metrics_runs_are_locked_out_until_the_textfile_is_written(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of a run, up to the file that is read, is closed to others."""
    append_events(site.places.events, [hit(1)])
    monkeypatch.setattr(metrics, "LOCK_TIMEOUT", 0.0)
    write, tried = records.write, []
    me = threading.get_ident()

    def beside(path: Path, data: bytes, mode: int = 0o600) -> None:
        if threading.get_ident() == me:
            with ThreadPoolExecutor(1) as pool, pytest.raises(lock.LockTimeout):
                pool.submit(metrics.write_metrics, site.places, Clock(), "1").result()
            tried.append(path.name)
        write(path, data, mode)

    monkeypatch.setattr(records, "write", beside)
    metrics.write_metrics(site.places, Clock(), "1")
    assert tried == ["tally.json", "forestage.prom"]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"tally": 3}', b"\xff" * 100])
def test_damaged_metrics_tally_is_rebuilt_from_the_event_logs(
    places: NodePaths, damage: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    append_events(places.events, [hit(1), hit(2)])
    count(places)
    places.tally.write_bytes(damage)
    assert hits(count(places)) == 2
    assert "metrics start again from zero" in capfd.readouterr().err


# --- what the text says


def samples(text: str | bytes) -> dict[str, float]:
    """Each series as Prometheus names it, and its value."""
    text = text.decode() if isinstance(text, bytes) else text
    return {
        sample.name + "".join(f" {k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metric_labels_hold_no_user_image_job_or_unknown_reason() -> None:
    odd = 'x"y\n{z}'
    tally = EventTally()
    bare = samples(metrics.format_metrics(MetricsExportFacts(EventTally(), "1", off=False)))
    for number in range(50):
        tally.add_event(
            hit(number, image=f"/{odd}", key=odd, request=odd, result="failed", reason=odd)
        )
        tally.add_event(hit(number, result="declined", reason=f"{number}", detail=odd))
    found = samples(metrics.format_metrics(MetricsExportFacts(tally, "1", off=False)))
    assert found.keys() == bare.keys()
    assert found["forestage_errors_total reason=other"] == 50
    assert found["forestage_declined_total reason=other"] == 50


def test_metrics_of_an_empty_tally_export_every_series_as_zero() -> None:
    """increase() of a series that begins with 1 is 0: the first error would be no alert."""
    found = samples(metrics.format_metrics(MetricsExportFacts(EventTally(), "1", off=False)))
    errors = {name for name in found if name.startswith("forestage_errors_total")}
    failures = collect_failures()
    assert errors == {f"forestage_errors_total reason={reason}" for reason in (*failures, "other")}
    declined = {name.partition("=")[2] for name in found if "declined_total reason" in name}
    assert declined == {*collect_reasons(), "other"} - failures
    assert all(value == 0 for name, value in found.items() if "_total" in name)
    assert len(found) < 300


def test_each_failure_reason_raised_in_the_source_has_an_errors_total_series() -> None:
    tally = EventTally()
    tally.add_event(hit(1, result="failed", reason="source-error"))
    found = samples(metrics.format_metrics(MetricsExportFacts(tally, "1", off=False)))
    assert found["forestage_errors_total reason=source-error"] == 1
    assert set(collect_reasons()) >= collect_failures()
    raised: set[str] = set()
    for file in (PACKAGING.parent / "src/forestage").rglob("*.py"):
        raised |= set(re.findall(r'\bFailed\(\s*"([a-z-]+)"', file.read_text()))
    # Two classes give their own reason; no outcome has the one about a step's record.
    assert {*raised, "busy", "redirect"} - {"bad-path"} == collect_failures()


def test_each_outcome_is_exported_in_its_metrics_series() -> None:
    tally = EventTally()
    for job, outcome in enumerate(
        (
            RequestOutcome("hit", redirect="mounted", size=100, wait=0.02),
            RequestOutcome("joined", redirect="mounted", size=30, wait=4.0),
            RequestOutcome("declined", reason="deadline", key="k", wait=15.0),
            RequestOutcome("declined", reason="outside-sources", wait=0.0),
        )
    ):
        tally.add_event(EventRecord(1.0, "prolog", job, outcome))
    copied = CopyOutcome("copied", size=1000, from_peers=400, from_others=150, copying=1e-6)
    tally.add_event(EventRecord(1.0, "stager", 4, msgspec.structs.replace(copied, evicted=("k",))))
    found = samples(metrics.format_metrics(MetricsExportFacts(tally, "1", off=True)))
    expected = {
        "requests_total hook=prolog result=hit": 1,
        "requests_total hook=prolog result=joined": 1,
        "requests_total hook=prolog result=declined": 2,
        "requests_total hook=step result=hit": 0,
        "starts_total result=hit": 1,
        "starts_total result=joined": 1,
        "starts_total result=declined": 1,
        "starts_total result=excluded": 1,
        "declined_total reason=deadline": 1,
        "spared_bytes_total by=hit": 100,
        "spared_bytes_total by=joined": 30,
        "spared_bytes_total by=peers": 250,
        "spared_bytes_total by=others": 150,
        "copied_bytes_total from=source": 600,
        "copied_bytes_total from=peers": 250,
        "copied_bytes_total from=others": 150,
        "copies_total result=copied": 1,
        "evictions_total hook=stager": 1,
        "wait_seconds_bucket hook=prolog le=0.1": 2,
        "wait_seconds_bucket hook=prolog le=10.0": 3,
        "wait_seconds_bucket hook=prolog le=+Inf": 4,
        "wait_seconds_count hook=prolog": 4,
        "wait_seconds_sum hook=prolog": 19.02,
        "copy_rate_bytes_per_second_bucket le=500000000.0": 0,
        "copy_rate_bytes_per_second_bucket le=1000000000.0": 1,
        "switched_off": 1,
        "config_valid": 0,
    }
    assert {name: found[f"forestage_{name}"] for name in expected} == expected


def test_metric_family_of_a_feature_is_written_after_the_family_named_in_after() -> None:
    waits = Histogram.make_empty((1.0, 2.0))
    waits.add_value(1.5)
    families = (
        MetricFamily("flown_bytes", "Flown.", after="copies", kind="counter", value=3.0),
        MetricFamily("landed", "Landed.", after="leases", label="at", values={"night": 1}),
        MetricFamily("flight_seconds", "Flights.", after="wait_seconds", histogram=waits),
    )
    parts = (MetricsPart({"plane": "A380"}, families),)
    text = metrics.format_metrics(MetricsExportFacts(EventTally(), "1", off=False, parts=parts))
    found = samples(text)
    assert found["forestage_flown_bytes_total"] == 3
    assert found["forestage_landed at=night"] == 1
    assert found["forestage_flight_seconds_bucket le=2.0"] == 1
    assert "forestage_info plane=A380 version=1" in found
    names = re.findall(r"(?m)^# TYPE forestage_(\w+)", text.decode())
    assert names[names.index("copies_total") + 1] == "flown_bytes_total"
    assert names[names.index("wait_seconds") + 1] == "flight_seconds"
    assert names[-1] == "landed", "without a status there are no leases"


def test_metrics_tally_stores_the_counts_of_features_and_works_without_features(
    places: NodePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "FEATURES", ())
    append_events(places.events, [hit(1)])
    count(places)
    around_all(monkeypatch, {"metrics.count": lambda places: {"flown": {"bytes": 7}}}, {})
    append_events(places.events, [hit(2)])
    assert hits(count(places)) == 2
    assert msgspec.json.decode(places.tally.read_bytes())["tally"]["flown"] == {"bytes": 7}


# --- the command


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / TEXTFILE).parent.mkdir(parents=True)
    return Site(tmp_path)


def written(site: Site) -> dict[str, float]:
    return samples((site.places.root / TEXTFILE).read_text())


def test_metrics_textfile_is_world_readable_under_any_umask_and_leaves_no_temporary_file(
    site: Site,
) -> None:
    was = os.umask(0o077)
    try:
        assert site.run("metrics").exit_code == ExitStatus.OK
    finally:
        os.umask(was)
    file = site.places.root / TEXTFILE
    assert file.stat().st_mode & 0o777 == 0o644
    assert os.listdir(file.parent) == [file.name]


def test_metrics_export_entries_leases_and_disk_space_of_the_node(site: Site) -> None:
    for name in ("a.sqsh", "b.sqsh"):
        site.publish(site.image(name))
    site.lease(7)
    site.run("metrics")
    found = written(site)
    assert found["forestage_entries"] == 2
    assert found["forestage_leases"] == 1
    assert found["forestage_cache_usable"] == found["forestage_config_valid"] == 1
    assert found["forestage_switched_off"] == 0
    assert 0 < found["forestage_cache_bytes"] < found["forestage_cache_max_bytes"]
    assert found["forestage_disk_free_bytes"] <= found["forestage_disk_bytes"]
    assert "forestage_oldest_lease_timestamp_seconds" in found
    assert [name for name in found if name.startswith("forestage_info ")]


def test_metrics_export_bytes_and_entries_for_images_and_data() -> None:
    counts, free = status.EntryCounts(total=3, data=1), status.DiskSpace("/nvme", 1000, 500)
    room = CacheSpace(500, 70, 900, 50, 720, 450)
    node = NodeStatus("/cache", "", (), (), (), disk=free, room=room, entries=counts, data=30)
    found = samples(
        metrics.format_metrics(MetricsExportFacts(EventTally(), "1", off=False, status=node))
    )
    for kind, number, size in (("data", 1, 30), ("image", 2, 40)):
        assert found[f"forestage_entries_of_kind kind={kind}"] == number
        assert found[f"forestage_kind_bytes kind={kind}"] == size


def test_metrics_read_the_last_sweeps_time_from_its_mark_file(places: NodePaths) -> None:
    assert metrics.read_last_sweep_time(places) == 0.0
    mark = places.hook_call_mark("sweep")
    mark.parent.mkdir(parents=True)
    mark.touch()
    os.utime(mark, (5.0, 5.0))
    assert metrics.read_last_sweep_time(places) == 5.0


def info(site: Site) -> str:
    (found,) = (name for name in written(site) if name.startswith("forestage_info "))
    return found


def test_metrics_info_names_the_redirect_that_auto_selects_on_the_node(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    site.run("metrics")
    assert "redirect=bind" in info(site)
    conf = site.places.root / "etc/slurm/slurm.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text("ClusterName=x\n")
    conf.with_name("plugstack.conf").write_text("optional /usr/lib/slurm/forestage.so\n")
    site.run("metrics")
    assert "redirect=bind" in info(site), "no Slurm has loaded it"
    site.places.run.mkdir(parents=True, exist_ok=True)
    site.places.loaded.touch()
    site.run("metrics")
    assert "redirect=spank" in info(site)
    site.configure("redirect: none\n")
    site.run("metrics")
    assert "redirect=none" in info(site)


def test_metrics_export_a_suspect_disk_even_if_the_cache_is_unusable(site: Site) -> None:
    site.run("metrics")
    assert written(site)["forestage_disk_doubt"] == 0
    assert "forestage_disk_doubt_timestamp_seconds" not in written(site)
    site.start_disk_doubt()
    open_cache(site)
    site.run("metrics")
    assert written(site)["forestage_disk_doubt"] == 1
    assert written(site)["forestage_disk_doubt_timestamp_seconds"] == NOW


def state(site: Site) -> list[str]:
    """The states that are 1."""
    names = {name: value for name, value in written(site).items() if "forestage_state " in name}
    assert len(names) == len(status.STATE_NAMES)
    return [name.partition("state=")[2] for name, value in names.items() if value]


def test_metrics_state_after_a_failed_copy_is_failing_and_the_cache_unusable(
    site: Site,
) -> None:
    site.node.cache.prepare(False)
    site.run("metrics")
    assert (state(site), written(site)["forestage_cache_usable"]) == (["ok"], 1)
    failed = CopyOutcome("failed", reason="io", key="k")
    append_events(
        site.places.events, [EventRecord(time=NOW - 60, hook="stager", job=7, outcome=failed)]
    )
    site.run("metrics")
    assert (state(site), written(site)["forestage_cache_usable"]) == (["failing"], 0)
    site.configure("enabled: maybe\n")
    site.run("metrics")
    assert state(site) == []


def off_by_file(site: Site) -> None:
    site.places.run.mkdir(parents=True, exist_ok=True)
    site.places.disabled.touch()


def open_cache(site: Site) -> None:
    site.node.cache.prepare(False)
    site.node.cache.root.chmod(0o777)


@pytest.mark.parametrize(
    ("trouble", "code", "gauges"),
    [
        (off_by_file, ExitStatus.OK, {"switched_off": 1, "cache_usable": 1}),
        (lambda site: site.configure("enabled: false\n"), ExitStatus.OK, {"switched_off": 1}),
        (
            lambda site: site.configure("nonsense: true\n"),
            ExitStatus.CONFIG,
            {"config_valid": 0, "cache_usable": 0},
        ),
        (open_cache, ExitStatus.OK, {"config_valid": 1, "cache_usable": 0}),
    ],
)
def test_metrics_of_a_switched_off_or_broken_node_keep_counting_events(
    site: Site, trouble: Callable[[Site], None], code: ExitStatus, gauges: dict[str, float]
) -> None:
    site.run("metrics")
    append_events(site.places.events, [hit(1)])
    trouble(site)
    assert site.run("metrics").exit_code == code
    found = written(site)
    assert {name: found[f"forestage_{name}"] for name in gauges} == gauges
    assert found["forestage_requests_total hook=prolog result=hit"] == 1


def test_metrics_are_written_despite_disk_errors_with_cache_usable_0(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish(site.image("a.sqsh"))

    def broken(_: Cache) -> list[object]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Cache, "list_entries", broken)
    assert site.run("metrics").exit_code == ExitStatus.OK
    assert written(site)["forestage_cache_usable"] == 0


def test_metrics_fail_without_the_textfile_directory_unless_textfile_is_null(site: Site) -> None:
    shutil.rmtree((site.places.root / TEXTFILE).parent)
    done = site.run("metrics")
    assert done.exit_code == ExitStatus.FAILED
    assert "node exporter" in done.stderr
    shown = site.run("metrics", "--print")
    assert (shown.exit_code, samples(shown.stdout)["forestage_config_valid"]) == (ExitStatus.OK, 1)
    site.configure("metrics: {textfile: null}\n")
    done = site.run("metrics", "--print")
    assert done.exit_code == ExitStatus.OK
    assert samples(done.stdout)["forestage_config_valid"] == 1


def test_metrics_textfile_may_be_any_path_that_ends_in_prom(site: Site) -> None:
    site.configure("metrics: {textfile: /other/x.prom}\n")
    (site.places.root / "other").mkdir()
    site.run("metrics")
    assert samples((site.places.root / "other/x.prom").read_text())
    site.configure("metrics: {textfile: /other/x.txt}\n")
    assert site.run("metrics").exit_code == ExitStatus.CONFIG


def by_metrics(site: Site) -> None:
    site.run("metrics")


def by_sweep(site: Site) -> None:
    facts = SweepFacts(site.node, SlurmClient("", node="n1"), frozenset(), dry_run=False)
    sweep.afterwards(facts)


BY = pytest.mark.parametrize("by", [by_metrics, by_sweep])


@BY
@pytest.mark.parametrize("path", ["null", "/other/y.prom"])
@pytest.mark.parametrize("before", [f"/{TEXTFILE}", "/other/x.prom"])
def test_previous_metrics_textfile_is_deleted_after_the_key_changes(
    site: Site, by: Callable[[Site], None], path: str, before: str
) -> None:
    """Its values would be exported for ever; in the same folder node exporter refuses both."""
    (site.places.root / "other").mkdir()
    site.configure(f"metrics: {{textfile: {before}}}\n")
    site.run("metrics")
    old = site.places.root / before.lstrip("/")
    assert samples(old.read_text())["forestage_written_timestamp_seconds"] == NOW
    by(site)
    assert old.exists()
    site.configure(f"metrics: {{textfile: {path}}}\n")
    by(site)
    assert not old.exists()
    site.run("metrics")
    left = [file.name for file in (site.places.root / "other").iterdir()]
    assert left == ([] if path == "null" else ["y.prom"])


@BY
def test_unrecorded_metrics_textfile_is_deleted_only_if_forestage_wrote_the_file(
    site: Site, by: Callable[[Site], None]
) -> None:
    """That release kept no record of it."""
    old = site.places.root / TEXTFILE
    site.run("metrics")
    assert not textfile.locate_record(site.places).exists()
    site.configure("metrics: {textfile: null}\n")
    by(site)
    assert not old.exists()
    textfile.locate_record(site.places).unlink()
    old.write_text("# HELP node_temperature of an admin's\n")
    by(site)
    assert old.exists()


def test_metrics_report_a_broken_configuration_in_the_last_known_textfile(site: Site) -> None:
    (site.places.root / "other").mkdir()
    own = site.places.root / "other/x.prom"
    site.configure("metrics: {textfile: /other/x.prom}\n")
    site.run("metrics")
    site.configure("enabled: maybe\n")
    assert site.run("metrics").exit_code == ExitStatus.CONFIG
    assert samples(own.read_text())["forestage_config_valid"] == 0
    assert not (site.places.root / TEXTFILE).exists()


def test_metrics_exit_0_if_the_textfiles_record_cannot_be_written(site: Site) -> None:
    (site.places.root / "other").mkdir()
    textfile.locate_record(site.places).parent.parent.mkdir(parents=True, exist_ok=True)
    textfile.locate_record(site.places).parent.touch()  # where the directory would be
    site.configure("metrics: {textfile: /other/x.prom}\n")
    assert site.run("metrics").exit_code == ExitStatus.OK
    assert (site.places.root / "other/x.prom").exists()


def test_metrics_run_by_a_user_exits_with_permission(site: Site) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    site.run("metrics")
    site.places.tally.parent.chmod(0o700)
    os.seteuid(65534)
    try:
        assert site.run("metrics").exit_code == ExitStatus.PERMISSION
    finally:
        os.seteuid(0)


# --- with Prometheus' own tools; tests/slurm has the servers


def test_promtool_accepts_the_metrics_text(site: Site, promtool: str) -> None:
    site.publish(site.image("a.sqsh"))
    text = site.run("metrics", "--print").stdout
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("file", [RULES, PACKAGING / "grafana/forestage.json"], ids=str)
def test_alert_rules_and_dashboard_name_only_exported_metrics(site: Site, file: Path) -> None:
    site.publish(site.image("a.sqsh"))
    site.lease(7)
    site.run("metrics")
    there = {name.split(" ")[0] for name in written(site)}
    named = set(re.findall(r"\bforestage_\w+", file.read_text()))
    assert named
    assert named - there == set()
