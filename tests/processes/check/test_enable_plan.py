"""enable and disable: exact lines for the admin, our links, and no way to drain nodes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Site
from forestage.cache.node import Node
from forestage.check import enable_plan, plugstack_findings, slurm_site
from forestage.check.enable_plan import CacheDisk, LineChange, SlurmChangePlan
from forestage.commands.command_context import ExitStatus
from forestage.commands.enable import enable as command
from forestage.errors import Failed, SlurmConfChangeRefused
from forestage.paths import NodePaths
from forestage.system import mounts
from forestage.system.run import ProcessResult
from forestage.system.terminal import TextLine
from forestage.system.tree import RootedTree

CONF, STACK = "/etc/slurm/slurm.conf", "/etc/slurm/plugstack.conf"
PROLOG_D = "/etc/slurm/prolog.d"
PROLOG, EPILOG = str(NodePaths().prolog), str(NodePaths().epilog)
COMPANION = str(NodePaths().companion)
TEXT = "ClusterName=c  # ours\nPrologFlags=Alloc,DeferBatch\nNodeName=n[1-4] CPUs=8"
SLURM_CONF = f"--slurm-conf={CONF}"


class Slurm:
    """A node's Slurm configuration below a root of its own, with forestage installed."""

    def __init__(self, root: Path) -> None:
        self.places = NodePaths(root)
        self.files = RootedTree(root)
        self.conf = CONF
        for hook in (PROLOG, EPILOG):
            self.script(hook)
        self.write(CONF, TEXT)

    def at(self, path: str) -> Path:
        return self.files.host_path(path)

    def write(self, path: str, text: str) -> None:
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        self.at(path).write_text(text)

    def script(self, path: str, text: str = "#!/bin/sh\n") -> None:
        self.write(path, text)
        self.at(path).chmod(0o755)

    def link(self, path: str) -> None:
        self.at(path).symlink_to(self.at(PROLOG))

    def names(self) -> list[str]:
        return sorted(path.name for path in self.at(PROLOG_D).iterdir())

    def with_glob(self, pattern: str = "*", others: tuple[str, ...] = ("20-site",)) -> None:
        """Prolog= is a glob; the Epilog is ours already."""
        self.at(PROLOG_D).mkdir(exist_ok=True)
        for other in others:
            self.script(f"{PROLOG_D}/{other}")
        self.write(CONF, f"{TEXT}\nProlog={PROLOG_D}/{pattern}\nEpilog={EPILOG}\n")

    def to_enable(self) -> SlurmChangePlan:
        return enable_plan.plan_enable(self.files, slurm_site.read_site(self.files, self.conf))

    def to_disable(self) -> SlurmChangePlan:
        return enable_plan.plan_disable(slurm_site.read_site(self.files, self.conf))

    def enable(self) -> None:
        enable_plan.apply_plan(self.to_enable(), self.files)

    def disable(self) -> None:
        enable_plan.apply_plan(self.to_disable(), self.files)


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def added(file: str, text: str, place: str = "at the end") -> LineChange:
    return LineChange(file, "add", text, place)


def removed(file: str, text: str, place: str) -> LineChange:
    return LineChange(file, "remove", text, place)


# --- lines of slurm.conf


def test_enable_proposes_a_prolog_and_an_epilog_line_for_slurm_conf(slurm: Slurm) -> None:
    plan = slurm.to_enable()
    assert plan.lines == [added(CONF, f"Prolog={PROLOG}"), added(CONF, f"Epilog={EPILOG}")]
    assert (plan.refusals, plan.notes) == ([], [])


def test_enable_and_disable_never_edit_slurm_conf(slurm: Slurm) -> None:
    slurm.enable()
    slurm.disable()
    assert slurm.at(CONF).read_text() == TEXT
    assert not slurm.at(STACK).exists()


