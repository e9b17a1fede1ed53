"""forestage-estimate as an admin runs it: bare Python, from a folder or as one file."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import zipapp
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "src/estimate"
SACCT = r"""#!/bin/sh
case $* in
    *--batch-script*) printf 'Batch Script for 2\n---\n#!/bin/sh\n#SBATCH --container-image=/x\n' ;;
    *) sep=$(printf '\037') at=$SLURM_TIME_FORMAT
        [ "$at" = %s ] && at=1790000000
        row() { printf '%s\n' "$1${sep}gpu$sep$at$sep$2$sep$sep/$sep$3"; }
        row 1 'n[1-2]' "srun --container-image=IMAGE true"
        row 2 n1 "sbatch job.sh"; row 2.batch n1 ""
        row 3 n1 "srun --container-image=IMAGE true" ;;
esac
"""


@pytest.fixture(scope="module", params=["folder", "file"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "folder":
        return FOLDER
    made = tmp_path_factory.mktemp("estimate") / "forestage-estimate.pyz"
    zipapp.create_archive(FOLDER, made, filter=lambda path: "__pycache__" not in path.parts)
    return made


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """With a stand-in for sacct, and an image of 2048 bytes that it knows of."""
    image, sacct = tmp_path / "a.sqsh", tmp_path / "sacct"
    image.write_bytes(bytes(2048))
    os.utime(image, (1, 1))
    sacct.write_text(SACCT.replace("IMAGE", str(image)))
    sacct.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def run(
    program: Path, environ: dict[str, str], *options: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    argv = ["/usr/bin/python3", "-I", "-S", "-B", str(program), *options]
    return subprocess.run(
        argv, env=environ, input=stdin, capture_output=True, text=True, check=False, timeout=60
    )


def test_estimate_with_bare_python_prints_figures_as_text_json_and_html(
    program: Path, environ: dict[str, str]
) -> None:
    ran = run(program, environ)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "hits                           1 (33%)" in ran.stdout
    told = json.loads(run(program, environ, "--json", "--cold-seconds-per-gib=2").stdout)
    assert (told["known"], told["chosen"]["hits"], told["chosen"]["saved"]) == (3, 1, 2048)
    assert told["unseen"] == 0.25
    html = run(program, environ, "--html").stdout
    assert html.startswith("<!doctype html>")
    assert html.rstrip().endswith("</html>")


def test_output_of_the_sacct_command_that_estimate_prints_is_accepted_by_estimate(
    program: Path, environ: dict[str, str], tmp_path: Path
) -> None:
    printed = run(program, environ, "--print-command").stdout
    rows = subprocess.run(
        ["bash", "-c", printed], env=environ, capture_output=True, text=True, check=True
    ).stdout
    told = json.loads(run(program, environ, "--from=-", "--json", stdin=rows).stdout)
    assert (told["known"], told["chosen"]["hits"], told["unseen"]) == (3, 1, None)
    (tmp_path / "rows").write_text(rows)
    assert run(program, environ, f"--from={tmp_path}/rows", "--json").stdout == (
        run(program, environ, "--from=-", "--json", stdin=rows).stdout
    )


@pytest.mark.parametrize(
    ("sacct", "said"),
    [
        ("", "no job has started then"),
        ("echo 'Slurm accounting storage is disabled' >&2; exit 1", "run it where sacct works"),
        (None, "run it where sacct works"),
    ],
)
def test_estimate_exits_1_with_advice_if_sacct_is_missing_fails_or_prints_no_jobs(
    program: Path, environ: dict[str, str], tmp_path: Path, sacct: str | None, said: str
) -> None:
    program_path = tmp_path / "sacct"
    if sacct is None:
        program_path.unlink()
    else:
        program_path.write_text(f"#!/bin/sh\n{sacct}\n")
    ran = run(program, environ)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr


def test_estimate_is_python_3_9_and_imports_only_the_standard_library() -> None:
    import sys

    for path in FOLDER.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            known = {"forestage_estimate", *sys.stdlib_module_names}
            assert {name.partition(".")[0] for name in names} <= known, path
