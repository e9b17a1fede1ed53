"""Hints that are for data alone: a directory's size, a list, and places that no node would show."""

from __future__ import annotations

import pytest

from forestage.errors import Declined
from forestage.features.data import submitted
from forestage.features.data.requests import split_path_list
from forestage.slurm.hints import NodeIndex, parse_hints

GIB = 1024**3


@pytest.mark.parametrize(
    ("comment", "room", "ram"),
    [("stage-dir=200GiB", 200 * GIB, False), ("stage-dir=64G,ram", 64 * GIB, True)],
)
def test_stage_dir_hint_sets_size_and_ram(comment: str, room: int, ram: bool) -> None:
    hints = parse_hints(comment)
    assert (hints.room, hints.ram, hints.has_data, hints.problems) == (room, ram, True, ())


@pytest.mark.parametrize("value", ["", "much", "-1", "1G,disk", "1G,", "80%"])
def test_stage_dir_hint_with_an_invalid_size_is_reported_as_a_problem(value: str) -> None:
    hints = parse_hints(f"stage-dir={value} stage=/a")
    assert (hints.room, hints.paths) == (None, ("/a",))
    assert hints.problems[0].startswith("stage-dir: expected")


def test_stage_list_hint_replaces_node_by_the_nodes_index() -> None:
    assert parse_hints("stage-list=lists/{node}", NodeIndex(3, 4)).listed == "lists/3"


def test_last_of_several_stage_dir_options_is_used() -> None:
    found = parse_hints("", option="stage-dir=1G,ram\nstage-wait=1m\nstage-dir=2G\n")
    assert (found.wait, found.room, found.ram, found.problems) == (60.0, 2 * GIB, False, ())


def test_stage_list_of_the_comment_is_kept_beside_an_option_without_paths() -> None:
    found = parse_hints("stage=/c stage-list=/l", option="stage-tell=yes\n")
    assert (found.paths, found.listed, found.tell) == (("/c",), "/l", True)
    assert (found.options, found.ignored) == (("stage-tell",), ())


@pytest.mark.parametrize("size", ["200GiB", "1.5T", "16G,ram"])
def test_stage_dir_is_accepted_as_an_option(size: str) -> None:
    assert parse_hints("", option=f"stage-dir={size}").problems == ()


@pytest.mark.parametrize(
    ("size", "why"),
    [
        ("lots", "expected a size such as 23GiB or 500M, got 'lots'"),
        ("16G,RAM", "expected SIZE or SIZE,ram, got '16G,RAM'"),
    ],
)
def test_stage_dir_option_with_an_invalid_size_reports_the_expected_form(
    size: str, why: str
) -> None:
    found = parse_hints("", option=f"stage-dir={size}")
    assert found.problems == (f"option --stage-dir={size}: {why}",)


def test_stage_list_is_rejected_as_an_option() -> None:
    (problem,) = parse_hints("", option="stage-list=/a").problems
    assert problem.startswith("option --stage-list=/a: unknown (known: --stage, --stage-dir, ")


@pytest.mark.parametrize(
    "word",
    [
        "/data/set/",
        "/data/set/@job",
        "/data/set.tar.zst@job",
        "/caches/inductor/@seed:TORCHINDUCTOR_CACHE_DIR",
        "/env.sqsh@/opt/env",
        "/env.sqsh@/home/alice/env",
    ],
)
def test_valid_target_of_a_stage_request_is_accepted_at_submission(word: str) -> None:
    (request,) = parse_hints("", option=f"stage={word}").data
    submitted.must_be_possible(request)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("/env.sqsh@/etc", "/etc: nothing may be mounted over /etc"),
        ("/env.sqsh@/usr/local", "/usr/local: nothing may be mounted over /usr"),
        ("/env.sqsh@/opt/../usr", "/usr: nothing may be mounted over /usr"),
        ("/cache/@seed:PATH", "'PATH' is no variable that a seed may set"),
        ("/cache/@seed:A B", "'A B' is no variable that a seed may set"),
        ("/@job", "/ has no name for the job's directory"),
    ],
)
def test_target_that_no_node_mounts_is_declined_at_submission(word: str, why: str) -> None:
    (request,) = parse_hints("", option=f"stage={word}").data
    with pytest.raises(Declined) as refused:
        submitted.must_be_possible(request)
    assert str(refused.value) == why


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_stage_list_with_byte_order_mark_and_crlf_lines_is_split(mark: bytes) -> None:
    text = mark + "/a/ü/\r\n# more\r\n\r\n  /b@job \r\n".encode() + b"/\xff"
    assert split_path_list(text) == ["/a/ü/", "", "/b@job", "/\udcff"]
    assert split_path_list(mark + b"# /a/\n/b/") == ["/b/"]
    assert split_path_list(mark) == [""]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("text", ["/a/\n", "# ü\r\n/a/", "\n"])
def test_stage_list_in_utf_16_or_utf_32_raises_an_error_naming_utf_16(
    encoding: str, text: str
) -> None:
    with pytest.raises(ValueError, match="is UTF-16; save it as UTF-8"):
        split_path_list(text.encode(encoding))


def test_stage_list_with_nul_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL bytes"):
        split_path_list(b"/a\0b/\n")
