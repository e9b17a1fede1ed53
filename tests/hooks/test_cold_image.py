"""Jobs that begin while their image is copied: from the shared path, or through the copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from forestage import trace
from forestage.bind import redirect
from forestage.clock import Clock
from forestage.events import EventRecord, RequestOutcome
from forestage.hooks import hook_deadlines
from forestage.hooks.boundary import IMAGE_OPTION, HookRun
from forestage.views.through import keeper
from node import ALICE, BOB, Arrange, Node, children_left, content, end_keepers, held_at, until
from through import Through


@pytest.fixture
def shared(node: Node) -> Node:
    node.configure(cold="shared")
    return node


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """No copy is published before the test calls it; nobody waits for a small image."""
    monkeypatch.setattr(hook_deadlines, "SHORT_WAIT", 0.0)
    with held_at("checked", tmp_path) as opened:
        yield opened


def result(outcome: object) -> tuple[str, str]:
    assert isinstance(outcome, RequestOutcome)
    return outcome.result, outcome.redirect


def ended(node: Node, path: Path) -> None:
    """The stager has done all that it will do."""
    key = node.identity(path).key
    until(lambda: node.cache.image_path(key).exists() and node.is_idle(key), "the copy's end")


def test_job_with_a_cold_image_begins_at_once_and_is_redirected_after_the_copy(
    shared: Node, gate: Callable[[], None]
) -> None:
    path = shared.put("alice/image.sqsh")
    paths = [path, shared.put("alice/other.sqsh", content(2))]
    comment = f"stage={paths[1]}"
    ran = shared.prolog(7, path, comment=comment)
    assert [result(one) for one in ran.outcomes] == [("started", "later")] * 2
    assert result(shared.prolog(8, path, user=BOB).outcome) == ("started", "later")
    assert (shared.binds(), shared.entries()) == ({}, set())
    assert shared.shows_source(path)
    gate()
    until(lambda: set(shared.binds()) == set(map(str, paths)), "both redirects")
    assert shared.shows_entry(path, shared.identity(path).key)
    shared.epilog(7)
    assert list(shared.binds()) == [str(path)]
    shared.epilog(8)
    assert (shared.binds(), shared.leases.list_leases()) == ({}, [])


def test_prolog_waits_shortly_for_a_small_image(
    shared: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_deadlines, "SHORT_WAIT", 60.0)
    assert result(shared.prolog(7, shared.put("alice/image.sqsh")).outcome) == ("copied", "mounted")


def test_prolog_waits_for_the_copy_with_stage_wait(
    shared: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_deadlines, "SHORT_WAIT", 0.0)
    ran = shared.prolog(7, shared.put("alice/image.sqsh"), comment="stage-wait=5m")
    assert result(ran.outcome) == ("copied", "mounted")


def test_job_that_ended_during_its_copy_gets_no_redirect_and_no_lease(
    shared: Node, gate: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Epilog comes between the stager's look at the leases and its mount."""
    path = shared.put("alice/image.sqsh")
    look = redirect._open_target

    def late(*given: object) -> object:
        found = look(*given)  # type: ignore[arg-type]
        shared.leases.drop_lease(7)
        return found

    monkeypatch.setattr(redirect, "_open_target", late)
    assert shared.prolog(7, path).outcome.result == "started"
    gate()
    until(lambda: not shared.leases.list_leases(), "the stager's look")
    ended(shared, path)
    until(lambda: not children_left(), "the stager's end")
    assert (shared.binds(), shared.leases.list_leases()) == ({}, [])


def test_stager_mounts_no_redirect_over_a_replaced_file(
    shared: Node, gate: Callable[[], None], before: Arrange
) -> None:
    path = shared.put("alice/image.sqsh")
    new = shared.server / "alice/new"

    def replace() -> None:
        if new.exists():
            new.rename(shared.server / "alice/image.sqsh")

    before(redirect, "mount_for_waiting_jobs", replace)
    assert shared.prolog(7, path).outcome.result == "started"
    new.write_bytes(content(2))
    key = shared.held(7).uses[0].key
    gate()
    until(lambda: not new.exists(), "the copy to be published")
    until(lambda: shared.is_idle(key) and not children_left(), "the stager's end")
    assert shared.binds() == {}
    assert path.read_bytes() == content(2)


def test_stager_mounts_no_redirect_if_a_step_saves_to_the_path_meanwhile(
    shared: Node, gate: Callable[[], None]
) -> None:
    path = shared.put("alice/image.sqsh")
    assert shared.prolog(7, path).outcome.result == "started"
    assert step(shared, 7, path, saves=str(path)) == ("started", "none")
    gate()
    ended(shared, path)
    until(lambda: not children_left(), "the stager's end")
    assert shared.shows_source(path)


