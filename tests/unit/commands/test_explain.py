"""`forestage explain`: every outcome in plain words, no run mixed up with another."""

import errno
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import forestage
from forestage import features
from forestage.cache import source_image
from forestage.cache.lease import EntryUse, Lease
from forestage.commands.explain import format_sentences, make_job_history
from forestage.commands.inventory import LeasedImage, LeaseHolder
from forestage.events import (
    BadEntryOutcome,
    CopyOutcome,
    EventHook,
    EventRecord,
    Outcome,
    OutcomeResult,
    ReleaseOutcome,
    RequestOutcome,
)
from forestage.events.reasons import collect_reasons
from forestage.features.contexts import ExplainFacts, ExplainPart
from forestage.features.doors import REASONS as DOOR
from forestage.features.doors import list_names_with_door, load_door
from forestage.system.as_user import User
from histories import KEY, NOW, event, hit, printed
from made_up import around_all

SOURCE = Path(forestage.__file__).parent


def test_every_reason_in_the_code_has_an_explanation_and_none_is_unused() -> None:
    alice = User("alice", 7, 7)
    of_core = {
        source_image.declined_by_open_error(OSError(n, ""), "/x", alice).reason
        for n in errno.errorcode
    }
    companion = (SOURCE.parent / "spank/constants.h").read_text()
    of_core |= set(re.findall(r'#define (?:NO_)?MOUNT\w* "([a-z-]+)"', companion))
    given_by = {reason: {"the core"} for reason in of_core}
    for file in SOURCE.rglob("*.py"):
        text, folders = file.read_text(), file.relative_to(SOURCE).parts
        found = set(re.findall(r'(?:Declined|Failed|__init__)\(\s*"([a-z-]+)"', text))
        found |= set(re.findall(r'"(registry-[a-z]+)"', text))
        found |= set(re.findall(r'reason(?:, detail)? ?= ?"([a-z-]+)"', text))
        for reason in found - {"registry-silent"} if folders[0] == "check" else found:
            where = folders[1] if folders[0] == "features" else "the core"
            given_by[reason] = given_by.get(reason, set()) | {where}
    found = set(given_by)
    known = set(collect_reasons())
    assert found - known == set()
    assert known - found == set(), "reasons that nothing gives any more"
    for name in list_names_with_door("reasons"):
        own = {reason for reason, givers in given_by.items() if givers == {name}}
        assert set(load_door(name, DOOR).REASONS) == own, f"what {name} alone gives"


def test_explain_of_a_hanging_mount_names_its_path_and_the_remedy() -> None:
    hangs = RequestOutcome("declined", "mount-hangs", image="/shared/a.sqsh")
    text = printed(event(hangs, hook="step", step=0))
    assert "/shared/a.sqsh" in text
    assert "`fuser -v PATH`" in text
    assert "stage=off" in text
    assert "The step kept its original path." in text


@pytest.mark.parametrize("reason", ["no-mount", "mount-hangs", "mount-queue"])
@pytest.mark.parametrize("result", ["hit", "copied", "joined", "through"])
def test_explain_shows_no_hit_for_a_step_if_a_task_could_not_mount_the_copy(
    reason: str, result: OutcomeResult
) -> None:
    image = "/shared/a.sqsh"
    told = RequestOutcome(
        result, request=image, image=image, key=KEY, redirect="spank", baseline=9.0
    )
    failed = RequestOutcome("declined", reason, detail="it is another file by now", image=image)
    both = [event(one, hook="step", step=0) for one in (told, failed)]
    text = printed(*both)
    assert f"{result}:" not in text
    assert "saved" not in text
    assert "some task of the step could not be given it" in text
    assert "it is another file by now" in text
    other = printed(both[0], event(failed, hook="step", step=1))
    assert f"{result}:" in other  # another step of the job's


def test_explain_shows_no_hit_if_a_task_could_not_mount_a_hinted_file() -> None:
    told = RequestOutcome("hit", request="/a.sqsh@/b", image="/a.sqsh", key=KEY, data=True)
    failed = RequestOutcome(
        "declined", "no-mount", detail="nobody serves it", image="/b", data=True
    )
    text = printed(event(told, hook="step", step=0), event(failed, hook="step", step=0))
    assert "hit" not in text


