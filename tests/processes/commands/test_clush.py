"""One command on many nodes by ClusterShell's own clush, as docs/operations.md writes it.

With a stand-in for ssh; tests/slurm/test_many_nodes.py has the way by srun.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Site
from forestage.commands.command_context import ExitStatus

REPO = Path(__file__).resolve().parents[3]
HERE = """
import sys; from pathlib import Path; from forestage.commands.main import *
from forestage.paths import NodePaths; from forestage.clock import Clock
main(sys.argv[2:], obj=CommandContext(NodePaths(Path(sys.argv[1])), Clock()))
"""
SSH = """
while [ $# -gt 2 ]; do shift; done
[ -d {root}/$1 ] || {{ echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; }}
node=$1
eval "set -- $2"
shift
exec {python} {here} {root}/$node "$@"
"""
UNREACHED = 255


@pytest.fixture
def nodes(tmp_path: Path, programs: Callable[..., Path]) -> dict[str, Site]:
    """Three nodes that an ssh of ours reaches, the last one without a usable cache."""
    here = tmp_path / "here.py"
    here.write_text(HERE)
    programs(ssh=SSH.format(root=tmp_path, python=sys.executable, here=here))
    found = {}
    for name in ("n1", "n2", "n3"):
        (tmp_path / name).mkdir()
        found[name] = Site(tmp_path / name)
        found[name].node.cache.prepare(False)
    found["n3"].node.cache.root.chmod(0o777)
    return found


def clush(ending: str, nodes: str, options: str = "-S -bw") -> subprocess.CompletedProcess[str]:
    """Runs the page's line that ends so, on these nodes."""
    page = (REPO / "docs/operations.md").read_text().splitlines()
    (line,) = [one.strip() for one in page if one.startswith("    clush -S") and ending in one]
    line = line.partition("  ")[0].replace("-S -bw", options).replace("n[1-64]", nodes)
    argv = ["sh", "-c", f"{Path(sys.executable).parent}/{line}"]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def blocks(text: str) -> dict[str, str]:
    """What clush -b printed: the nodes of each block, without their number, and its text."""
    _, *parts = text.split("---------------\n")
    heads = [part.split()[0] for part in parts[::2]]
    return dict(zip(heads, parts[1::2], strict=True))


def test_clush_merges_the_oneline_status_of_nodes_with_the_same_state(
    nodes: dict[str, Site],
) -> None:
    done = clush("forestage status --oneline", "n[1-3]")
    shown = blocks(done.stdout)
    assert list(shown) == ["n[1-2]", "n3"], done
    assert shown["n[1-2]"].startswith("forestage state=ok ")
    assert shown["n3"].startswith("forestage state=unusable ")
    assert done.returncode == ExitStatus.CACHE
    assert clush("forestage status --oneline", "n[1-2]").returncode == ExitStatus.OK


def test_clush_without_its_exit_status_option_exits_0_though_a_node_is_unusable(
    nodes: dict[str, Site],
) -> None:
    done = clush("forestage status --oneline", "n[1-3]", "-bw")
    assert (done.returncode, "state=unusable" in done.stdout) == (0, True)


def test_clush_names_an_unreachable_node_and_shows_the_other_nodes(nodes: dict[str, Site]) -> None:
    done = clush("forestage status --oneline", "n[1-2,9]")
    assert list(blocks(done.stdout)) == ["n[1-2]"]
    assert "n9: ssh: connect to host n9 port 22: No route to host" in done.stderr
    assert done.returncode == UNREACHED


def test_off_by_clush_passes_a_reason_of_several_words_as_one_argument(
    nodes: dict[str, Site],
) -> None:
    done = clush("forestage off", "n[1-2]")
    assert done.returncode == ExitStatus.OK, done
    for name in ("n1", "n2"):
        assert nodes[name].places.lasting_off_file.read_text().splitlines() == ["INC 42"]
    assert not nodes["n3"].places.lasting_off_file.exists()
