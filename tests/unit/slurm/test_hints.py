"""The hints of a comment: which paths, where they are to show, how long that may take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.slurm import hints as reader
from forestage.slurm.hints import (
    MAX_HINTED_PATHS,
    MAX_OPTION_CHARS,
    MAX_PROBLEMS,
    JobHints,
    NodeIndex,
    Request,
    parse_hints,
)
from forestage.units import MAX_TEXT


def _images(*paths: str, off: bool = False) -> JobHints:
    return JobHints(tuple(Request(path, "hint") for path in paths), off=off)


@pytest.mark.parametrize(
    ("comment", "expected"),
    [
        ("", JobHints()),
        # Words that only look like a hint.
        ("my favourite job, on stage", JobHints()),
        ("upstage=/a stage- stages=3 Stage=prod stage: stages onstage=/a backstage:/a", JobHints()),
        ("Stage=/a stages=/a stage:/a --stage=/a stage_wait=1m stage /a x,stage=/a", JobHints()),
        # Other tools'.
        ("stage=prod stage=build; stage=v2-rc_1 ticket 4711", JobHints()),
        ("stage=/a", _images("/a")),
        ("x;stage=/a;y", _images("/a")),
        ("stage=/a,/b stage=/c\nstage=/a", _images("/a", "/b", "/c")),
        ("stage=,/a,,", _images("/a")),
        ("stage=/a%2Cb%20c", _images("/a,b c")),
        ("stage=/a=b", _images("/a=b")),
        ("stage=off", JobHints(off=True)),
        ("stage=no", JobHints(off=True)),
        ("stage=none", JobHints(off=True)),
        ("stage=off stage=/a", _images("/a", off=True)),
        ("stage=/off,off", _images("/off", "off")),
        ("stage-wait=10m", JobHints(wait=600.0)),
        ("stage-wait=10m stage-wait=1m", JobHints(wait=60.0)),
    ],
)
def test_hints_are_read_out_of_free_text(comment: str, expected: JobHints) -> None:
    assert parse_hints(comment) == expected


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("stage=", "names no image"),
        ("stage-wait=", "stage-wait: expected a duration"),
        ("stage-wait=soon", "'soon'"),
        ("stage-wait=1e9", "'1e9'"),
        ("stage-=1", "unknown hint stage-="),
    ],
)
def test_wrong_hint_is_a_problem_and_the_other_hints_hold(comment: str, problem: str) -> None:
    hints = parse_hints(f"{comment} stage=/a")
    assert hints.paths == ("/a",)
    assert hints.wait is None
    (found,) = hints.problems
    assert problem in found


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("stage-wiat=1m", "unknown hint stage-wiat="),
        ("stage=~/x", "'~/x': ~, $HOME and quotes mean nothing here"),
        ("stage=$HOME/x", "'$HOME/x': ~, $HOME and quotes mean nothing here"),
        ('stage="/x"', "~, $HOME and quotes mean nothing here"),
        ("stage=prod stage-tell=yes", "stage=prod names no path: a path begins with /"),
    ],
)
def test_unusable_hint_is_one_problem(comment: str, problem: str) -> None:
    (found,) = parse_hints(f"ticket 4711 {comment} /c").problems
    assert problem in found


@pytest.mark.parametrize(("comment", "tell"), [("stage-tell=yes", True), ("stage-tell=no", False)])
def test_hint_stage_tell_yes_or_no_is_parsed(comment: str, tell: bool) -> None:
    found = parse_hints(comment)
    assert (found.tell, found.for_steps, found.problems) == (tell, tell, ())


@pytest.mark.parametrize("value", ["", "maybe", "YES", "1"])
def test_hint_stage_tell_with_another_value_is_a_problem(value: str) -> None:
    found = parse_hints(f"stage-tell={value}")
    assert not found.tell
    assert found.problems[0].startswith("stage-tell: expected yes or no")


def test_raw_hint_word_of_a_feature_is_kept_unparsed_for_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "RAW", ("stage-x",))
    monkeypatch.setattr(reader, "KNOWN_WORDS", (*reader.KNOWN_WORDS, "stage-x"))
    found = parse_hints("stage-x=/a,b=1 stage-x= stage-x=\udcff stage-wait=1m")
    assert (found.words, found.wait) == ((("stage-x", "/a,b=1"), ("stage-x", "")), 60.0)
    assert found.problems == ("stage-x: '\\udcff' is not UTF-8",)
    assert parse_hints("stage-x=1").for_steps
    many = parse_hints("stage-x=1 " * (MAX_HINTED_PATHS + 1))
    assert (len(many.words), len(many.problems)) == (MAX_HINTED_PATHS, 1)


def test_too_many_hinted_images_are_cut_and_reported() -> None:
    hints = parse_hints("stage=" + ",".join(f"/{n}" for n in range(MAX_HINTED_PATHS + 1)))
    assert hints.paths == tuple(f"/{n}" for n in range(MAX_HINTED_PATHS))
    assert f"names {MAX_HINTED_PATHS + 1} images" in hints.problems[0]


@pytest.mark.parametrize(
    ("comment", "number"),
    [
        (" ".join(f"stage-x{n}=1" for n in range(1000)), MAX_PROBLEMS),
        ("stage-" + "x" * 10_000 + "=1", 1),
        ("stage-\udcff=1", 1),
        ("stage-\x1b[2J=1", 1),
    ],
)
def test_problems_of_hints_are_few_short_and_printable(comment: str, number: int) -> None:
    problems = parse_hints(comment).problems
    assert len(problems) == number
    for problem in problems:
        assert problem.isprintable()
        assert len(problem.encode()) <= MAX_TEXT + len("…".encode())


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_any_path_can_be_hinted_percent_encoded(paths: list[str]) -> None:
    encoded = ",".join("".join(f"%{byte:02x}" for byte in path.encode()) for path in paths)
    expected = list(dict.fromkeys(paths))
    hints = parse_hints(f"stage={encoded}")
    assert {one.path for one in hints.requests} >= set(expected[:MAX_HINTED_PATHS]) - {""}


@pytest.mark.parametrize(
    ("value", "path", "at"),
    [
        ("/models/llama/", "/models/llama/", ""),
        ("/env.sqsh@/opt/env", "/env.sqsh", "/opt/env"),
        ("/d/@job", "/d/", "job"),
        ("/d/x.tar@job", "/d/x.tar", "job"),
        ("/cache@seed:TRITON_CACHE_DIR", "/cache", "seed:TRITON_CACHE_DIR"),
        # Only the last @ before one of these endings separates.
        ("/home/u@dom/x.sqsh@/opt/env", "/home/u@dom/x.sqsh", "/opt/env"),
        ("/home/u@dom/d/", "/home/u@dom/d/", ""),
        ("/a@b@job", "/a@b", "job"),
        ("/a%40/d/@job", "/a@/d/", "job"),
        ("/a@%2Fopt/", "/a@/opt/", ""),
        ("/x.sqsh@/opt/a%2Cb", "/x.sqsh", "/opt/a,b"),
        ("/d/%7Bnode%7D/", "/d/{node}/", ""),
    ],
)
def test_hinted_data_has_a_path_and_a_target(value: str, path: str, at: str) -> None:
    hints = parse_hints(f"stage={value}")
    assert hints.data == (Request(path, "hint", at),)
    assert (hints.paths, hints.problems) == ((), ())


@pytest.mark.parametrize(
    "value", ["/home/u@dom/x.sqsh", "/a@jobs", "/a@seed:", "/a@seed", "/x%40job"]
)
def test_at_sign_without_a_target_belongs_to_the_images_path(value: str) -> None:
    assert parse_hints(f"stage={value}").paths == (value.replace("%40", "@"),)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("/d/{node}/", "/d/7/"),
        ("/d/{nodes}/{node}/", "/d/16/7/"),
        ("/d/{node:05}/", "/d/00007/"),
        ("/d/{node:01}.sqsh", "/d/7.sqsh"),
    ],
)
def test_node_placeholder_in_a_hinted_path_is_replaced(value: str, path: str) -> None:
    (found,) = parse_hints(f"stage={value}", NodeIndex(7, 16)).requests
    assert found.path == path


@pytest.mark.parametrize(
    "path",
    ["{node:0300000000d}", "{node:5}", "{node:010}", "{}", "{0}", "{node.x}", "{node"],
)
def test_unknown_placeholder_in_a_hint_is_a_problem_and_takes_no_memory(path: str) -> None:
    hints = parse_hints(f"stage=/d/{path},/a", NodeIndex(7, 16))
    assert hints.paths == ("/a",)
    (problem,) = hints.problems
    assert "unknown placeholder {" in problem
    assert len(problem) < 200


def test_node_placeholder_without_a_known_node_index_is_a_problem() -> None:
    hints = parse_hints("stage=/d/{node}/,/a")
    assert (hints.paths, hints.data) == (("/a",), ())
    assert "is not known here" in hints.problems[0]


def test_limit_of_hints_counts_images_and_data_separately() -> None:
    value = ",".join(f"/{n}/,/{n}.sqsh" for n in range(MAX_HINTED_PATHS + 1))
    hints = parse_hints(f"stage={value}")
    assert (len(hints.paths), len(hints.data)) == (MAX_HINTED_PATHS, MAX_HINTED_PATHS)
    for what, problem in zip(("images", "data"), hints.problems, strict=True):
        assert f"names {MAX_HINTED_PATHS + 1} {what}" in problem


# Words that were given as options, as the companion joins them.
PER_NODE = Request("/d/02/", "hint")


def test_stage_options_are_read_without_percent_decoding() -> None:
    text = "stage=/a b,c%20d\nstage=/d/{node:02}/\nstage=/e.sqsh@/opt/e%\nstage-wait=5m\n"
    found = parse_hints("", NodeIndex(2, 4), text)
    assert found.paths == ("/a b,c%20d",)
    assert found.data == (PER_NODE, Request("/e.sqsh", "hint", "/opt/e%"))
    assert (found.wait, found.problems) == (300.0, ())
    assert found.options == ("stage", "stage-wait")


def test_last_value_of_a_repeated_option_counts() -> None:
    found = parse_hints("", option="stage-wait=5m\nstage-tell=yes\nstage-wait=1m\nstage-tell=no\n")
    assert (found.wait, found.tell, found.problems) == (60.0, False, ())


def test_option_overrides_the_comment_for_its_word_only() -> None:
    comment = "stage=/c,/d stage=off stage-list=/l stage-wait=9m stage-tell=yes stage=bad~"
    found = parse_hints(comment, option="stage=/o\nstage-wait=1m\n")
    assert (found.paths, found.off, found.listed) == (("/o",), False, "")
    assert (found.wait, found.tell) == (60.0, True)
    assert found.ignored == ("stage", "stage-list", "stage-wait")
    assert found.problems == ()


def test_comment_is_read_if_the_option_sets_another_word() -> None:
    found = parse_hints("stage=/c stage-wait=1m", option="stage-tell=yes\n")
    assert (found.paths, found.wait, found.tell) == (("/c",), 60.0, True)
    assert (found.options, found.ignored) == (("stage-tell",), ())


def test_option_switches_off_what_the_comment_names() -> None:
    found = parse_hints("stage=/c", option="stage=no\n")
    assert (found.off, found.paths) == (True, ())


def test_wrong_option_is_a_problem_and_the_other_options_hold() -> None:
    found = parse_hints("", option="stage=/a\nstage=b\n\nx=1\nstage-tell\nstage=/c")
    assert found.paths == ("/a", "/c")
    assert [one.partition(":")[0] for one in found.problems] == [
        "option --stage=b",
        "option --x=1",
        "option --stage-tell",
    ]


def test_option_text_beyond_the_maximal_length_is_refused_as_a_whole() -> None:
    # By hand somebody may hand over more than the companion does.
    most = "stage=/" + "x" * (MAX_OPTION_CHARS - 8) + "\n"
    assert len(parse_hints("", option=most).paths[0]) == MAX_OPTION_CHARS - 7
    found = parse_hints("stage=/c", option="x" + most)
    assert found.paths == ("/c",)
    (problem,) = found.problems
    assert problem == f"option --stage: longer than {MAX_OPTION_CHARS} characters"


@given(st.text(), st.text())
def test_any_option_text_is_parsed_with_few_printable_problems(comment: str, option: str) -> None:
    found = parse_hints(comment, option=option)
    assert len(found.problems) <= MAX_PROBLEMS
    assert all(problem.isprintable() for problem in found.problems)
    assert set(found.options) <= {"stage", "stage-dir", "stage-tell", "stage-wait"}