@pytest.mark.parametrize("result", get_args(OutcomeResult))
@pytest.mark.parametrize("hook", get_args(EventHook))
def test_explain_has_a_sentence_for_every_result_of_every_hook(
    result: OutcomeResult, hook: str
) -> None:
    outcome = RequestOutcome(
        result, request="/a", image="/a", key=KEY, reason="io", redirect="none"
    )
    text = " ".join(format_sentences(event(outcome, hook=hook), {}))
    assert result in text or result == "released"


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (hit(), "hit: the cache had it"),
        (hit(redirect="mounted"), "the path showed the local copy"),
        (hit(redirect="kept"), "already, for another job"),
        (hit(redirect="none"), "the job read the original path"),
        (hit(redirect="spank"), "SPANK plugin: each step gets the local copy"),
        (
            hit(result="started", redirect="spank"),
            "started: the job started while the copy was under way.*each step gets the local copy",
        ),
        (hit(result="started", redirect="later"), "original until the copy was complete"),
        (
            hit(result="started", reason="no-through", detail="too many", redirect="none"),
            "the copy while it was made: too many.*read the original path .no copy was here",
        ),
        (hit(result="through"), "read copied parts locally, and the rest from the source"),
        (RequestOutcome("joined", wait=3.0), "another copy of it was under way; waited 3s"),
        (
            RequestOutcome("copied", size=300 << 20, wait=1.2),
            "copied: waited 1.2s until its 300 MiB",
        ),
        (
            RequestOutcome("declined", reason="deadline", detail="9 GiB of 23 GiB are here"),
            r"declined \(deadline\).* 9 GiB of 23 GiB .*original path. The copy continues if",
        ),
        (
            RequestOutcome("declined", reason="no-permission", detail="/a is not readable"),
            r"declined \(no-permission\): The job's user.* /a is not readable .*original path",
        ),
        (RequestOutcome("failed", reason="cache-not-mounted"), "The job kept its original path"),
        (RequestOutcome("declined", reason="registry"), "enroot imports it, as without forestage"),
        (
            RequestOutcome("declined", reason="bad-hint", detail="unknown hint"),
            "The hint was ignored",
        ),
        (RequestOutcome("declined", reason="no-mount", image="/a"), "kept its original path"),
        (RequestOutcome("declined", reason="newer-than-this"), r"declined \(newer-than-this\)"),
    ],
)
def test_explain_sentence_of_an_outcome_matches_the_expected_text(
    outcome: Outcome, expected: str
) -> None:
    assert re.search(expected, " ".join(format_sentences(event(outcome), {})))


G = 1 << 30


def copied(end: float, wait: float, **changes: Any) -> EventRecord:
    """The stager's event of a copy that ended at `end`."""
    facts = {"image": "/a.sqsh", "key": KEY, "size": 23 * G, "wait": wait}
    outcome = CopyOutcome(**{"result": "copied", **facts, **changes.pop("outcome", {})})
    return event(outcome, time=end, hook="stager", total=wait, **changes)


def gave_up(end: float, request: str = "/a.sqsh", image: str = "", **changes: Any) -> EventRecord:
    detail = "9 GiB of 23 GiB of /a.sqsh are here, the rest takes 23s more"
    outcome = RequestOutcome("declined", "deadline", detail, request, "option", image, wait=15)
    return event(outcome, time=end, total=15.1, **changes)


def test_explain_of_a_copy_lists_its_evictions() -> None:
    one = copied(NOW, 10.0, outcome={"evicted": ("f" * 32, "e" * 32)})
    assert format_sentences(one, {"f" * 32: "/old.sqsh"}) == (
        "copied 23 GiB in 10s (2.3 GiB/s), and published",
        "evicted ffffffffffff: /old.sqsh, to free space",
        "evicted eeeeeeeeeeee, to free space",
    )


def test_explain_lists_evictions_made_to_unpack_a_container() -> None:
    for result in ("hit", "started", "through"):
        *_, last = format_sentences(
            event(RequestOutcome(result, image="/a", evicted=("f" * 32,))), {}
        )
        assert last == "evicted ffffffffffff, to free space"


@pytest.mark.parametrize(
    ("givers", "got", "came"),
    [
        (("n7", "n12"), 23, "n7, n12; 0 of 23 GiB"),
        (("n7",), 20, "n7; 3 GiB of 23 GiB"),
        ((), 20, "other nodes; 3 GiB of 23 GiB"),
    ],
)
def test_explain_of_a_copy_names_the_bytes_from_and_to_peers(
    givers: tuple[str, ...], got: int, came: str
) -> None:
    facts = {"from_peers": got * G, "givers": givers, "uploaded": 2 * G}
    (text,) = format_sentences(copied(NOW, 10.0, outcome=facts), {})
    assert text == (
        "copied 23 GiB in 10s (2.3 GiB/s), 2 GiB of it sent to other nodes meanwhile, and"
        f" published; from {came} from the file server"
    )