def test_stager_mounts_no_redirect_on_a_path_that_another_job_saves_to(
    shared: Node, gate: Callable[[], None]
) -> None:
    path = shared.put("alice/image.sqsh")
    assert shared.prolog(7, path).outcome.result == "started"
    shared.prolog(8, saves=str(path))
    gate()
    ended(shared, path)
    until(lambda: not children_left(), "the stager's end")
    assert shared.shows_source(path)


def test_stager_mounts_no_redirect_on_a_node_switched_off_meanwhile(
    shared: Node, gate: Callable[[], None]
) -> None:
    path = shared.put("alice/image.sqsh")
    assert shared.prolog(7, path).outcome.result == "started"
    shared.switch_off()
    gate()
    ended(shared, path)
    until(lambda: not children_left(), "the stager's end")
    assert shared.binds() == {}


def step(node: Node, job: int, path: Path, saves: str | None = None) -> tuple[str, str]:
    given = node.environ(job, path, ALICE, saves=saves) | {"SLURM_STEP_ID": "0"}
    assert given[IMAGE_OPTION] == str(path)
    HookRun("step", given, 0.0).run(node.places, Clock())
    return result(node.outcomes("step", job)[-1])


@pytest.fixture
def through(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(keeper, "START", 600.0)  # a machine may stand still
    node.configure(redirect="spank", cold=None, user_messages="all")
    return node


def keepers(node: Node) -> set[int]:
    return {state.pid for _, state in keeper.list_keepers(node.places.through)}


def socket_of(node: Node, path: Path) -> Path:
    return node.places.through / node.identity(path).key / "sock"


def answer(node: Node, path: Path) -> list[str]:
    """What makes a step's tasks read through."""
    seen = node.identity(path)
    facts = (seen.inode, seen.size, seen.mtime_ns, seen.ctime_ns)
    return ["through", str(socket_of(node, path)), str(path), *map(str, facts), "1"]


def noted(node: Node, job: int) -> list[list[str]]:
    """What the companion finds of images in the job's record, without the user's name for them."""
    file = node.leases.step_record_file(job)
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.split("\t")[2:] for line in lines if line.startswith("image\t")]


