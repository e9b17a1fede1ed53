"""`-w NODESET`: one table of what many nodes answer, and no node that is silently left out."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from commands import NOW, Site
from forestage.admin import fleet
from forestage.admin.fleet import Question, Reply, Said
from forestage.cache.lease import Use
from forestage.cli.world import Exit
from forestage.events import Event, Handled, Released, append
from forestage.system.terminal import Piece, Table

HERE = """
import sys; from pathlib import Path; from forestage.cli.main import *
from forestage.paths import Places; from forestage.clock import Clock
main(sys.argv[2:], obj=World(Places(Path(sys.argv[1])), Clock()))
"""
SSH = """
while [ $# -gt 2 ]; do shift; done
[ -d {root}/$1 ] || {{ echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255; }}
[ -e {root}/$1/hangs ] && exec sleep 600
echo "Welcome to $1!"
eval "set -- $1 $2"
node=$1; shift 2
exec {python} {here} {root}/$node "$@"
"""


@pytest.fixture
def nodes(tmp_path: Path, programs: Callable[..., Path]) -> dict[str, Site]:
    """Four nodes that an ssh of ours reaches; n9 has no route."""
    here = tmp_path / "here.py"
    here.write_text(HERE)
    programs(ssh=SSH.format(root=tmp_path, python=sys.executable, here=here))
    found = {}
    for name in ("n1", "n2", "n3", "n4"):
        (tmp_path / name).mkdir()
        found[name] = Site(tmp_path / name)
    return found


def shared(nodes: dict[str, Site], *names: str) -> tuple[Path, str]:
    """An image with an entry on these nodes; its path is the same on all, as of a shared file."""
    path = nodes["n1"].image("shared.sqsh")
    keys = {nodes[name].publish(path) for name in names}
    return path, keys.pop()


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_ls_of_an_image_says_who_has_it_and_who_does_not(nodes: dict[str, Site]) -> None:
    path, key = shared(nodes, "n1", "n2", "n3")
    nodes["n3"].lease(7, Use(key))
    done = nodes["n1"].run("ls", "-w", "n[1-4]", str(path))
    head, free, leased, without = done.stdout.splitlines()
    assert head.split()[:3] == ["NODES", "KEY", "KIND"]
    assert free.split()[:3] == ["n[1-2]", key[:12], "image"]
    assert leased.startswith("n3 ")
    assert "leased by 1 job" in leased
    assert without.startswith(f"n4: no entry has the key or path {path}")
    assert done.exit_code == Exit.NOT_FOUND


def test_node_that_does_not_answer_is_named_and_the_others_are_shown(
    nodes: dict[str, Site], tmp_path: Path
) -> None:
    shared(nodes, "n1", "n2")
    (tmp_path / "n2/hangs").touch()
    done = nodes["n1"].run("ls", "-w", "n[1-2,9]", "--within", "3s")
    assert done.exit_code == Exit.UNREACHED
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["NODES", "n1", "n2:", "n9:"]
    assert "n2: no answer within 3s" in done.stdout
    assert "n9: ssh: connect to host n9 port 22: No route to host" in done.stdout


def test_missing_ssh_is_said_before_any_node_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = Site(tmp_path).run("ls", "-w", "n[1-2]")
    assert (done.exit_code, "ssh is not installed" in done.stderr) == (Exit.NOT_FOUND, True)


def test_status_is_a_row_for_each_state(nodes: dict[str, Site]) -> None:
    for name in ("n1", "n2", "n3"):
        nodes[name].node.cache.prepare(False)
    nodes["n3"].node.cache.root.chmod(0o777)
    done = nodes["n1"].run("status", "-w", "n[1-3]")
    rows = {row[0]: row for row in table(done.stdout)}
    assert (rows["n[1-2]"][1], rows["n3"][1]) == ("ok", "unusable")
    assert ("DAMAGED" in done.stdout, "WHY" in done.stdout) == (False, True)
    assert "is not a directory of root's" in done.stdout
    assert done.exit_code == Exit.CACHE
    lines = nodes["n1"].run("status", "-w", "n[1-2]", "--oneline").stdout
    assert "n[1-2]: forestage state=ok " in lines
    assert nodes["n1"].run("status", "-w", "n1", "--watch").exit_code == Exit.USAGE
    (nodes["n2"].node.cache.entries / "00").mkdir()
    assert "DAMAGED" in nodes["n1"].run("status", "-w", "n[1-3]").stdout


def test_evict_on_nodes_is_a_dry_run_where_that_was_asked_for(nodes: dict[str, Site]) -> None:
    path, key = shared(nodes, "n1", "n2")
    nodes["n2"].lease(7, Use(key))
    done = nodes["n1"].run("evict", "-w", "n[1-2]", "-n", str(path))
    assert "would be evicted" in done.stdout
    assert [nodes[name].keys() for name in ("n1", "n2")] == [{key}, {key}]
    done = nodes["n1"].run("evict", "-w", "n[1-2]", key)
    assert [nodes[name].keys() for name in ("n1", "n2")] == [set(), {key}]
    assert "stays: leased by job 7" in done.stdout
    assert "n1: 1 entry evicted" in done.stdout
    assert done.exit_code == Exit.NOT_FOUND
    done = nodes["n1"].run("evict", "-w", "n[1,3]", "--quiet")
    assert (done.exit_code, done.output) == (0, "")


def test_off_on_nodes_reaches_each_with_its_reason_and_time(nodes: dict[str, Site]) -> None:
    done = nodes["n1"].run("off", "-w", "n[2-3]", "INC-42: it's slow", "--until", "6h")
    assert "n2: Staging is switched off on this node." in done.output
    assert "n[2-3]: Running jobs keep what they have" in done.output
    for name in ("n2", "n3"):
        assert nodes[name].places.kept_off.read_text().splitlines()[1] == "INC-42: it's slow"
    assert not nodes["n1"].places.kept_off.exists()
    done = nodes["n1"].run("on", "-w", "n[2-3]")
    assert "n[2-3]: Staging is on." in done.output


def test_verify_on_nodes_names_where_it_is_bad(nodes: dict[str, Site]) -> None:
    _, key = shared(nodes, "n1", "n2")
    copy = nodes["n2"].node.cache.image(key)
    copy.chmod(0o644)
    copy.write_bytes(b"squashfz")
    done = nodes["n1"].run("verify", "-w", "n[1-2]", "--all")
    rows = {row[0]: row for row in table(done.stdout)}
    assert (rows["n1"][4], rows["n2"][4]) == ("ok", "bad")
    assert done.exit_code == Exit.BAD
    assert nodes["n2"].keys() == set()


def test_explain_of_nodes_is_one_table_with_the_slowest_named(nodes: dict[str, Site]) -> None:
    for number, name in enumerate(("n1", "n2", "n3")):
        hit = Handled("hit", request="/a", image="/lustre/a", key="k", wait=1.0 + number)
        released = Event(NOW, "epilog", 7, Released("released"), node=name, total=0.1)
        append(nodes[name].places.events, [Event(NOW - 9, "prolog", 7, hit, node=name), released])
    done = nodes["n1"].run("explain", "7", "-w", "n[1-4]")
    assert table(done.stdout)[1] == [
        "n[1-3]",
        "prolog",
        "hit",
        "1s",
        "to",
        "3s",
        "(n3)",
        "/lustre/a",
    ]
    assert table(done.stdout)[2][:3] == ["n[1-3]", "epilog", "released"]
    assert "n4: nothing is recorded about job 7 on this node" in done.stdout
    assert done.exit_code == Exit.NOT_FOUND


def test_json_has_each_nodes_own_document(nodes: dict[str, Site]) -> None:
    _, key = shared(nodes, "n1")
    done = nodes["n1"].run("ls", "-w", "n[1-2,9]", "--json")
    first, second, third = json.loads(done.stdout)["nodes"]
    assert (first["node"], first["code"], first["answer"][0]["key"]) == ("n1", 0, key)
    assert second["answer"] == []
    assert (third["node"], third["code"]) == ("n9", None)
    assert "No route" in third["problem"]


def test_check_is_a_block_for_each_finding_with_its_nodes(nodes: dict[str, Site]) -> None:
    nodes["n2"].configure("sources: [/gone]\n")
    done = nodes["n1"].run("check", "-w", "n[1-3]")
    why = "slurm.conf cannot be read: it is in none of its usual places"
    assert f"\nn[1-3]: UNKNOWN slurm-conf: {why}\n  Without it" in done.stdout
    assert "\nn2: CRITICAL source-missing: the source /gone is not there\n  " in done.stdout
    assert re.search("\nn[^2]*: CRITICAL no-sources: no sources are configured\n  ", done.stdout)
    assert done.exit_code == 2


def test_show_and_path_are_said_of_each_node(nodes: dict[str, Site]) -> None:
    path, key = shared(nodes, "n1", "n2")
    done = nodes["n1"].run("show", "-w", "n[1-3]", key[:6])
    assert re.search(rf"^n1:\n  key +{key}\n", done.stdout, re.MULTILINE)
    assert f"n3: no entry has the key or path {key[:6]}" in done.stdout
    done = nodes["n1"].run("path", "-w", "n[2-3]", str(path))
    assert f"n2: {nodes['n2'].node.cache.image(key)}\n" in done.stdout
    assert f"n3: the cache does not hold {path}\n" in done.stdout


def test_pin_on_nodes_pins_there(nodes: dict[str, Site]) -> None:
    _, key = shared(nodes, "n1", "n2", "n3")
    done = nodes["n1"].run("pin", "-w", "n[2-3]", key)
    assert table(done.stdout)[1][:3] == ["n[2-3]", key[:12], "pinned"]
    files = {name: nodes[name].node.cache.entry_dir(key) / "pinned" for name in ("n1", "n2", "n3")}
    assert [name for name, file in files.items() if file.exists()] == ["n2", "n3"]
    done = nodes["n1"].run("unpin", "-w", "n3", key)
    assert table(done.stdout)[1][:4] == ["n3", key[:12], "not", "pinned"]


def test_setting_that_differs_is_a_row_of_its_own(nodes: dict[str, Site]) -> None:
    nodes["n3"].configure("max_copies: 9\n")
    rows = table(nodes["n1"].run("config", "-w", "n[1-3]").stdout)
    assert [row[0] for row in rows if row[1] == "max_copies"] == ["n[1-2]", "n3"]
    assert len([row for row in rows if row[1] == "engine"]) == 1


def test_sweep_on_nodes_is_a_sentence_for_each_thing_done(
    nodes: dict[str, Site], programs: Callable[..., Path]
) -> None:
    nodes["n2"].node.cache.prepare(False)
    done = nodes["n1"].run("sweep", "-w", "n[1-2]", "-n")
    assert done.stdout == "n[1-2]: 0 leases would be released, 0 kept.\n"


@pytest.mark.parametrize("word", ["a b", "a'b", 'a"b', "$(touch hurt)", "--all", "a%h", "a;b"])
def test_name_with_any_character_reaches_the_node_as_it_is(
    nodes: dict[str, Site], word: str
) -> None:
    path = nodes["n1"].image(word)
    nodes["n2"].publish(path)
    done = nodes["n1"].run("ls", "-w", "n2", str(path))
    assert done.exit_code == 0, done.stdout
    assert done.stdout.rstrip().endswith(str(path))


def test_name_without_a_directory_is_one_of_this_directory(
    nodes: dict[str, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key = shared(nodes, "n2")
    monkeypatch.chdir(path.parent)
    for word in (path.name, f"./{path.name}", key[:6]):
        assert nodes["n1"].run("ls", "-w", "n2", word).exit_code == 0, word


# --- the words, without a node


def test_srun_gets_a_bounded_job_on_each_node() -> None:
    order = Question(("n1",), ("ls", "--", "/a%b"), "srun", 90.0, options=("--account=lab",))
    line = fleet.command(order, "/bin/srun", "forestage-x")
    assert " --immediate=90 --time=2 --account=lab --nodelist=%h -- " in line
    assert line.endswith("forestage --answer ls -- /a%%b")


def test_srun_that_is_killed_leaves_no_job(site: Site, programs: Callable[..., Path]) -> None:
    # As a real one, srun ends once its job is cancelled.
    pids = '"$(dirname "$0")/pids"'
    asked = programs(srun=f"echo $$ >>{pids}; exec sleep 600", scancel=f"kill $(cat {pids})")
    done = site.run("ls", "-w", "n[1-2]", "--by", "srun", "--within", "1s")
    assert done.exit_code == Exit.UNREACHED
    assert "n[1-2]: no answer within 1s" in done.stdout
    lines = asked.read_text().splitlines()
    (name,) = {word for line in lines for word in line.split() if word.startswith("--job-name=")}
    assert lines[-1] == f"scancel --name={name.partition('=')[2]}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_command_that_is_ended_leaves_no_job_on_other_nodes(
    site: Site, programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked = programs(srun="", scancel="")
    monkeypatch.setattr(fleet, "_run", lambda worker, at_once: os.kill(os.getpid(), number))
    done = site.run("ls", "-w", "n1", "--by", "srun")
    assert done.exit_code == Exit.INTERRUPTED
    (cancelled,) = asked.read_text().splitlines()
    assert cancelled.startswith("scancel --name=forestage-")


SAID = '{"document": [], "pieces": [{"type": "Line", "text": "x"}]}'


@pytest.mark.parametrize(
    ("code", "out", "err", "expected"),
    [
        (0, f"Hello\n{SAID}\n", "", (True, 0, "")),
        (0, f"[motd] to {{all}}\n[\n{SAID}", "", (True, 0, "")),
        (7, SAID, "forestage: x\n", (True, 7, "")),
        (4, "", "forestage: no (run as root)\n", (False, 4, "no (run as root)")),
        (
            1,
            "",
            "srun: error: Unable to allocate\nsrun: more\n",
            (False, None, "Unable to allocate"),
        ),
        (127, "[not json", "", (False, None, "it ended with 127 and no answer")),
        (None, SAID, "", (False, None, "late")),
    ],
)
def test_reply_is_an_answer_a_message_or_none(
    code: int | None, out: str, err: str, expected: tuple[bool, int | None, str]
) -> None:
    found = fleet.reply("n1", code, out, err, "late")
    assert (found.answer is not None, found.code, found.problem) == expected


def test_answer_of_another_release_is_a_problem_of_its_node() -> None:
    replies = [fleet.reply("n2", 0, text, "", "") for text in ('[{"key": 1}]', '{"pieces": []}')]
    assert {one.answer for one in replies} == {None}
    assert all("n2: its answer cannot be understood" in str(fleet.pieces([one])) for one in replies)


def answered(node: str, *pieces: Piece) -> Reply:
    return Reply(node, 0, Said(msgspec.Raw(b"[]"), pieces))


def test_rows_that_differ_in_their_time_alone_are_one_with_its_span() -> None:
    columns = ("result", "took", "path")
    rows = {"a1": "2s", "a2": "0.5s", "a3": "1m10s", "a4": "-"}
    said = [answered(node, Table(columns, [("hit", took, "/x")])) for node, took in rows.items()]
    (table,) = fleet.pieces(said)
    assert isinstance(table, Table)
    assert list(table.rows) == [("a[1-4]", "hit", "0.5s to 1m10s (a3)", "/x")]


def test_column_that_says_nothing_on_any_node_is_left_out() -> None:
    said = [
        answered(node, Table(("a", "b", "c"), [("0", "-", c)]))
        for node, c in (("n1", "-"), ("n2", "7"))
    ]
    (table,) = fleet.pieces(said)
    assert isinstance(table, Table)
    assert (table.columns, list(table.rows)) == (("nodes", "c"), [("n1", "-"), ("n2", "7")])


def test_exit_code_is_the_worst_and_unreached_before_all() -> None:
    assert fleet.exit_code([Reply("a", 1), Reply("b", 7)], 11) == 7
    assert fleet.exit_code([Reply("a", None), Reply("b", 7)], 11) == 11
    assert fleet.exit_code([], 11) == 0
