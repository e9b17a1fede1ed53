"""What is copied before a job starts: expected starts of what waits, and each node's choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import properties  # noqa: F401
from forestage.features.prefetch.policy import (
    DEFAULT_RULES,
    ExpectedStarts,
    HeldCopy,
    PendingJob,
    PrefetchChoice,
    PrefetchRules,
    WantedImage,
    choose_copy,
    compute_expected_starts,
)

ALICE, BOB = 1000, 1001
NOW, HOUR = 100_000.0, 3600.0
ROOM = 100
FREE = PrefetchRules(quota=1, share=1)
SIZES = {"a": 40, "b": 40}


def pending(nodes: int, *images: str, user: int = ALICE, parts: str = "p") -> PendingJob:
    return PendingJob(user, images or ("a",), nodes, tuple(parts))


def starts(found: tuple[ExpectedStarts, ...]) -> dict[str, float]:
    return {one.image: round(one.starts, 3) for one in found}


def wanted(**expected: float) -> dict[str, WantedImage]:
    return {image: WantedImage(40, ALICE, starts) for image, starts in expected.items()}


def old(size: int = 40, **changes: object) -> HeldCopy:
    """A copy whose last job ended before an hour."""
    return HeldCopy(size, NOW - HOUR, **changes)  # type: ignore[arg-type]


# --- the queue


def test_expected_starts_of_a_job_are_its_share_of_the_partitions_nodes() -> None:
    assert compute_expected_starts([pending(2)], {"p": 8}) == (
        ExpectedStarts("p", "a", ALICE, 0.25),
    )


def test_expected_starts_of_jobs_with_the_same_image_add_up_to_more_than_1() -> None:
    assert starts(compute_expected_starts([pending(4)] * 3, {"p": 4}, PrefetchRules(late=1))) == {
        "a": 3.0
    }


def test_expected_starts_are_halved_for_each_full_partition_queued_before_the_job() -> None:
    found = compute_expected_starts([pending(4, "a"), pending(4, "b"), pending(4, "c")], {"p": 4})
    assert starts(found) == {"a": 1.0, "b": 0.5, "c": 0.25}


def test_one_users_jobs_reduce_other_expected_starts_by_two_partitions_at_most() -> None:
    crowd = [pending(4, "a")] * 50
    found = compute_expected_starts([*crowd, pending(4, "b", user=BOB), pending(4, "c")], {"p": 4})
    assert starts(found)["b"] == 0.25
    assert starts(found)["c"] == 0.0, "for their own, all of them"


def test_expected_starts_of_a_job_are_divided_among_its_partitions() -> None:
    found = compute_expected_starts([pending(3, parts="pq")], {"p": 2, "q": 4})
    assert {one.partition: one.starts for one in found} == {"p": 0.5, "q": 0.5}


def test_job_of_an_unknown_partition_has_no_expected_starts() -> None:
    assert compute_expected_starts([pending(1, parts="x")], {"p": 4}) == ()


def test_expected_starts_have_a_row_for_each_user_with_the_most_expected_first() -> None:
    found = compute_expected_starts(
        [pending(1), pending(3, user=BOB)], {"p": 4}, PrefetchRules(late=1)
    )
    assert found == (ExpectedStarts("p", "a", BOB, 0.75), ExpectedStarts("p", "a", ALICE, 0.25))


def test_expected_starts_include_all_images_of_a_job() -> None:
    assert starts(compute_expected_starts([pending(1, "a", "b")], {"p": 2})) == {"a": 0.5, "b": 0.5}


# --- the node


def test_prefetch_chooses_the_most_expected_missing_image() -> None:
    assert choose_copy(wanted(a=0.5, b=0.4), {}, ROOM, NOW, FREE) == PrefetchChoice(
        "a", ALICE, frozenset()
    )
    found = choose_copy(wanted(a=0.5, b=0.4), {"a": old()}, ROOM, NOW, FREE)
    assert found == PrefetchChoice("b", ALICE, frozenset("a"))


def test_prefetch_chooses_no_image_with_expected_starts_below_the_least() -> None:
    assert choose_copy(wanted(a=DEFAULT_RULES.least - 0.01), {}, ROOM, NOW, FREE) is None
    assert choose_copy(wanted(a=DEFAULT_RULES.least), {}, ROOM, NOW, FREE) is not None


@pytest.mark.parametrize(
    ("held", "goes"),
    [
        (old(), True),
        (old(stays=True), False),
        (HeldCopy(40, NOW - DEFAULT_RULES.quiet + 1), False),
        (HeldCopy(40, NOW - DEFAULT_RULES.quiet - 1), True),
        (HeldCopy(40, NOW - 1, ALICE, fresh=True), True),
    ],
    ids=["used long ago", "in use", "used recently", "just quiet enough", "unexpected"],
)
def test_prefetch_evicts_no_entry_in_use_or_used_recently_for_an_expected_image(
    held: HeldCopy, goes: bool
) -> None:
    found = choose_copy(wanted(a=0.9), {"x": held, "y": old(stays=True)}, ROOM, NOW, FREE)
    assert (found is not None) == goes
    assert found is None or found.stay == frozenset("y")


@pytest.mark.parametrize(("here", "goes"), [(0.3, True), (0.31, False), (0.9, False)])
def test_prefetch_evicts_no_entry_expected_more_than_half_as_much_as_the_new_image(
    here: float, goes: bool
) -> None:
    full = {"x": old(60), "y": old(40, stays=True)}
    assert (choose_copy(wanted(a=0.61, x=here), full, ROOM, NOW, FREE) is not None) == goes


def test_prefetch_chooses_a_smaller_image_if_the_most_expected_does_not_fit() -> None:
    both = {"a": WantedImage(90, ALICE, 0.9), "b": WantedImage(50, ALICE, 0.5)}
    found = choose_copy(both, {"x": old(stays=True)}, ROOM, NOW, FREE)
    assert found == PrefetchChoice("b", ALICE, frozenset("x"))


def test_prefetched_unused_entries_stay_within_the_quota() -> None:
    held = {"x": HeldCopy(40, NOW, BOB, fresh=True)}
    assert (
        choose_copy(wanted(a=0.9), held, ROOM, NOW, PrefetchRules(quota=0.8, share=1)) is not None
    )
    assert choose_copy(wanted(a=0.9), held, ROOM, NOW, PrefetchRules(quota=0.79, share=1)) is None
    used = {"x": HeldCopy(40, NOW, BOB)}
    assert (
        choose_copy(wanted(a=0.9), used, ROOM, NOW, PrefetchRules(quota=0.4, share=1)) is not None
    )


def test_prefetched_unused_entries_of_one_user_stay_within_the_users_share() -> None:
    held = {"x": HeldCopy(20, NOW, ALICE, fresh=True)}
    share = PrefetchRules(quota=1, share=0.5)
    assert choose_copy(wanted(a=0.9), held, ROOM, NOW, share) is None
    theirs = {"a": WantedImage(40, BOB, 0.9)}
    assert choose_copy(theirs, held, ROOM, NOW, share) is not None


def choose_plainly(
    wanted: dict[str, WantedImage], held: dict[str, HeldCopy], room: int, rules: PrefetchRules
) -> PrefetchChoice | None:
    """The same by its definition, which looks at each copy for each image that is lacking."""
    fresh = [one for one in held.values() if one.fresh]
    lacking = [(one.starts, image) for image, one in wanted.items() if image not in held]
    for starts, image in sorted(lacking, reverse=True):
        size, user, _ = wanted[image]
        own = sum(one.size for one in fresh if one.user == user)
        is_within = sum(one.size for one in fresh) + size <= rules.quota * room
        stay = {
            name
            for name, one in held.items()
            if one.stays
            or (not one.fresh and one.used > NOW - rules.quiet)
            or (name in wanted and wanted[name].starts * rules.margin >= starts)
        }
        is_within = is_within and own + size <= rules.share * room and starts >= rules.least
        if is_within and size + sum(held[name].size for name in stay) <= room:
            return PrefetchChoice(image, user, frozenset(stay))
    return None


NAMES = st.sampled_from("abcdefgh")
STARTS = st.sampled_from((0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0, 2.0))
SIZE, USER = st.integers(1, 60), st.sampled_from((ALICE, BOB))


@given(
    st.dictionaries(NAMES, st.builds(WantedImage, SIZE, USER, STARTS)),
    st.dictionaries(
        NAMES,
        st.builds(HeldCopy, SIZE, st.sampled_from((0.0, NOW)), USER, st.booleans(), st.booleans()),
    ),
    st.integers(1, 300),
    st.sampled_from((DEFAULT_RULES, FREE)),
)
def test_prefetch_choice_equals_the_plain_definition_for_any_input(
    wanted: dict[str, WantedImage], held: dict[str, HeldCopy], room: int, rules: PrefetchRules
) -> None:
    assert choose_copy(wanted, held, room, NOW, rules) == choose_plainly(wanted, held, room, rules)


class CountedSizes(dict[str, HeldCopy]):
    """Copies that count how often one of them is looked up."""

    looked_up = 0

    def __getitem__(self, name: str) -> HeldCopy:
        self.looked_up += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("lacking", [1, 100])
def test_prefetch_choice_reads_each_held_entry_once_however_many_images_are_missing(
    lacking: int,
) -> None:
    held = CountedSizes({f"h{n}": old(1, stays=n % 2 == 0) for n in range(100)})
    expected = {name: WantedImage(1, ALICE, 0.5) for name in held}
    missing = {f"w{n}": WantedImage(ROOM, ALICE, 0.5) for n in range(lacking)}
    assert choose_copy(expected | missing, held, ROOM, NOW, FREE) is None
    assert held.looked_up == len(held)