@pytest.mark.parametrize("prolog", [True, False])
def test_step_with_the_companion_reads_through_until_the_copy_is_complete(
    through: Node, gate: Callable[[], None], prolog: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    path = through.put("alice/image.sqsh")
    if prolog:
        assert result(through.prolog(7, path).outcome) == ("started", "spank")
        until(lambda: keepers(through), "the keeper")
    served = keepers(through)
    assert step(through, 7, path) == ("through", "spank")
    assert capfd.readouterr().out.split("\n")[-2].split("\t") == answer(through, path)
    assert keepers(through) >= served
    assert len(keepers(through)) == 1
    key = through.identity(path).key
    assert (through.binds(), [use.key for use in through.held(7).uses]) == ({}, [key])
    gate()
    ended(through, path)
    until(lambda: not socket_of(through, path).exists(), "the keeper to let go")
    assert step(through, 7, path) == ("hit", "spank")
    assert capfd.readouterr().out.split("\n")[-2].startswith("use\t")
    assert len(through.outcomes("stager")) == 1


def test_prolog_records_the_keepers_socket_for_the_first_step(
    through: Node, gate: Callable[[], None]
) -> None:
    through.configure(redirect="spank", cold=None)  # no line for its user
    path = through.put("alice/image.sqsh")
    through.prolog(7, path)
    ((uid, text, *words),) = noted(through, 7)
    assert (uid, words) == (str(ALICE.uid), answer(through, path))
    # As the companion completes it.
    event = msgspec.json.decode('{"time":5,"step":0,"total":0.1,' + text, type=EventRecord)
    assert (event.hook, event.job, *result(event.outcome)) == ("step", 7, "through", "spank")
    shown = Through(through, path)  # finds that keeper
    assert {shown.pid} == keepers(through)
    assert shown.lay().read_bytes() == content()
    shown.close()
    gate()
    ended(through, path)
    through.epilog(7)
    assert noted(through, 7) == []


def test_step_after_the_end_of_the_copy_is_recorded_with_the_entry(
    through: Node, gate: Callable[[], None]
) -> None:
    path = through.put("alice/image.sqsh")
    through.prolog(7, path)
    gate()
    ended(through, path)
    assert step(through, 7, path) == ("hit", "spank")
    ((_, _, *words),) = noted(through, 7)
    assert words[:2] == ["use", str(through.cache.image_path(through.identity(path).key))]


def test_step_starts_a_new_keeper_if_the_first_was_killed(
    through: Node, gate: Callable[[], None]
) -> None:
    path = through.put("alice/image.sqsh")
    through.prolog(7, path)
    until(lambda: keeper.is_listening(socket_of(through, path)), "the keeper")
    end_keepers()
    assert step(through, 7, path) == ("through", "spank")
    assert len(keepers(through)) == 1


def test_job_without_a_free_keeper_starts_from_the_shared_path(
    through: Node, gate: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "MOST_OF_USER", 0)
    path = through.put("alice/image.sqsh")
    ran = through.prolog(7, path)
    assert (*ran.ended, *result(ran.outcome)) == (0, "started", "no-through", "started", "spank")
    assert step(through, 7, path) == ("started", "none")
    assert (noted(through, 7), keepers(through)) == ([], set())


def test_step_uses_the_copy_if_it_is_published_while_the_keeper_starts(
    through: Node, gate: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stager's end removes the keeper's directory before anything lies in it."""
    path = through.put("alice/image.sqsh")
    hold = trace.listener

    def publish(point: str) -> None:
        if point == "keeper place":
            gate()
            ended(through, path)
            until(lambda: not socket_of(through, path).parent.exists(), "the directory to go")
        elif hold:
            hold(point)

    monkeypatch.setattr(trace, "listener", publish)
    assert step(through, 7, path) == ("joined", "spank")
    assert keepers(through) == set()


@pytest.fixture
def slow(through: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """No copy ends before the step looks: its first MiB takes half a second."""
    monkeypatch.setattr(hook_deadlines, "SHORT_WAIT", 0.0)
    through.configure(redirect="spank", cold=None, bandwidth="2M", threads=1)
    return through


@pytest.mark.parametrize(
    ("comment", "found"),
    [
        ("stage-wait=5m", ("joined", "spank")),
        ("stage-wait=0", ("started", "none")),
        ("stage-tell=yes", ("started", "none")),
    ],
)
def test_job_without_a_free_keeper_waits_for_the_copy_only_with_stage_wait(
    slow: Node, monkeypatch: pytest.MonkeyPatch, comment: str, found: tuple[str, str]
) -> None:
    monkeypatch.setattr(keeper, "MOST_OF_USER", 0)
    path = slow.put("alice/image.sqsh", content(size=3 << 20))
    slow.prolog(7, path, comment=comment)
    assert step(slow, 7, path) == found


def test_job_that_can_read_through_does_not_wait_even_with_stage_wait(
    through: Node, gate: Callable[[], None]
) -> None:
    path = through.put("alice/image.sqsh")
    through.prolog(7, path, comment="stage-wait=5m")
    assert step(through, 7, path) == ("through", "spank")


@pytest.fixture
def large(through: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """No image is so small that it is waited for; a machine that stands still is no matter."""
    monkeypatch.setattr(hook_deadlines, "SMALL_IMAGE_BYTES", 0)
    monkeypatch.setattr(hook_deadlines, "SHORT_WAIT", 600.0)
    return through


def crowd(node: Node, *, leased: bool) -> Path:
    """Another job's image takes half of what the cache may take; a path for which that must go."""
    node.configure(redirect="spank", cold=None, max_size="1400K")
    assert node.prolog(1, node.put("alice/1.sqsh", content(1, 1 << 20))).outcome.result == "started"
    ended(node, node.shared / "alice/1.sqsh")
    if not leased:
        node.epilog(1)
    return node.put("alice/2.sqsh", content(2, 1 << 20))


def test_job_without_room_for_its_copy_is_declined_with_no_room_and_has_no_keeper(
    large: Node,
) -> None:
    path = crowd(large, leased=True)
    assert large.prolog(7, path).said == ("declined", "no-room")
    assert step(large, 7, path) == ("declined", "")
    assert large.outcomes("step", 7)[-1].reason == "no-room"
    assert (noted(large, 7), socket_of(large, path).exists()) == ([], False)


def test_job_with_stage_wait_0_starts_without_waiting_for_the_reservation(large: Node) -> None:
    path = crowd(large, leased=True)
    assert large.prolog(7, path, comment="stage-wait=0").outcome.result == "started"


def test_job_reads_through_after_entries_are_evicted_for_its_copy(
    large: Node, tmp_path: Path
) -> None:
    path = crowd(large, leased=False)
    before = large.entries()
    with held_at("reserved", tmp_path):
        assert result(large.prolog(7, path).outcome) == ("started", "spank")
        assert step(large, 7, path) == ("through", "spank")
        assert not before & large.entries()


def test_job_does_not_wait_for_the_reservation_if_nothing_must_be_evicted(
    large: Node, tmp_path: Path
) -> None:
    path = large.put("alice/image.sqsh")
    with held_at("claimed", tmp_path):
        assert result(large.prolog(7, path).outcome) == ("started", "spank")
        assert step(large, 7, path) == ("through", "spank")
