"""Which nodes are meant: the site's own groups, never ClusterShell's samples; or a partition."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Site
from forestage.commands.command_context import ExitStatus
from forestage.errors import NotFoundError
from forestage.features.prepare import warm
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import run

GROUPS = "[Main]\ndefault: local\n[local]\nmap: sed -n 's/^$GROUP: //p' $CFGDIR/groups\n"


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Writes a group file below a directory of configurations."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CLUSTERSHELL_CFGDIR", raising=False)

    def write(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "groups.conf").write_text(GROUPS)
        (folder / "groups").write_text("all: gpu[1-3]\n")

    return write


def test_clustershell_group_of_the_user_is_expanded_to_its_nodes(
    groups: Callable[[Path], None], tmp_path: Path
) -> None:
    groups(tmp_path / "config/clustershell")
    assert warm.expand_nodes("@all,n7") == ("gpu1", "gpu2", "gpu3", "n7")


@pytest.mark.parametrize("text", ["@all", "@*", "@no:such", "n[1-", ""])
def test_sample_groups_of_clustershell_and_bad_node_sets_raise_value_error(
    groups: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    groups(tmp_path / "venv/etc/clustershell")
    with pytest.raises(ValueError, match=r"."):
        warm.expand_nodes(text)


@pytest.mark.parametrize(("listed", "expected"), [("n1\nn2\nn1\n", ("n1", "n2")), ("", None)])
def test_partition_is_expanded_to_its_nodes_without_duplicates(
    programs: Callable[..., Path], listed: str, expected: tuple[str, ...] | None
) -> None:
    asked = programs(sinfo=f"printf '{listed}'")
    if expected is None:
        with pytest.raises(NotFoundError, match="no partition gpu"):
            warm.list_partition_nodes("gpu", SlurmClient(run.PATH))
    else:
        assert warm.list_partition_nodes("gpu", SlurmClient(run.PATH)) == expected
    assert "--partition=gpu" in asked.read_text()


def test_warm_of_a_partition_runs_srun_on_each_of_its_nodes(
    site: Site, programs: Callable[..., Path]
) -> None:
    asked = programs(sinfo="printf 'n1\\nn2\\n'", srun="exit 1")
    site.run("warm", "/lustre/a.sqsh", "-p", "gpu")
    lines = [line for line in asked.read_text().splitlines() if line.startswith("srun")]
    assert len(lines) == 2
    assert all("--partition=gpu" in line for line in lines)
    assert site.run("warm", "/lustre/a.sqsh").exit_code == ExitStatus.USAGE
