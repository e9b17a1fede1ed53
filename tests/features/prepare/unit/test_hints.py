"""`forestage hints`: which words may be submitted, and what is said of the others."""

from __future__ import annotations

import pytest

from forestage.errors import Declined
from forestage.features.prepare import hints
from forestage.slurm.hints import MAX_HINTED_PATHS, MAX_OPTION_CHARS, OPTIONS, Request
from made_up import around_all

RIGHT = [
    "stage=/a.sqsh",
    "stage=/data/set/",
    "stage=/data/set/@job",
    "stage=/data/set.tar.zst@job",
    "stage=/caches/inductor/@seed:TORCHINDUCTOR_CACHE_DIR",
    "stage=/env.sqsh@/opt/env",
    "stage=/env.sqsh@/home/alice/env",
    "stage=/data/part-{node}/",
    "stage=/data/part-{node:03}-of-{nodes}/",
    "stage=/with a space.sqsh",
    "stage=/with,comma.sqsh",
    "stage=/with%20percent.sqsh",
    "stage=/with@sign.sqsh",
    "stage=/with=equals.sqsh",
    "stage=/with;semicolon.sqsh",
    "stage=/ünïcode.sqsh",
    "stage=/a@b/c.sqsh",
    "stage=/",
    "stage=no",
    "stage=off",
    "stage=none",
    "stage-wait=0",
    "stage-wait=90s",
    "stage-wait=1h30m",
    "stage-tell=yes",
    "stage-tell=no",
    "stage=/docker://in/a/name",
]
A_PATH = "write the path from / on: a relative one would depend on where it is written"
MEANS_NOTHING = "~, $HOME and quotes mean nothing here, write the path from / on"
PLACEHOLDERS = "(known: {node}, {nodes}, {node:03})"
ONE_EACH = "is several paths: write --stage once for each"
A_DURATION = "expected a duration such as 90s or 10m, got"
KNOWN = f"unknown (known: {', '.join(f'--{one}' for one in OPTIONS)})"
WRONG = {
    "stage=": "names no path (write --stage=/path/to/image, or --stage=no)",
    "stage=a.sqsh": A_PATH,
    "stage=./a.sqsh": A_PATH,
    "stage=prod": A_PATH,
    "stage=data/set/": A_PATH,
    "stage=No": A_PATH,
    "stage= /a.sqsh": A_PATH,
    "stage=@job": A_PATH,
    "stage=~/a.sqsh": f"'~/a.sqsh': {MEANS_NOTHING}",
    "stage=$HOME/a.sqsh": f"'$HOME/a.sqsh': {MEANS_NOTHING}",
    "stage='/a.sqsh'": f"\"'/a.sqsh'\": {MEANS_NOTHING}",
    "stage=/a.sqsh,/b.sqsh": ONE_EACH,
    "stage=/a.sqsh, /b.sqsh": ONE_EACH,
    "stage=/env.sqsh@/opt/env,/b/": ONE_EACH,
    "stage=docker://ubuntu": "is no path: an image of a registry is for --container-image",
    "stage=nvcr.io#nvidia/pytorch:24.01-py3": A_PATH,
    "stage=/a\x1b[2J": "holds a control character",
    "stage=/data/{rank}/": f"unknown placeholder {{rank}} {PLACEHOLDERS}",
    "stage=/data/{node:3}/": f"unknown placeholder {{node:3}} {PLACEHOLDERS}",
    "stage-wait=soon": f"{A_DURATION} 'soon'",
    "stage-wait=-1": f"{A_DURATION} '-1'",
    "stage-lists=/a": KNOWN,
    "container-image=/a": KNOWN,
}


def test_table_of_hint_words_has_fifty_values() -> None:
    assert (len(RIGHT), len(WRONG)) == (27, 23)


@pytest.mark.parametrize("word", RIGHT)
def test_hints_command_accepts_each_valid_word(word: str) -> None:
    assert hints.list_refusals([word]) == ()


@pytest.mark.parametrize(("word", "why"), WRONG.items())
def test_hints_command_refuses_each_invalid_word_with_the_expected_form(
    word: str, why: str
) -> None:
    (said,) = hints.list_refusals([word])
    written, _, text = said.partition(": ")
    assert text == why
    assert written.isprintable()
    assert written.startswith(f"--{word.partition('=')[0]}=")


def test_hints_command_reports_all_invalid_words_at_once() -> None:
    found = hints.list_refusals(["stage=/right", "stage=wrong", "stage-wait=x", "stage=@job"])
    assert [one.partition("=")[0] for one in found] == ["--stage", "--stage-wait", "--stage"]


def test_hints_command_refuses_a_target_that_a_feature_declines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def must_be_possible(request: Request) -> None:
        if request.at == "/nowhere":
            raise Declined("bad-place", "nothing may be mounted there")

    around_all(monkeypatch, {}, {"submitted.must_be_possible": must_be_possible})
    found = hints.list_refusals(["stage=wrong", "stage=/a@/nowhere", "stage=/a@/somewhere"])
    assert found[1:] == ("--stage=/a@/nowhere: nothing may be mounted there",)


def test_hints_command_refuses_more_paths_than_a_job_may_name() -> None:
    paths = [f"stage=/{number}" for number in range(MAX_HINTED_PATHS + 1)]
    assert hints.list_refusals(paths[:-1]) == ()
    (said,) = hints.list_refusals(paths)
    assert (
        said
        == f"--stage names {MAX_HINTED_PATHS + 1} images, the first {MAX_HINTED_PATHS} are read"
    )


def test_hints_command_accepts_stage_no_beside_paths() -> None:
    # A script names its images, and whoever submits it says --stage=no.
    assert hints.list_refusals(["stage=/a", "stage=no"]) == ()


def test_hints_command_refuses_a_word_that_is_too_long_without_printing_the_word() -> None:
    (said,) = hints.list_refusals([f"stage=/{'x' * MAX_OPTION_CHARS}"])
    assert said == f"--stage: longer than {MAX_OPTION_CHARS} characters"


def test_hints_command_prints_one_line_for_each_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert hints.main(["stage=a", "stage=/a\x1b"]) == hints.REFUSED_EXIT_STATUS
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert hints.main(["stage=/a"]) == 0
    assert capsys.readouterr().out == ""