def test_existing_hook_lines_are_not_proposed_by_enable_and_are_removed_by_disable(
    slurm: Slurm,
) -> None:
    slurm.write(CONF, f"{TEXT}\nProlog={PROLOG}\nEpilog=\\\n{EPILOG}\n")
    assert slurm.to_enable().is_empty
    assert slurm.to_disable().lines == [
        removed(CONF, f"Prolog={PROLOG}", "line 4"),
        removed(CONF, f"Epilog={EPILOG}", "lines 5-6"),
    ]


def test_disable_names_the_included_file_that_has_the_hook_line(slurm: Slurm) -> None:
    slurm.write("/etc/slurm/hooks.conf", f"prolog = {PROLOG}\n")
    slurm.write(CONF, f"{TEXT}\nInclude hooks.conf\nEpilog={EPILOG}\n")
    assert slurm.to_enable().is_empty
    first = slurm.to_disable().lines[0]
    assert first == removed("/etc/slurm/hooks.conf", f"prolog = {PROLOG}", "line 1")


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        (CONF, "Include gone.conf\n", "gone.conf cannot be read: No such file or directory"),
        (CONF, "Include slurm.conf\n", "never end"),
        (STACK, "include plugstack.conf\n", "never end"),
        (CONF, f"Prolog={PROLOG} Epilog=/site\n", r"slurm\.conf:1 says more than one thing"),
    ],
)
def test_enable_fails_if_slurms_configuration_is_unreadable_or_ambiguous(
    slurm: Slurm, path: str, text: str, problem: str
) -> None:
    slurm.write(path, text)
    with pytest.raises(Failed, match=problem):
        slurm.to_enable()


def test_comment_or_other_setting_in_slurm_conf_does_not_count_as_a_hook_line(slurm: Slurm) -> None:
    slurm.write(
        CONF,
        "# Prolog=/site/old\nPrologSlurmctld=/site/ctld\n"
        "PrologFlags=Alloc # Epilog=/site/old \\\nClusterName=c\n",
    )
    plan = slurm.to_enable()
    assert [one.text for one in plan.lines] == [f"Prolog={PROLOG}", f"Epilog={EPILOG}"]
    assert any("DeferBatch" in note for note in plan.notes)


@pytest.mark.parametrize("folder", ["/run/slurm/conf", "/var/spool/slurmd/conf-cache"])
def test_enable_and_disable_note_that_the_node_is_configless(slurm: Slurm, folder: str) -> None:
    slurm.conf = f"{folder}/slurm.conf"
    slurm.write(slurm.conf, TEXT)
    for plan in (slurm.to_enable(), slurm.to_disable()):
        assert any("configless" in note for note in plan.notes)


# --- what would drain nodes


def with_prolog(slurm: Slurm, text: str) -> None:
    slurm.script("/site/prolog", f"#!/bin/sh\n{text}\n")
    slurm.write(CONF, f"{TEXT}\nProlog=/site/prolog\n")


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda slurm: slurm.at(EPILOG).unlink(), f"{EPILOG} is missing or cannot be"),
        (lambda slurm: slurm.at(EPILOG).chmod(0o644), f"{EPILOG} is missing or cannot be"),
        (lambda slurm: with_prolog(slurm, ""), "Prolog=/site/prolog is there already: run"),
        (lambda slurm: with_prolog(slurm, f"ls  # not {PROLOG}"), "is there already: run"),
        (lambda slurm: slurm.with_glob("site?"), "no name fits .*manually"),
        (lambda slurm: slurm.with_glob("*/run"), "not there: make it first"),
        (
            lambda slurm: slurm.write(CONF, f"{TEXT}\nProlog={PROLOG_D}-gone/*\n"),
            "not there: make it first",
        ),
        (
            lambda slurm: slurm.at(f"{PROLOG_D}/70-gone").symlink_to("nowhere"),
            "leads nowhere, which drains nodes: rm /etc/slurm/prolog.d/70-gone",
        ),
        (
            lambda slurm: slurm.write(f"{PROLOG_D}/README", "read me"),
            "can be executed, which drains nodes: chmod 0755 /etc/slurm/prolog.d/README",
        ),
    ],
)
def test_enable_refuses_changes_that_would_drain_nodes_or_replace_a_script(
    slurm: Slurm, harm: Callable[[Slurm], None], why: str
) -> None:
    slurm.with_glob()
    harm(slurm)
    with pytest.raises(SlurmConfChangeRefused, match=why):
        slurm.enable()
    assert "50-forestage" not in slurm.names()