def test_explain_of_a_failed_copy_lists_its_evictions() -> None:
    outcome = CopyOutcome("declined", image="/a", reason="changed", evicted=("f" * 32,))
    text = " ".join(format_sentences(event(outcome, hook="stager"), {}))
    assert re.search("changed.*evicted ffffffffffff, to free space.*Nothing was published", text)
    assert "the job kept" not in text.lower().replace("a job that waited for it kept", "")


def test_explain_lists_a_prolog_before_its_stager() -> None:
    # The stager reports first, the hook that waited for it a moment later.
    prolog = event(hit(result="copied", wait=10.05), time=NOW + 0.1, total=10.1)
    text = printed(copied(NOW, 10.0), prolog)
    assert text.index("Prolog, 10s") < text.index("Stager, 10s")
    assert "stopped waiting" not in text
    assert "no Epilog is recorded" in text  # the stager is no hook of the job's life


@pytest.mark.parametrize(
    ("hook", "changes", "saved"),
    [
        ("step", {"baseline": 12.1, "redirect": "spank"}, "12s (reading it from its source takes"),
        ("step", {"baseline": 1.0, "wait": 3.0}, "nothing: it took 2s longer (reading it"),
        ("step", {"redirect": "spank"}, "not known"),
        ("prolog", {"baseline": 12.1}, "12s (reading it"),
        ("prolog", {"baseline": 12.1, "redirect": "spank"}, ""),  # its steps say so
        ("step", {"baseline": 12.1, "redirect": "none"}, ""),
        ("step", {"result": "started", "redirect": "none"}, ""),
        ("step", {"result": "through", "redirect": "spank"}, ""),
    ],
)
def test_explain_shows_the_time_that_a_start_from_the_copy_saved(
    hook: EventHook, changes: dict[str, Any], saved: str
) -> None:
    facts = {"wait": 0.1, **changes}
    text = printed(event(hit(**facts), hook=hook, step=0))
    line = re.search(r"^ +saved +(.*)$", text, re.MULTILINE)
    assert line[1].startswith(saved) if line and saved else not line


def test_explain_counts_saved_time_once_for_prolog_and_first_step_of_a_bound_path() -> None:
    step = {"redirect": "kept", "baseline": 9.0}
    text = printed(
        event(hit(baseline=9.0, wait=0.5), total=0.5),
        event(hit(**step), hook="step", step=0, time=NOW + 1),
        event(hit(**step), hook="step", step=1, time=NOW + 2),
    )
    assert re.findall(r"saved +(\S+)", text) == ["8.5s", "9s"]


def test_explain_shows_that_the_jobs_own_copy_ended_after_the_job_stopped_waiting() -> None:
    text = printed(gave_up(NOW - 25), copied(NOW, 39.9))
    assert re.search(
        r"Prolog, 15s.*rest takes 23s more.*The job kept its original path\. The copy continues"
        r".*Stager, 40s.*copied 23 GiB in 40s.*and published"
        r".*The job had stopped waiting 25s before; the next one has it\.",
        text,
        re.DOTALL,
    )


def test_explain_shows_another_jobs_copy_that_this_job_stopped_waiting_for() -> None:
    others = [
        copied(NOW, 39.9, job=3, user="bob"),
        copied(NOW - 100, 5.0, job=4),  # over before
        copied(NOW + 100, 5.0, job=5),  # begun later
        copied(NOW, 39.9, job=6, outcome={"image": "/b.sqsh"}),
    ]
    by_link = gave_up(NOW - 25, request="/link", image="/a.sqsh")
    assert len(make_job_history(7, [by_link, *others], None).runs) == 2
    found = make_job_history(7, [gave_up(NOW - 25), *others], None)
    assert [(run.hook, run.job) for run in found.runs] == [("prolog", 7), ("stager", 3)]
    text = printed(gave_up(NOW - 25), *others)
    assert text.startswith("Job 7 of alice")
    assert "Stager of job 3, 40s" in text
    assert "stopped waiting 25s before" in text


