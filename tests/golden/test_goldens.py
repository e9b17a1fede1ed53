"""The golden files themselves: what is compared, and what a person reads where it differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import goldens

KEPT = {"Prolog": ["forestage.a", "forestage.b"]}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(goldens, "GOLDEN", tmp_path)
    monkeypatch.delenv(goldens.WRITE, raising=False)
    (tmp_path / "said.txt").write_text("one\ntwo\n")
    (tmp_path / "imports.txt").write_text(goldens.as_text(KEPT))
    return tmp_path


def test_golden_text_that_differs_is_shown_as_a_diff_and_written_with_forestage_golden(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert goldens.compare("said.txt", "one\ntwo\n") == []
    differs = goldens.compare("said.txt", "one\nthree\n")
    assert {"-two", "+three", goldens.AGAIN} <= set(differs)
    with pytest.raises(AssertionError, match=r"\+three"):
        goldens.must_be_as_kept([], differs)
    assert goldens.compare("new.txt", "new\n") != []
    assert (kept / "said.txt").read_text() == "one\ntwo\n"
    monkeypatch.setenv(goldens.WRITE, "write")
    assert goldens.compare("said.txt", "one\nthree\n") == []
    assert (kept / "said.txt").read_text() == "one\nthree\n"


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"Prolog": ["forestage.a"]}, "Prolog imports no longer: forestage.b"),
        (
            {"Prolog": ["forestage.a", "forestage.b", "yaml"]},
            "Prolog imports more, which it must not: yaml",
        ),
        (
            {**KEPT, "Epilog": ["forestage.a"]},
            "Epilog imports more, which it must not: forestage.a",
        ),
        ({}, "Prolog imports no longer: forestage.a, forestage.b"),
    ],
)
def test_changed_golden_list_of_imports_names_the_modules_and_the_rule(
    kept: Path, now: goldens.Sections, told: str
) -> None:
    assert goldens.compare_imports("imports.txt", KEPT) == []
    _, differs, rule = goldens.compare_imports("imports.txt", now)
    assert differs == told
    assert "only get shorter" in rule


def test_normalise_replaces_keys_sizes_times_and_dates() -> None:
    key, other, third = "0123456789abcdef" * 2, "f" * 32, "7" * 32
    text = f"""{other} {key} {key[:12]} {third[:12]}
/root/of/it/lustre/a.sqsh 23.5 GiB in 1m30s (250 MB/s), total=0.31s
"time":1796000000.123,"wait":0.01 since 2026-11-28 21:53:38 +0000
a    wide   column  """
    assert goldens.normalise(text, Path("/root/of/it"), keys=[third]).splitlines() == [
        "KEY1 KEY2 KEY2 KEY3",
        "/lustre/a.sqsh SIZE in TIME (SIZE), total=N",
        '"time":N,"wait":N since DATE',
        "a  wide  column",
    ]


def test_count_imports_counts_every_golden_scene() -> None:
    program = goldens.GOLDEN / "count-imports"
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    counted = [line.split()[0] for line in ran.stdout.splitlines()[1:]]
    assert counted == sorted(file.stem for file in (goldens.GOLDEN / "imports").glob("*.txt"))