def test_site_prolog_script_that_calls_the_hook_needs_no_line_and_is_noted_by_disable(
    slurm: Slurm,
) -> None:
    slurm.script("/site/prolog", f"#!/bin/sh\nmount /scratch\nexec {PROLOG}\n")
    slurm.write(CONF, f"{TEXT}\nProlog=/site/prolog\nEpilog={EPILOG}\n")
    assert slurm.to_enable().is_empty
    plan = slurm.to_disable()
    assert [one.text for one in plan.lines] == [f"Epilog={EPILOG}"]
    assert any("/site/prolog" in note for note in plan.notes)


@pytest.mark.parametrize("ours", ["50-all-forestage", "", "50-all-enroot"])
def test_site_prolog_script_that_runs_a_directory_with_the_hook_needs_no_line(
    slurm: Slurm, ours: str
) -> None:
    """As the prolog.sh of DeepOps. A directory of another kind is no sign."""
    run = "/etc/slurm/shared/bin/run-parts.sh"
    slurm.script("/etc/slurm/prolog.sh", f"PATH=/usr/bin\n{run} {PROLOG_D}\n")
    slurm.script("/usr/bin/forestage")
    slurm.at(PROLOG_D).mkdir()
    if ours:
        slurm.script(f"{PROLOG_D}/{ours}", "true\n")
    slurm.write(CONF, f"{TEXT}\nProlog=/etc/slurm/prolog.sh\nEpilog={EPILOG}\n")
    plan = slurm.to_enable()
    if ours == "50-all-forestage":
        assert plan.is_empty
    else:
        assert "Prolog=/etc/slurm/prolog.sh is there already" in plan.refusals[0]


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("*", "50-forestage"), ("*.sh", "50-forestage.sh"), ("[0-9]*", "50-forestage")],
)
def test_enable_makes_a_link_that_the_prolog_glob_matches_and_disable_removes_the_link(
    slurm: Slurm, pattern: str, name: str
) -> None:
    slurm.with_glob(pattern)
    slurm.enable()
    assert os.readlink(slurm.at(f"{PROLOG_D}/{name}")) == str(slurm.at(PROLOG))
    assert slurm.to_enable().is_empty
    slurm.script(f"{PROLOG_D}/20-site.sh")
    slurm.disable()
    assert name not in slurm.names()


def test_link_to_the_hook_by_another_name_is_recognized_and_removed_by_disable(
    slurm: Slurm,
) -> None:
    slurm.with_glob()
    slurm.link(f"{PROLOG_D}/05-images")
    assert slurm.to_enable().is_empty
    assert any("not seen from here" in note for note in slurm.to_disable().notes)
    slurm.disable()
    assert slurm.names() == ["20-site"]


def test_disable_refuses_to_leave_the_prolog_glob_without_a_match(slurm: Slurm) -> None:
    slurm.with_glob(others=())
    slurm.enable()
    with pytest.raises(SlurmConfChangeRefused, match="would match nothing"):
        slurm.disable()
    assert slurm.names() == ["50-forestage"]


def test_disable_keeps_the_hook_file_if_the_glob_matches_the_hook_itself(slurm: Slurm) -> None:
    slurm.write(CONF, f"{TEXT}\nProlog={PROLOG[:-1]}*\n")
    slurm.disable()
    assert slurm.at(PROLOG).exists()


def process(slurm: Slurm, number: int, name: str, parent: int, *environ: str, uid: int = 0) -> None:
    """As proc(5) shows one."""
    slurm.write(f"/proc/{number}/comm", f"{name}\n")
    slurm.write(f"/proc/{number}/status", f"Name:\t{name}\nUid:\t{uid}\t0\t0\t0\n")
    slurm.write(f"/proc/{number}/stat", f"{number} ({name}) S {parent} {number} 1{' 0' * 46}\n")
    slurm.write(f"/proc/{number}/environ", "".join(f"{one}\0" for one in environ))


