"""A mistake in plugstack.conf is named where the admin looks, and never stops a step."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from companion import FOLDER, MARK, WARNINGS, Step


@pytest.mark.parametrize(
    "argument",
    [
        "helpr=/x",
        "helper=relative",
        "helper=",
        "timeout=",
        "timeout=0",
        "timeout=1m",
        "timeout=-1",
        "timeout=571",
    ],
)
def test_invalid_plugin_argument_is_logged_and_no_helper_is_started(
    step: Step, argument: str
) -> None:
    ran = step.run(f"arg={argument}")
    assert any(argument in line for line in ran.lines("error"))
    assert step.asked() == 0


@pytest.mark.parametrize(("given", "passed"), [([], "540"), (["arg=timeout=570"], "570")])
def test_helper_gets_the_timeout_argument_or_the_default_of_540_s(
    step: Step, given: list[str], passed: str
) -> None:
    out = step.folder / "timeout"
    step.answers("leave\tnone", first=f"printenv FORESTAGE_TIMEOUT > {out}")
    step.run(*given)
    assert out.read_text() == f"{passed}\n"


def test_invalid_plugin_argument_is_logged_by_slurmd_at_its_start(step: Step) -> None:
    assert any("helpr" in line for line in step.run("arg=helpr", "context=slurmd").lines("error"))


@pytest.mark.parametrize("context", [["context=slurmd"], []])
def test_loaded_companion_leaves_a_mark_with_the_time_of_loading(
    step: Step, context: list[str]
) -> None:
    step.run(*context)
    assert MARK.stat().st_mode & 0o777 == 0o644
    assert MARK.stat().st_uid == 0
    os.utime(MARK, (0, 0))
    step.run(*context)
    assert MARK.stat().st_mtime > 0, "`forestage status` says when"


@pytest.mark.parametrize("given", [["context=local"], ["arg=helpr", "context=slurmd"]])
def test_companion_in_srun_or_with_an_invalid_argument_leaves_no_mark(
    step: Step, given: list[str]
) -> None:
    step.run(*given)
    assert not MARK.exists()


def test_invalid_plugin_argument_is_not_reported_in_srun(step: Step) -> None:
    assert step.run("arg=helpr", "context=local").lines("error") == []


# What Slurm looks up: the callbacks that there are, and what SPANK_PLUGIN() defines.
CALLBACKS = {
    *("slurm_spank_init", "slurm_spank_init_post_opt", "slurm_spank_user_init"),
    "slurm_spank_task_init_privileged",
}
MARKS = {"plugin_name", "plugin_type", "plugin_version", "spank_plugin_version"}


def make(out: Path, *arguments: str) -> None:
    command = ["make", "-s", "-C", str(FOLDER), f"OUT={out}", *arguments]
    subprocess.run(command, check=True)


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_companion_compiles_without_warnings(tmp_path: Path, compiler: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    make(tmp_path / "forestage.so", f"CC={compiler}")
    assert set(WARNINGS) <= set((FOLDER / "Makefile").read_text().split())


def test_companion_is_installed_readable_for_all_users(tmp_path: Path) -> None:
    make(tmp_path / "forestage.so", f"DESTDIR={tmp_path}", "install")
    there = tmp_path / "usr/lib/forestage/spank"
    assert (there / "forestage.so").stat().st_mode & 0o777 == 0o644
    assert (there / "forestage.so.release").stat().st_mode & 0o777 == 0o644


def test_companions_release_file_has_the_installed_slurms_version(tmp_path: Path) -> None:
    """`forestage check` compares it with what slurmd says."""
    make(tmp_path / "forestage.so")
    slurmd = subprocess.run(["slurmd", "-V"], check=True, capture_output=True, text=True).stdout
    assert (tmp_path / "forestage.so.release").read_text() == f"{slurmd.split()[-1]}\n"


def test_companion_exports_only_spank_callbacks(tmp_path: Path) -> None:
    # Another one could be taken for a callback, or stand in for a function of the step manager's.
    make(tmp_path / "forestage.so")
    names = ["nm", "-D", "--defined-only", "--format=just-symbols", tmp_path / "forestage.so"]
    shown = subprocess.run(names, check=True, capture_output=True, text=True).stdout
    assert set(shown.split()) == CALLBACKS | MARKS
