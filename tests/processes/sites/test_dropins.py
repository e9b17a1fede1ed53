"""The scripts for a prolog.d that nodes share: no node drains for want of the package."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
HOOKS = ["prolog", "epilog"]
NAME = "50-all-forestage"


def run(tmp_path: Path, kind: str, hook: str | None) -> subprocess.CompletedProcess[str]:
    """Runs the script with another hook beside it, in the bare environment that slurmd gives."""
    text = (REPO / f"packaging/{kind}.d/{NAME}").read_text()
    ours = f"/usr/libexec/forestage/{kind}"
    assert text.count(ours) == 2
    (tmp_path / NAME).write_text(text.replace(ours, str(tmp_path / kind)))
    (tmp_path / NAME).chmod(0o755)
    if hook is not None:
        (tmp_path / kind).write_text(hook)
        (tmp_path / kind).chmod(0o755)
    return subprocess.run(
        [tmp_path / NAME], env={"SLURM_JOB_ID": "7"}, cwd="/", capture_output=True, text=True
    )


@pytest.mark.parametrize("kind", HOOKS)
def test_shared_hook_script_without_the_package_exits_0_and_prints_nothing(
    tmp_path: Path, kind: str
) -> None:
    done = run(tmp_path, kind, None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize(
    "hook",
    [
        "#!/bin/sh\nexit 0\n",
        "#!/bin/sh\nexit 1\n",
        "#!/nonexistent\n",  # as one that is removed between the look and the start
        "#!/bin/sh\nkill -KILL $$\n",
    ],
)
def test_shared_hook_script_exits_0_however_the_hook_ends(
    tmp_path: Path, kind: str, hook: str
) -> None:
    assert run(tmp_path, kind, hook).returncode == 0


@pytest.mark.parametrize("kind", HOOKS)
def test_shared_hook_script_passes_the_jobs_environment_to_the_hook(
    tmp_path: Path, kind: str
) -> None:
    assert run(tmp_path, kind, '#!/bin/sh\necho "$SLURM_JOB_ID"\n').stdout == "7\n"


@pytest.mark.parametrize("kind", HOOKS)
def test_shared_hook_script_is_executable_packaged_and_documented(kind: str) -> None:
    file = REPO / f"packaging/{kind}.d/{NAME}"
    assert file.stat().st_mode & 0o111 == 0o111, "else slurmd drains the node"
    build = (REPO / "packaging/build").read_text()
    assert "for folder in prolog.d epilog.d" in build
    assert f"/usr/share/forestage/{kind}.d/{NAME}" in (REPO / "docs/sites.md").read_text()