@pytest.mark.parametrize("context", ["prolog_slurmd", "epilog_slurmd"])
def test_disable_is_refused_while_slurmd_may_have_listed_the_prolog_directory(
    slurm: Slurm, context: str
) -> None:
    """slurmd lists the directory, then looks for each script in turn; one that is gone drains."""
    slurm.with_glob()
    slurm.enable()
    process(slurm, 70, "slurmd", 1, "A=b")
    process(slurm, 71, "90-health) x", 70, "A=b", f"SLURM_SCRIPT_CONTEXT={context}")
    with pytest.raises(SlurmConfChangeRefused, match="may have listed the directory"):
        slurm.disable()
    assert "50-forestage" in slurm.names()


def test_process_that_only_resembles_a_prolog_does_not_block_disable(slurm: Slurm) -> None:
    """A copy that goes on after its Prolog, a user's variable: both may be there for ever."""
    slurm.with_glob()
    slurm.enable()
    prolog = "SLURM_SCRIPT_CONTEXT=prolog_slurmd"
    process(slurm, 1, "systemd", 0)
    process(slurm, 70, "slurmd", 1, "A=b")
    process(slurm, 71, "forestage-stage", 1, prolog)
    process(slurm, 72, "20-site", 70, "SLURM_SCRIPT_CONTEXT=prolog_task", f"X={prolog}")
    process(slurm, 74, "20-site", 70, prolog, uid=4242)
    process(slurm, 75, "slurmd", 1, "A=b", uid=4242)
    process(slurm, 76, "20-site", 75, prolog)
    slurm.at("/proc/73").mkdir()  # it has ended
    slurm.disable()
    assert "50-forestage" not in slurm.names()


# --- the companion


def test_enable_proposes_the_companion_line_before_pyxis(slurm: Slurm) -> None:
    slurm.write(COMPANION, "")
    slurm.write(STACK, "# site\ninclude plugstack.conf.d/*\n")
    slurm.write("/etc/slurm/plugstack.conf.d/pyxis.conf", "required /usr/lib/pyxis.so\n")
    plan = slurm.to_enable()
    place = "as the first line, before pyxis (/etc/slurm/plugstack.conf.d/pyxis.conf:1)"
    assert plan.lines[-1] == added(STACK, f"optional {COMPANION}", place)
    assert any("Login nodes" in note for note in plan.notes)


def test_enable_proposes_no_companion_line_if_the_companion_is_not_installed(slurm: Slurm) -> None:
    slurm.write(STACK, "required pyxis.so\n")
    assert {one.file for one in slurm.to_enable().lines} == {CONF}


def test_companion_line_is_proposed_for_the_file_that_plugstackconfig_names(slurm: Slurm) -> None:
    slurm.write(COMPANION, "")
    slurm.write(CONF, f"{TEXT}\nPlugStackConfig=/opt/stack.conf\n")
    last = slurm.to_enable().lines[-1]
    assert last == added("/opt/stack.conf", f"optional {COMPANION}", "as the first line")


def test_enable_notes_to_move_the_companion_line_before_pyxis(slurm: Slurm) -> None:
    slurm.write(COMPANION, "")
    slurm.write(STACK, f"required pyxis.so\noptional {COMPANION} timeout=60\n")
    move = f"{STACK}: `optional {COMPANION} timeout=60` before the line of pyxis.so ({STACK}:1)"
    assert any(move in note for note in slurm.to_enable().notes)
    line = removed(STACK, f"optional {COMPANION} timeout=60", "line 2")
    assert slurm.to_disable().lines == [line]