def test_explain_gives_each_step_its_number() -> None:
    late = RequestOutcome("declined", "deadline", "1 GiB of 23 GiB", "/b.sqsh", "option")
    text = printed(
        event(hit(result="started", redirect="spank"), time=NOW - 60, total=0.2),
        event(hit(redirect="spank"), time=NOW - 30, hook="step", step=0, total=0.1),
        event(late, time=NOW - 29.9, hook="step", step=1, total=0.1),
        event(
            RequestOutcome("failed", reason="io"), time=NOW, hook="step", step=0xFFFFFFFB, total=0.1
        ),
    )
    assert re.search(
        r"Prolog, 0.2s.*started.*Step 0, 0.1s.*hit: .*Step 1, 0.1s.*declined \(deadline\).*"
        r"The step kept its original path\. The copy continues.*Step batch, 0.1s.*failed \(io\).*"
        r"The step kept its original path\.\n",
        text,
        re.DOTALL,
    )


@pytest.mark.parametrize(("hook", "result"), [("prolog", "started"), ("step", "hit")])
def test_explain_reports_a_missing_epilog_after_a_step_or_a_started_copy(
    hook: EventHook, result: str
) -> None:
    assert "no Epilog is recorded" in printed(event(hit(result=result), hook=hook, step=0))


def test_explain_does_not_call_a_second_image_late_that_came_in_time() -> None:
    text = printed(
        copied(NOW - 30, 5.0, outcome={"image": "/b.sqsh"}),
        event(hit(result="copied", request="/b.sqsh"), time=NOW - 25, total=15.1),
        gave_up(NOW - 25),
        copied(NOW, 39.9),
    )
    assert text.count("stopped waiting") == 1


def test_explain_separates_the_runs_of_a_requeued_job() -> None:
    events = [
        event(hit(), time=NOW - 90, total=0.1),
        event(hit(request="/b.sqsh"), time=NOW - 89.999, total=0.1),
        event(ReleaseOutcome("released", unmounted=1), time=NOW - 60, hook="epilog", total=0.2),
        event(hit(), time=NOW - 30, total=0.3),
        event(hit(), time=NOW - 30, total=0.4, job=8),
    ]
    runs = make_job_history(7, events, None).runs
    assert [(run.hook, len(run.explained)) for run in runs] == [
        ("prolog", 2),
        ("epilog", 1),
        ("prolog", 1),
    ]


def test_explain_shows_the_paths_of_evicted_keys_if_known() -> None:
    text = printed(
        event(hit(image="/old.sqsh"), job=3),
        event(ReleaseOutcome("released", unmounted=2, evicted=(KEY, "f" * 32)), hook="epilog"),
    )
    assert "unmounted 2 redirects" in text
    assert "evicted 0123456789ab: /old.sqsh\n" in text
    assert "evicted ffffffffffff\n" in text


def test_explain_prints_problems_of_hints_once_per_run() -> None:
    wrong = ("unknown hint stage-wat=",)
    events = [event(hit(), problems=wrong) for _ in range(3)]
    events.append(event(RequestOutcome("released"), hook="epilog", problems=wrong))
    assert printed(*events).count("unknown hint") == 1


def test_explain_of_a_running_job_shows_its_lease() -> None:
    lease = Lease(
        7, User("", 1000, 1000), NOW - 60, "/nvme", (EntryUse(KEY), EntryUse("f" * 32, "/b.sqsh"))
    )
    text = printed(event(hit()), lease=lease)
    assert re.search(r"^  0123456789ab +/a.sqsh$", text, re.MULTILINE)
    assert re.search(r"^  ffffffffffff +/b.sqsh$", text, re.MULTILINE)
    assert make_job_history(7, [], lease).lease == LeaseHolder(
        7, "1000", NOW - 60, (LeasedImage(KEY, "", False), LeasedImage("f" * 32, "/b.sqsh", True))
    )


def test_explain_warns_of_wrong_bytes_only_a_job_that_began_while_the_entry_may_have_been_bad() -> (
    None
):
    bad = BadEntryOutcome("bad", "wrong-bytes", key=KEY, image="/a.sqsh", chunks=2, since=NOW - 100)
    found = event(bad, hook="verify", job=0, time=NOW + 50)
    text = printed(event(hit()), found)
    assert "WRONG BYTES? 2027-01-15 08:00:50 `verify` found this entry bad: 2 chunks" in text
    assert "its bytes were last right 2027-01-15 07:58:20" in text
    others = (
        event(hit(), time=NOW - 101),  # before they were last right
        event(hit(), time=NOW + 51),  # a newer copy
        event(hit(key="f" * 32)),
    )
    for one in others:
        assert "WRONG BYTES" not in printed(one, found)


