"""`forestage hints`: which words may be submitted, and what is said of the others."""

from __future__ import annotations

import pytest

from forestage.features.prepare import hints
from forestage.slurm.hints import MAX_HINTED, MAX_OPTION

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
    "stage-dir=200GiB",
    "stage-dir=1.5T",
    "stage-dir=16G,ram",
    "stage-tell=yes",
    "stage-tell=no",
    "stage=/docker://in/a/name",
]
A_PATH = "write the path from / on: a relative one would depend on where it is written"
MEANS_NOTHING = "~, $HOME and quotes mean nothing here, write the path from / on"
PLACEHOLDERS = "(known: {node}, {nodes}, {node:03})"
ONE_EACH = "is several paths: write --stage once for each"
A_SIZE = "expected a size such as 23GiB or 500M, got"
A_DURATION = "expected a duration such as 90s or 10m, got"
KNOWN = "unknown (known: --stage, --stage-dir, --stage-tell, --stage-wait)"
WRONG = {
    "stage=": "names no path (write --stage=/path/to/image, or --stage=no)",
    "stage=a.sqsh": A_PATH,
    "stage=./a.sqsh": A_PATH,
    "stage=prod": A_PATH,
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
    "stage=/env.sqsh@/etc": "/etc: nothing may be mounted over /etc",
    "stage=/env.sqsh@/usr/local": "/usr/local: nothing may be mounted over /usr",
    "stage=/env.sqsh@/opt/../usr": "/usr: nothing may be mounted over /usr",
    "stage=/cache/@seed:PATH": "'PATH' is no variable that a seed may set",
    "stage=/cache/@seed:A B": "'A B' is no variable that a seed may set",
    "stage=/@job": "/ has no name for the job's directory",
    "stage-dir=lots": f"{A_SIZE} 'lots'",
    "stage-dir=16G,RAM": "expected SIZE or SIZE,ram, got '16G,RAM'",
    "stage-wait=soon": f"{A_DURATION} 'soon'",
    "stage-wait=-1": f"{A_DURATION} '-1'",
    "stage-list=/a": KNOWN,
    "container-image=/a": KNOWN,
}


def test_table_has_sixty_values() -> None:
    assert (len(RIGHT), len(WRONG)) == (30, 30)


@pytest.mark.parametrize("word", RIGHT)
def test_right_word_is_not_refused(word: str) -> None:
    assert hints.refusals([word]) == ()


@pytest.mark.parametrize(("word", "why"), WRONG.items())
def test_wrong_word_is_refused_with_what_to_write(word: str, why: str) -> None:
    (said,) = hints.refusals([word])
    written, _, text = said.partition(": ")
    assert text == why
    assert written.isprintable()
    assert written.startswith(f"--{word.partition('=')[0]}=")


def test_all_that_is_wrong_is_said_at_once() -> None:
    found = hints.refusals(["stage=/right", "stage=wrong", "stage-wait=x", "stage=/a@/etc"])
    assert [one.partition("=")[0] for one in found] == ["--stage", "--stage-wait", "--stage"]


def test_more_paths_than_a_job_may_name_are_refused() -> None:
    paths = [f"stage=/{number}" for number in range(MAX_HINTED + 1)]
    assert hints.refusals(paths[:-1]) == ()
    (said,) = hints.refusals(paths)
    assert said == f"--stage names {MAX_HINTED + 1} images, the first {MAX_HINTED} are read"


def test_off_beside_paths_is_right() -> None:
    # A script names its images, and whoever submits it says --stage=no.
    assert hints.refusals(["stage=/a", "stage=no"]) == ()


def test_words_that_are_too_long_are_refused_and_not_printed() -> None:
    (said,) = hints.refusals([f"stage=/{'x' * MAX_OPTION}"])
    assert said == f"--stage: longer than {MAX_OPTION} characters"


def test_each_refusal_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert hints.main(["stage=a", "stage=/a\x1b"]) == hints.REFUSED
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert hints.main(["stage=/a"]) == 0
    assert capsys.readouterr().out == ""