def test_enable_proposes_an_include_by_slurm_release_for_a_packaged_companion(slurm: Slurm) -> None:
    """So that hosts without it, or with that of another release, read the line without a word."""
    slurm.write(COMPANION, "")
    slurm.write(f"{COMPANION}.release", "24.11.5\n")
    own = slurm_site.COMPANION_CONF.format("24.11")
    slurm.write(own, f"optional {COMPANION}\n")
    slurm.write(STACK, "required pyxis.so\n")
    plan = slurm.to_enable()
    line = f"include {slurm_site.COMPANION_CONF.format('24.11*')}"
    assert plan.lines[-1] == added(STACK, line, f"as the first line, before pyxis ({STACK}:1)")
    assert plan.notes == [], "login nodes need nothing"
    (end,) = (
        one.text
        for one in enable_plan.format_plan(plan, False, True)[-1:]
        if isinstance(one, TextLine)
    )
    assert enable_plan.RESTART_COMMAND in end, "slurmd loads a new plugin only when it starts"
    slurm.write(STACK, f"{line}\nrequired pyxis.so\n")
    assert {one.file for one in slurm.to_enable().lines} == {CONF}
    slurm.write(STACK, f"required pyxis.so\n{line}\n")
    assert any(f"{STACK}: `{line}` before the line of" in note for note in slurm.to_enable().notes)


def test_enable_notes_a_companion_of_another_slurm_release_in_the_words_of_check(
    slurm: Slurm,
) -> None:
    slurm.write(COMPANION, "")
    slurm.write(f"{COMPANION}.release", "24.11.5\n")
    slurm.write(STACK, f"required {COMPANION}\n")
    slurm.script("/usr/sbin/slurmd", "#!/bin/sh\necho slurm 22.05.8\n")
    (note,) = (one for one in slurm.to_enable().notes if "24.11" in one)
    (found,) = (
        one
        for one in plugstack_findings.list_stack_findings(
            slurm.files, slurm_site.read_site(slurm.files, CONF)
        )
        if one.id == "companion-release"
    )
    assert note == f"{found.what}. {found.why}. Change: {found.change}"


def test_enable_keeps_the_companion_include_of_another_release_and_disable_removes_both(
    slurm: Slurm,
) -> None:
    """While nodes are upgraded one after the other, each reads its own."""
    slurm.write(COMPANION, "")
    slurm.write(f"{COMPANION}.release", "24.11.5\n")
    slurm.write(slurm_site.COMPANION_CONF.format("24.11"), f"optional {COMPANION}\n")
    old = f"include {slurm_site.COMPANION_CONF.format('22.05*')}"
    slurm.write(STACK, f"{old}\n")
    line = f"include {slurm_site.COMPANION_CONF.format('24.11*')}"
    assert slurm.to_enable().lines[-1] == added(STACK, line, "as the first line")
    slurm.write(STACK, f"{line}\n{old}\n")
    assert slurm.to_disable().lines == [
        removed(STACK, line, "line 1"),
        removed(STACK, old, "line 2"),
    ]


def test_enable_proposes_no_prolog_flag_that_keeps_an_old_slurm_from_starting(slurm: Slurm) -> None:
    slurm.write(CONF, "ClusterName=c\nPrologFlags=Alloc\n")
    assert any("DeferBatch" in note for note in slurm.to_enable().notes)
    slurm.script("/usr/sbin/slurmd", "#!/bin/sh\necho slurm-wlm 21.08.5\n")
    assert not any("DeferBatch" in note for note in slurm.to_enable().notes)


def test_relative_include_in_plugstack_conf_is_resolved_beside_its_file(slurm: Slurm) -> None:
    slurm.write(STACK, "include plug*.d\n")
    slurm.write("/etc/slurm/plug.d", f"optional {COMPANION}\n")
    stack = slurm_site.read_site(slurm.files, CONF).stack
    assert [plugin.path for plugin in stack.plugins] == [COMPANION]


# --- the commands


def run(tmp_path: Path, *words: str, code: int = ExitStatus.OK) -> str:
    done = Site(tmp_path).run(*words, SLURM_CONF)
    assert done.exit_code == code, done.output
    return done.stdout