def test_explain_reports_a_missing_epilog_after_a_hit_but_not_after_a_decline() -> None:
    assert "no Epilog is recorded" in printed(event(hit()))
    declined = RequestOutcome("declined", request="/a", reason="missing")
    assert "no Epilog is recorded" not in printed(event(declined))
    released = event(RequestOutcome("released"), time=NOW + 9, hook="epilog", total=1)
    assert "no Epilog is recorded" not in printed(event(hit()), released)


LEFT = event(hit(redirect="spank"))
OVER = event(ReleaseOutcome("released"), hook="epilog", time=NOW + 9)
NEXT = event(hit(redirect="spank"), time=NOW + 20)


@pytest.mark.parametrize(
    ("events", "is_told"),
    [
        ((LEFT, OVER), True),
        ((event(RequestOutcome("started", request="/d/", data=True)), OVER), True),
        ((LEFT,), False),  # it may be about to
        ((LEFT, event(hit(), hook="step", step=0, time=NOW + 1), OVER), False),
        ((event(hit(redirect="mounted")), OVER), False),
        ((event(RequestOutcome("declined", reason="missing")), OVER), False),
        ((LEFT, OVER, NEXT), False),  # requeued, and runs
        ((event(hit(), hook="step", step=0), OVER, NEXT, OVER), True),
    ],
)
def test_explain_says_why_no_step_of_a_job_asked_for_its_copies(
    events: tuple[EventRecord, ...], is_told: bool
) -> None:
    text = printed(*events)
    assert ("No step of this job asked forestage for its copies" in text) == is_told
    assert make_job_history(7, events, None).unasked == is_told


def test_explain_prints_a_features_sentences_in_place_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explain_outcome(facts: ExplainFacts) -> ExplainPart:
        said = f"it flew: {facts.outcome.result} in the {facts.hook}"
        rows = (("flight", "LH 400"),)
        return ExplainPart(said, "The job walked.", ("It landed.",), "fly", rows)

    told = (
        event(hit(via="hint"), options=("fly",)),
        event(RequestOutcome("declined", reason="missing")),
    )
    without = printed(*told)
    around_all(monkeypatch, {"explain.explain_outcome": explain_outcome}, {})
    text = printed(*told)
    for word in (
        "it flew: hit in the prolog",
        "The job walked.",
        "It landed.",
        "LH 400",
        "(--fly)",
    ):
        assert word in text
        assert word not in without
    assert "redirect mounted" not in text
    assert "kept its original path" not in text


def test_explain_without_features_prints_the_cores_sentences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = printed(event(hit()))
    monkeypatch.setattr(features, "FEATURES", ())
    assert printed(event(hit())) == before
    assert "declined (store-full)" in printed(
        event(RequestOutcome("declined", reason="store-full"))
    )


def test_explain_distinguishes_data_from_an_image() -> None:
    found = printed(event(hit(request="/lustre/set/", image="/lustre/set", data=True)))
    assert "data     /lustre/set" in found
    assert "image    " not in found
    assert "image    /b.sqsh" in printed(event(hit(image="/b.sqsh")))


def test_explain_lists_the_options_of_the_submission_and_the_hints_they_override() -> None:
    asked = {"options": ("stage", "stage-wait"), "ignored": ("stage", "stage-list")}
    prolog = event(hit(via="hint"), **asked)
    text = printed(prolog, event(hit(via="hint"), hook="step", step=0, time=NOW + 1))
    assert "  asked at submission: --stage, --stage-wait\n" in text
    assert "  not counted: stage=, stage-list= in the comment, as the option was given\n" in text
    assert text.count("/a.sqsh (--stage)") == 2, "a step goes by what the Prolog noted"


@pytest.mark.parametrize(
    ("options", "word", "via"),
    [
        ((), "/a.sqsh", "stage= in the comment"),
        (("stage-tell",), "/a.sqsh", "stage= in the comment"),
        (("stage",), "/a.sqsh", "--stage"),
    ],
)
def test_explain_shows_whether_a_request_came_by_comment_or_option(
    options: tuple[str, ...], word: str, via: str
) -> None:
    text = printed(event(hit(via="hint", request=word), options=options))
    assert f"{word} ({via})" in text
