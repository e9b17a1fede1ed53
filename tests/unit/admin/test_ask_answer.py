"""What users without root get to know: all of their own jobs, and nothing of anybody else's."""

from typing import Any

import msgspec
import pytest

from commands import Site
from forestage.admin import ask_answer, explain
from forestage.admin.ask_answer import MAX_ANSWER, Public, Space
from forestage.admin.job_images import Seen
from forestage.cache.lease import Lease, Use
from forestage.errors import ForestageError, NotFound
from forestage.events import Copied, Event, Handled, Outcome, Released, append
from forestage.system import lock
from forestage.system.as_user import User
from forestage.system.terminal import Facts

ALICE, BOB = 1000, 2000
NAMES = {ALICE: "alice", BOB: "bob"}
KEYS = {ALICE: "a" * 32, BOB: "b" * 32}
NOW = 1_800_000_000.0


def event(uid: int, job: int, outcome: Outcome, **changes: Any) -> Event:
    facts = {"time": NOW, "hook": "prolog", "user": NAMES[uid], "node": "n1", **changes}
    return Event(job=job, outcome=outcome, uid=uid, **facts)


def hit(uid: int, **changes: Any) -> Handled:
    path = f"/lustre/{NAMES[uid]}/img.sqsh"
    facts = {"request": path, "image": path, "key": KEYS[uid], "redirect": "mounted"}
    return Handled(**{"result": "hit", **facts, **changes})


def told(site: Site, job: int, uid: int) -> str:
    return ask_answer.about_job(site.places, job, uid).decode()


def test_own_job_is_told_and_another_users_is_as_unknown_as_none(site: Site) -> None:
    append(site.places.events, [event(ALICE, 7, hit(ALICE)), event(BOB, 8, hit(BOB))])
    found = ask_answer.decoded(told(site, 7, ALICE).encode()).history
    assert found is not None
    assert [run.user for run in found.runs] == ["alice"]
    with pytest.raises(NotFound) as of_bob:
        ask_answer.decoded(told(site, 8, ALICE).encode())
    with pytest.raises(NotFound) as of_nobody:
        ask_answer.decoded(told(site, 9, ALICE).encode())
    assert str(of_bob.value).replace("8", "9") == str(of_nobody.value)


def test_root_is_told_of_every_job(site: Site) -> None:
    append(site.places.events, [event(BOB, 8, hit(BOB))])
    assert "/lustre/bob" in told(site, 8, 0)


def test_job_id_that_came_again_shows_nobody_the_other_users_job(site: Site) -> None:
    append(site.places.events, [event(BOB, 7, hit(BOB)), event(ALICE, 7, hit(ALICE))])
    assert "bob" not in told(site, 7, ALICE)
    assert "alice" not in told(site, 7, BOB)


def test_nothing_of_others_is_in_what_was_evicted_waited_for_or_leased(site: Site) -> None:
    copy = Copied("copied", image="/lustre/alice/img.sqsh", key=KEYS[ALICE], size=1, wait=9.0)
    late = hit(ALICE, result="declined", reason="deadline")
    append(
        site.places.events,
        [
            event(BOB, 8, hit(BOB)),
            event(ALICE, 7, late),
            event(ALICE, 7, Released("released", evicted=(KEYS[BOB],)), hook="epilog"),
            event(BOB, 8, copy, hook="stager", time=NOW + 1, total=9.0),
        ],
    )
    lease = Lease(7, User("bob", BOB, BOB), NOW, "/nvme", (Use(KEYS[BOB], "/lustre/bob/x"),))
    site.node.leases.write(lease)
    assert "bob" not in told(site, 7, ALICE)
    assert '"job":8' not in told(site, 7, ALICE)
    assert "bob" in told(site, 7, 0), "else this shows nothing"


def test_own_lease_is_told(site: Site) -> None:
    site.lease(7, Use(KEYS[ALICE], "/lustre/alice/img.sqsh"))
    found = ask_answer.own(site.places, 7, ALICE)
    assert found.lease
    assert found.lease.images[0].path == "/lustre/alice/img.sqsh"


def test_damaged_lease_is_nobodys(site: Site) -> None:
    site.places.leases.mkdir(parents=True)
    (site.places.leases / "7.json").write_text("{")
    with pytest.raises(NotFound):
        ask_answer.own(site.places, 7, ALICE)