def test_enable_prints_the_lines_to_copy_and_the_reconfigure_command(
    slurm: Slurm, tmp_path: Path
) -> None:
    slurm.write(COMPANION, "")
    printed = run(tmp_path, "enable").splitlines()
    at = printed.index(f"Add to {CONF}, at the end:")
    assert printed[at + 1 : at + 3] == [f"  Prolog={PROLOG}", f"  Epilog={EPILOG}"]
    assert printed[at + 3 : at + 5] == [
        f"Add to {STACK}, as the first line:",
        f"  optional {COMPANION}",
    ]
    assert "scontrol reconfigure, and on each node systemctl restart slurmd" in printed[-1]
    assert slurm.at(CONF).read_text() == TEXT


def test_enable_makes_the_link_only_with_yes(slurm: Slurm, tmp_path: Path) -> None:
    slurm.with_glob()
    assert "add --yes" in run(tmp_path, "enable")
    assert slurm.names() == ["20-site"]
    printed = run(tmp_path, "enable", "--yes")
    assert f"+ {PROLOG_D}/50-forestage -> {PROLOG}" in printed
    assert "scontrol" not in printed, "slurmd looks into the directory at each job"
    assert slurm.names() == ["20-site", "50-forestage"]


def test_enable_makes_the_configuration_directory_unlistable_only_with_yes(
    slurm: Slurm, tmp_path: Path
) -> None:
    slurm.with_glob()
    etc = slurm.at("/etc/forestage")
    etc.mkdir(exist_ok=True, parents=True)
    etc.chmod(0o755)
    run(tmp_path, "enable")
    assert etc.stat().st_mode & 0o7777 == 0o755
    run(tmp_path, "enable", "--yes")
    assert etc.stat().st_mode & 0o7777 == 0o711


class Systemctl:
    """What is asked of systemd, whose links are made and removed below a node's root."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        self.asked: list[str] = []
        self.masked: set[str] = set()
        slurm.at("/run/systemd/system").mkdir(parents=True)

    def __call__(self, argv: list[str], **how: object) -> ProcessResult:
        program, *words = argv
        assert program == "systemctl"
        self.asked.append(" ".join(words))
        unit = words[-1]
        if unit in self.masked:
            return ProcessResult(tuple(argv), 1, "", f"Unit {unit} is masked")
        link = WANTED[unit]
        if words[0] == "enable":
            self.slurm.write(link, "")
        else:
            self.slurm.at(link).unlink()
        return ProcessResult(tuple(argv), 0, "", "")


TIMER, PEER = "forestage.timer", "forestage-peer.service"
WANTED = {
    TIMER: f"/etc/systemd/system/timers.target.wants/{TIMER}",
    PEER: f"/etc/systemd/system/multi-user.target.wants/{PEER}",
}


@pytest.fixture
def systemctl(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Systemctl:
    made = Systemctl(slurm)
    monkeypatch.setattr("forestage.system.run.run_program", made)
    return made


def test_enable_starts_the_units_only_with_yes(
    slurm: Slurm, tmp_path: Path, systemctl: Systemctl
) -> None:
    node = Site(tmp_path)
    assert f"systemctl enable --now {TIMER} {PEER} (" in node.run("enable", SLURM_CONF).stdout
    assert systemctl.asked == []
    printed = node.run("enable", "--yes", SLURM_CONF).stdout
    assert systemctl.asked == [f"enable --now {TIMER}", f"enable --now {PEER}"]
    assert printed.endswith(f"{TIMER} is on.\n{PEER} is on.\n")
    assert "systemctl enable" not in node.run("enable", SLURM_CONF).stdout


def test_enable_does_not_propose_a_unit_that_is_already_enabled(
    slurm: Slurm, tmp_path: Path, systemctl: Systemctl
) -> None:
    slurm.write(WANTED[PEER], "")
    assert f"enable --now {TIMER} (" in Site(tmp_path).run("enable", SLURM_CONF).stdout


def test_enable_starts_other_units_though_one_unit_is_masked(
    slurm: Slurm, tmp_path: Path, systemctl: Systemctl
) -> None:
    systemctl.masked = {TIMER}
    printed = Site(tmp_path).run("enable", "--yes", SLURM_CONF).stdout
    assert f"{TIMER} is not on: " in printed
    assert f"Unit {TIMER} is masked" in printed
    assert f"{PEER} is on." in printed


@pytest.mark.parametrize(
    "text", ["peers: {enabled: false}\n", "engine: rsync\n", "no-such-key: 1\n"]
)
def test_enable_starts_no_peer_service_if_peers_are_unused_or_the_configuration_is_broken(
    slurm: Slurm, tmp_path: Path, systemctl: Systemctl, text: str
) -> None:
    node = Site(tmp_path, text)
    assert PEER not in node.run("enable", SLURM_CONF).stdout
    node.run("enable", "--yes", SLURM_CONF)
    assert systemctl.asked == [f"enable --now {TIMER}"]


def test_disable_stops_the_peer_service_but_not_the_timer(
    slurm: Slurm, tmp_path: Path, systemctl: Systemctl
) -> None:
    node = Site(tmp_path)
    assert "systemctl" not in node.run("disable", SLURM_CONF).stdout
    node.run("enable", "--yes", SLURM_CONF)
    systemctl.asked.clear()
    assert f"systemctl disable --now {PEER} (" in node.run("disable", SLURM_CONF).stdout
    assert systemctl.asked == []
    assert f"{PEER} is off." in node.run("disable", "--yes", SLURM_CONF).stdout
    assert systemctl.asked == [f"disable --now {PEER}"]
    assert "systemctl" not in node.run("disable", SLURM_CONF).stdout


def test_peer_service_is_not_stopped_if_disable_is_refused(
    slurm: Slurm, tmp_path: Path, systemctl: Systemctl
) -> None:
    slurm.write(WANTED[PEER], "")
    slurm.with_glob(others=())
    slurm.link(f"{PROLOG_D}/50-forestage")
    done = Site(tmp_path).run("disable", "--yes", SLURM_CONF)
    assert (done.exit_code, systemctl.asked) == (ExitStatus.REFUSED, [])


def test_enable_with_json_reports_the_started_units_on_stderr(
    slurm: Slurm, tmp_path: Path, systemctl: Systemctl
) -> None:
    node = Site(tmp_path)
    done = node.run("enable", "--yes", "--json", SLURM_CONF)
    assert json.loads(done.stdout)["done"]
    assert f"{PEER} is on." in done.stderr


@pytest.mark.parametrize("command", ["enable", "disable"])
def test_enable_and_disable_name_no_unit_where_systemd_does_not_run(
    slurm: Slurm, tmp_path: Path, systemctl: Systemctl, command: str
) -> None:
    slurm.at("/run/systemd/system").rmdir()
    slurm.write(WANTED[PEER], "")
    assert "systemctl" not in Site(tmp_path).run(command, SLURM_CONF).stdout
    Site(tmp_path).run(command, "--yes", SLURM_CONF)
    assert systemctl.asked == []


def test_refused_enable_exits_with_refused_and_lists_the_refusal_in_json(
    slurm: Slurm, tmp_path: Path
) -> None:
    slurm.script("/site/prolog")
    slurm.write(CONF, "Prolog=/site/prolog\n")
    printed = run(tmp_path, "enable", "--yes", "--json", code=ExitStatus.REFUSED)
    document = json.loads(printed)
    assert document["done"] is False
    assert "Prolog=/site/prolog" in document["refusals"][0]
    line = {"file": CONF, "action": "add", "text": f"Epilog={EPILOG}", "place": "at the end"}
    assert document["lines"] == [line]


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_non_utf8_byte_in_slurm_conf_is_printed_escaped(
    slurm: Slurm, tmp_path: Path, how: tuple[str, ...]
) -> None:
    site_own = os.fsdecode(b"/site/f\374r")
    slurm.script(site_own)
    slurm.at(CONF).write_bytes(os.fsencode(f"Prolog={PROLOG}\nEpilog={site_own}\n"))
    printed = run(tmp_path, "enable", *how, code=ExitStatus.REFUSED)
    escaped = "f\\\\udcfcr" if how else "f\\udcfcr"
    assert f"Epilog=/site/{escaped} is there already" in printed
    assert "\udcfc" not in printed


def test_enable_with_a_missing_slurm_conf_is_a_usage_error(tmp_path: Path) -> None:
    done = Site(tmp_path).run("enable", "--slurm-conf=/nope")
    assert done.exit_code == ExitStatus.USAGE


def test_default_of_the_slurm_conf_option_is_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (option,) = [one for one in command.params if one.name == "slurm_conf"]
    assert callable(option.default)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert option.default() == CONF
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm/etc/slurm.conf")
    assert option.default() == "/opt/slurm/etc/slurm.conf"


# --- nodes with a disk


NVME = CacheDisk("/mnt/nvme", mib=3_400_000, for_jobs=1660)


def of_disk(slurm: Slurm) -> list[LineChange]:
    plan = enable_plan.plan_enable(slurm.files, slurm_site.read_site(slurm.files, slurm.conf), NVME)
    assert plan.lines == slurm.to_enable().lines
    return plan.disk


def test_enable_prints_optional_slurm_lines_for_the_caches_disk(
    slurm: Slurm,
) -> None:
    assert of_disk(slurm) == [
        added(CONF, "TmpFS=/mnt/nvme"),
        added(CONF, "GresTypes=nvme"),
        added(
            "/etc/slurm/gres.conf",
            "NodeName=NODES Name=nvme Count=1660 Flags=CountOnly",
            "NODES: those with this disk",
        ),
        added(CONF, "Feature=nvme TmpDisk=3400000 Gres=nvme:1660", "to their NodeName= lines"),
    ]
    slurm.write(CONF, f"{TEXT}\nProlog={PROLOG}\nEpilog={EPILOG}\n")
    plan = enable_plan.plan_enable(slurm.files, slurm_site.read_site(slurm.files, slurm.conf), NVME)
    assert plan.is_empty
    said = [
        one.text for one in enable_plan.format_plan(plan, False, True) if isinstance(one, TextLine)
    ]
    assert "There is nothing to change." in said
    assert "Feature=nvme TmpDisk=3400000 Gres=nvme:1660" in said


def test_proposed_gres_types_line_keeps_the_types_already_there(slurm: Slurm) -> None:
    slurm.write(CONF, f"{TEXT}\nGresTypes=gpu,shard\n")
    assert added(CONF, "GresTypes=gpu,shard,nvme") in of_disk(slurm)


@pytest.mark.parametrize("own", ["TmpFS=/scratch", "GresTypes=gpu,nvme"])
def test_enable_prints_no_disk_lines_if_slurm_conf_already_names_its_disks(
    slurm: Slurm, own: str
) -> None:
    slurm.write(CONF, f"{TEXT}\n{own}\n")
    assert of_disk(slurm) == []


def test_disk_without_room_for_jobs_gets_no_gres_line(slurm: Slurm) -> None:
    small = CacheDisk("/mnt/nvme", mib=900, for_jobs=0)
    found = enable_plan.plan_enable(
        slurm.files, slurm_site.read_site(slurm.files, slurm.conf), small
    ).disk
    assert [one.text for one in found] == ["TmpFS=/mnt/nvme", "Feature=nvme TmpDisk=900"]


def test_find_cache_disk_finds_the_mount_below_the_cache_directory(
    staging_node: Node, tmp_path: Path
) -> None:
    shutil.rmtree(staging_node.cache.root)
    assert enable_plan.find_cache_disk(staging_node) is None
    staging_node.cache.prepare(False)
    found, under = (
        enable_plan.find_cache_disk(staging_node),
        mounts.find_mount_of_path(mounts.list_mounts(), str(tmp_path)),
    )
    assert under is not None
    if under.point == "/":
        assert found is None
    else:
        assert found is not None
        assert found.mounted_at == under.point
        facts = os.statvfs(tmp_path)
        assert found.mib == facts.f_blocks * facts.f_frsize >> 20