def test_answer_about_a_job_of_many_steps_is_bounded_and_has_the_last(site: Site) -> None:
    steps = [
        event(ALICE, 7, hit(ALICE, detail="x" * 2000), hook="step", step=number, time=NOW + number)
        for number in range(1000)
    ]
    text = ask_answer.bounded(explain.history(7, steps, None))
    found = ask_answer.decoded(text).history
    assert found is not None
    assert len(text) <= MAX_ANSWER
    assert found.runs[-1].step == 999
    (problem,) = found.problems
    assert problem.startswith(f"{1000 - len(found.runs)} runs before these are left out")


def test_answer_about_a_job_that_holds_many_images_is_bounded_and_has_its_runs() -> None:
    uses = tuple(Use(f"{number:032x}", f"/lustre/{'x' * 400}") for number in range(1000))
    lease = Lease(7, User("alice", ALICE, ALICE), NOW, "/cache", uses)
    text = ask_answer.bounded(explain.history(7, [event(ALICE, 7, hit(ALICE))], lease))
    found = ask_answer.decoded(text).history
    assert len(text) <= MAX_ANSWER
    assert found is not None
    assert found.lease is not None
    assert len(found.runs) == 1
    assert found.problems == ("1000 images that it holds are left out; root sees them on the node",)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b'{"history":7}', b"[" * 100000])
def test_answer_that_is_none_is_an_error(text: bytes) -> None:
    with pytest.raises(ForestageError):
        ask_answer.decoded(text)


def test_problem_of_a_node_commands_no_terminal() -> None:
    with pytest.raises(NotFound) as found:
        ask_answer.decoded(ask_answer.encoded(ask_answer.Answer(problem="\x1b]0;x\x07")))
    assert str(found.value).isprintable()


def test_images_of_a_job_tell_its_user_when_another_users_copy_has_ended(site: Site) -> None:
    cold = hit(ALICE, result="started")
    copy = Copied("copied", image=cold.image, key=cold.key, size=1, wait=9.0, detail="for bob")
    append(site.places.events, [event(ALICE, 7, cold)])

    def seen(uid: int = ALICE) -> Seen:
        found = ask_answer.decoded(ask_answer.about_images(site.node, 7, uid)).images
        assert found is not None
        return found

    key_lock = site.node.cache.key_lock(cold.key)
    key_lock.parent.mkdir(parents=True)
    with lock.held(key_lock, 1.0):
        assert (seen().waits, seen().live) == (True, True)
    assert (seen().waits, seen().live) == (True, False)
    append(site.places.events, [event(BOB, 8, copy, hook="stager", time=NOW + 1, total=9.0)])
    (found,) = seen().images
    assert (found.result, found.image, found.wait) == ("copied", cold.request, 9.0)
    assert "bob" not in ask_answer.about_images(site.node, 7, ALICE).decode()
    assert seen(BOB) == Seen(()), "it is nobody else's job"


def test_everyone_may_know_how_full_and_how_useful_the_cache_is(site: Site) -> None:
    site.publish(site.image("secret.sqsh"))
    cold = hit(BOB, result="copied")
    append(site.places.events, [event(BOB, 8, cold), event(ALICE, 7, hit(ALICE))])
    found = ask_answer.public(site.node)
    assert (found.enabled, found.hit_ratio, found.starts) == (True, 0.5, 2)
    assert found.cache
    assert found.cache.used > 0
    text = msgspec.json.encode(found).decode()
    assert not [word for word in ("secret", "alice", "bob", "/") if word in text]


def test_public_status_says_that_staging_is_off_and_not_why(site: Site) -> None:
    site.places.disabled.parent.mkdir(parents=True)
    site.places.disabled.write_text("INC-42: bob's image\n")
    found = ask_answer.public(site.node)
    assert (found.enabled, found.cache, found.hit_ratio) == (False, None, None)
    assert "INC" not in msgspec.json.encode(found).decode()


@pytest.mark.parametrize(
    ("found", "facts"),
    [
        (
            Public(True, Space(3 << 30, 4 << 30), 0.875, 8),
            ("on", "3 GiB of 4 GiB (75% full)", "88% of 8 starts"),
        ),
        (Public(False), ("switched off", "not in use", "no start is recorded")),
        (Public(True, Space(1, 0), 1.0, 1), ("on", "1 B of 0 B (100% full)", "100% of 1 start")),
    ],
)
def test_public_status_is_three_lines(found: Public, facts: tuple[str, ...]) -> None:
    (piece,) = ask_answer.pieces(found)
    assert isinstance(piece, Facts)
    assert tuple(value for _, value in piece.facts) == facts
