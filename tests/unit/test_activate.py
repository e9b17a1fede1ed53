"""enable and disable: what would drain nodes is refused; what is not ours stays as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from commands import Site
from forestage import activate, activation, edits
from forestage.activate import Plan
from forestage.cli.exits import Exit
from forestage.cli.site import enable
from forestage.errors import Failed, RefusedError
from forestage.paths import Places
from forestage.system.run import Ran

# What admins write: a comment at the end, other settings, no line's end at the file's.
CONF = "ClusterName=c  # ours\nPrologFlags=Alloc,DeferBatch\nNodeName=n[1-4] CPUs=8"


class Slurm:
    """A node's Slurm configuration below a root of its own, with forestage installed."""

    def __init__(self, root: Path) -> None:
        self.places = Places(root)
        self.conf = root / "slurm/slurm.conf"
        self.stack = root / "slurm/plugstack.conf"
        self.prolog_d = root / "slurm/prolog.d"
        self.conf.parent.mkdir(parents=True)
        self.places.prolog.parent.mkdir(parents=True)
        for hook in (self.places.prolog, self.places.epilog):
            hook.write_text("#!/bin/sh\n")
            hook.chmod(0o755)
        self.write(CONF)

    def write(self, text: str) -> None:
        self.conf.write_text(text)

    def with_glob(self, pattern: str = "*", others: tuple[str, ...] = ("20-site",)) -> str:
        """Prolog= is a pattern; the Epilog is ours already."""
        self.prolog_d.mkdir()
        for other in others:
            (self.prolog_d / other).write_text("#!/bin/sh\n")
        text = f"{CONF}\nProlog={self.prolog_d}/{pattern}\nEpilog={self.places.epilog}\n"
        self.write(text)
        return text

    def build_companion(self) -> str:
        self.places.companion.parent.mkdir(parents=True)
        self.places.companion.touch()
        return f"optional {self.places.companion}"

    def site(self) -> activation.Site:
        return activation.gather(self.places, self.conf)

    def to_enable(self) -> Plan:
        return activate.to_enable(self.site())

    def to_disable(self) -> Plan:
        return activate.to_disable(self.site())

    def enable(self) -> None:
        activate.apply(self.to_enable(), self.places)

    def disable(self) -> None:
        activate.apply(self.to_disable(), self.places)


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


# --- a slurm.conf without hooks


def test_lines_come_at_the_end_and_go_again_without_a_trace_but_the_missing_newline(
    slurm: Slurm,
) -> None:
    slurm.enable()
    lines = slurm.conf.read_text().split("\n")
    assert "\n".join(lines[:3]) == CONF
    assert lines[3:] == [
        f"Prolog={slurm.places.prolog}",
        f"Epilog={slurm.places.epilog}",
        "",
    ]
    slurm.disable()
    assert slurm.conf.read_text() == f"{CONF}\n"


def test_enabled_twice_is_enabled_once(slurm: Slurm) -> None:
    slurm.enable()
    before = slurm.conf.read_text()
    assert slurm.to_enable().empty
    slurm.enable()
    assert slurm.conf.read_text() == before


@pytest.mark.parametrize("end", ["\\", "\\\n", "\\ \n", "\\ # x\n", "\\\r\n"])
def test_an_unfinished_last_line_does_not_swallow_ours(slurm: Slurm, end: str) -> None:
    slurm.write(f"ClusterName=c\nNodeName=n1 {end}")
    slurm.enable()
    (found,) = slurm.site().named("prolog")
    assert found.value == str(slurm.places.prolog)
    assert slurm.to_enable().empty


def test_owner_mode_and_link_of_the_file_stay(slurm: Slurm, tmp_path: Path) -> None:
    real = tmp_path / "shared.conf"
    slurm.conf.rename(real)
    real.chmod(0o640)
    slurm.conf.symlink_to(real)
    slurm.enable()
    assert slurm.conf.is_symlink()
    assert real.stat().st_mode & 0o7777 == 0o640
    assert "Prolog=" in real.read_text()
    slurm.disable()
    assert real.read_text() == f"{CONF}\n"


def test_a_setting_in_an_included_file_is_seen_and_changed_there(slurm: Slurm) -> None:
    extra = slurm.conf.parent / "hooks.conf"
    extra.write_text(f"prolog = {slurm.places.prolog}\n")
    slurm.write(f"{CONF}\nInclude hooks.conf\nEpilog={slurm.places.epilog}\n")
    assert slurm.to_enable().empty
    slurm.disable()
    assert extra.read_text() == ""
    assert slurm.conf.read_text() == f"{CONF}\nInclude hooks.conf\n"


@pytest.mark.parametrize(
    ("name", "line", "problem"),
    [
        ("slurm.conf", "Include gone.conf\n", "gone.conf is included, but is not there"),
        ("slurm.conf", "Include slurm.conf\n", "never end"),
        ("plugstack.conf", "include plugstack.conf\n", "never end"),
    ],
)
def test_what_is_included_but_cannot_be_read_is_not_guessed(
    slurm: Slurm, name: str, line: str, problem: str
) -> None:
    (slurm.conf.parent / name).write_text(line)
    with pytest.raises(Failed, match=problem):
        slurm.site()


def test_a_comment_or_another_setting_is_no_hook(slurm: Slurm) -> None:
    slurm.write(
        "# Prolog=/site/old\nPrologSlurmctld=/site/ctld\n"
        "PrologFlags=Alloc # Epilog=/site/old \\\nClusterName=c\n"
    )
    plan = slurm.to_enable()
    assert plan.refusals == ()
    assert [edit.added for edit in plan.edits] == [
        (f"Prolog={slurm.places.prolog}", f"Epilog={slurm.places.epilog}")
    ]
    assert any("DeferBatch" in note for note in plan.notes)


# --- what would drain nodes


@pytest.mark.parametrize("harm", ["gone", "not executable"])
def test_a_hook_that_cannot_be_run_is_never_named(slurm: Slurm, harm: str) -> None:
    if harm == "gone":
        slurm.places.epilog.unlink()
    else:
        slurm.places.epilog.chmod(0o644)
    before = slurm.conf.read_text()
    with pytest.raises(RefusedError, match="missing or cannot be run"):
        slurm.enable()
    assert slurm.conf.read_text() == before


def test_the_sites_own_prolog_is_not_replaced(slurm: Slurm) -> None:
    text = f"{CONF}\nProlog=/site/prolog\n"
    slurm.write(text)
    with pytest.raises(RefusedError, match="Prolog=/site/prolog is there already"):
        slurm.enable()
    assert slurm.conf.read_text() == text, "not half of it either"


def test_a_site_that_calls_us_is_left_as_it_is(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "site-prolog"
    script.write_text(f"#!/bin/sh\nmount /scratch\nexec {slurm.places.prolog}\n")
    text = f"{CONF}\nProlog={script}\nEpilog={slurm.places.epilog}\n"
    slurm.write(text)
    assert slurm.to_enable().empty
    plan = slurm.to_disable()
    assert any(str(script) in note for note in plan.notes)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("*", "50-forestage"), ("*.sh", "50-forestage.sh"), ("[0-9]*", "50-forestage")],
)
def test_a_pattern_gets_a_link_that_it_matches(slurm: Slurm, pattern: str, name: str) -> None:
    text = slurm.with_glob(pattern)
    slurm.enable()
    assert (slurm.prolog_d / name).resolve() == slurm.places.prolog.resolve()
    assert slurm.conf.read_text() == text
    assert slurm.to_enable().empty
    (slurm.prolog_d / "20-site.sh").touch()
    slurm.disable()
    assert not (slurm.prolog_d / name).is_symlink()


@pytest.mark.parametrize("pattern", ["site?", "*/run"])
def test_a_pattern_that_no_name_of_ours_fits_is_refused(slurm: Slurm, pattern: str) -> None:
    slurm.with_glob(pattern)
    with pytest.raises(RefusedError, match="by hand"):
        slurm.enable()


def test_a_link_by_another_name_is_ours_too(slurm: Slurm) -> None:
    slurm.with_glob()
    (slurm.prolog_d / "05-images").symlink_to(slurm.places.prolog)
    assert slurm.to_enable().empty
    slurm.disable()
    assert [path.name for path in slurm.prolog_d.iterdir()] == ["20-site"]


def test_a_pattern_is_never_left_without_a_match(slurm: Slurm) -> None:
    text = slurm.with_glob(others=())
    slurm.enable()
    with pytest.raises(RefusedError, match="would match nothing"):
        slurm.disable()
    assert (slurm.prolog_d / "50-forestage").is_symlink()
    assert slurm.conf.read_text() == text


PROLOG = "SLURM_SCRIPT_CONTEXT=prolog_slurmd"


def process(slurm: Slurm, number: int, name: str, parent: int, *environ: str) -> None:
    """As proc(5) shows one."""
    there = slurm.places.root / f"proc/{number}"
    there.mkdir(parents=True)
    (there / "comm").write_text(f"{name}\n")
    (there / "stat").write_text(f"{number} ({name}) S {parent} {number} 1 0 -1\n")
    (there / "environ").write_bytes("".join(f"{one}\0" for one in environ).encode())


@pytest.mark.parametrize("context", ["prolog_slurmd", "epilog_slurmd"])
def test_no_link_goes_while_slurmd_may_have_listed_it(slurm: Slurm, context: str) -> None:
    """slurmd lists the directory, then looks for each script in turn; one that is gone drains."""
    slurm.with_glob()
    slurm.enable()
    process(slurm, 70, "slurmd", 1, "A=b")
    process(slurm, 71, "90-health) x", 70, "A=b", f"SLURM_SCRIPT_CONTEXT={context}")
    with pytest.raises(RefusedError, match="may have listed the directory"):
        slurm.disable()
    assert (slurm.prolog_d / "50-forestage").is_symlink()
    assert f"Epilog={slurm.places.epilog}" in slurm.conf.read_text(), "not half of it either"


def test_what_only_looks_like_a_prolog_keeps_no_link(slurm: Slurm) -> None:
    """A copy that goes on after its Prolog, a user's variable: both may be there for ever."""
    slurm.with_glob()
    slurm.enable()
    process(slurm, 1, "systemd", 0)
    process(slurm, 70, "slurmd", 1, "A=b")
    process(slurm, 71, "forestage-stage", 1, PROLOG)
    process(slurm, 72, "20-site", 70, "SLURM_SCRIPT_CONTEXT=prolog_task", f"X={PROLOG}")
    (slurm.places.root / "proc/73").mkdir()  # it has ended
    slurm.disable()
    assert not (slurm.prolog_d / "50-forestage").is_symlink()


def test_lines_alone_go_while_a_prolog_runs(slurm: Slurm) -> None:
    slurm.enable()
    process(slurm, 70, "slurmd", 1)
    process(slurm, 71, "prolog", 70, PROLOG)
    slurm.disable()
    assert slurm.conf.read_text() == f"{CONF}\n"


def test_nodes_that_share_the_directory_are_told_of(slurm: Slurm) -> None:
    slurm.with_glob()
    slurm.enable()
    assert any("not seen from here" in note for note in slurm.to_disable().notes)


def test_a_comment_that_names_our_hook_does_not_call_it(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "site-prolog"
    script.write_text(
        f"#!/bin/sh\n# {slurm.places.prolog}\nmount /s  # not {slurm.places.prolog}\n"
    )
    slurm.write(f"{CONF}\nProlog={script}\n")
    with pytest.raises(RefusedError, match="is there already: run"):
        slurm.enable()


@pytest.mark.parametrize("step", ["write", "symlink"])
def test_what_cannot_be_done_to_its_end_is_taken_back(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A file of its own that is a mount point, a directory that is read-only."""
    slurm.build_companion()
    text = slurm.with_glob()
    text = text.replace(f"Epilog={slurm.places.epilog}\n", "")
    slurm.write(text)
    written = []
    write = edits.write

    def fail(*_: object) -> None:
        raise OSError(16, "busy")

    def second_fails(edit: edits.Edit) -> None:
        written.append(edit.path)
        if len(written) == 2:
            fail()
        write(edit)

    if step == "write":
        monkeypatch.setattr(edits, "write", second_fails)
    else:
        monkeypatch.setattr(Path, "symlink_to", fail)
    with pytest.raises(OSError, match="busy"):
        slurm.enable()
    assert slurm.conf.read_text() == text
    assert not slurm.stack.exists()
    assert not (slurm.prolog_d / "50-forestage").is_symlink()


def test_the_file_is_never_there_with_another_owner(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0640 root:slurm: as root:root slurmctld could not read it for a moment."""
    given = []
    monkeypatch.setattr(os, "chown", lambda *_: pytest.fail("after it was replaced"))
    monkeypatch.setattr(os, "fchown", lambda fd, *owner: given.append(owner))
    slurm.enable()
    assert given == [(slurm.conf.stat().st_uid, slurm.conf.stat().st_gid)]


def test_a_line_that_says_more_is_left_to_its_writer(slurm: Slurm) -> None:
    text = f"{CONF}\nProlog={slurm.places.prolog} Epilog=/site/epilog\n"
    slurm.write(text)
    with pytest.raises(Failed, match=r"slurm\.conf:\d+ says more than one thing"):
        slurm.disable()
    assert slurm.conf.read_text() == text


@pytest.mark.parametrize("folder", ["run/slurm/conf", "var/spool/slurmd/conf-cache"])
def test_slurmds_own_copy_of_a_configuration_is_not_changed(slurm: Slurm, folder: str) -> None:
    cached = slurm.places.root / folder / "slurm.conf"
    cached.parent.mkdir(parents=True)
    slurm.conf.rename(cached)
    slurm.conf = cached
    with pytest.raises(RefusedError, match="configless"):
        slurm.enable()


def test_a_file_that_changes_meanwhile_is_not_overwritten(slurm: Slurm) -> None:
    plan = slurm.to_enable()
    slurm.write(f"{CONF}\nDebugFlags=Script\n")
    with pytest.raises(Failed, match="changed just now"):
        activate.apply(plan, slurm.places)
    assert slurm.conf.read_text() == f"{CONF}\nDebugFlags=Script\n"


# --- the companion


def test_the_companion_comes_before_pyxis(slurm: Slurm) -> None:
    line = slurm.build_companion()
    slurm.stack.write_text("# site\ninclude plugstack.conf.d/*\n")
    (slurm.stack.parent / "plugstack.conf.d").mkdir()
    pyxis = slurm.stack.parent / "plugstack.conf.d/pyxis.conf"
    pyxis.write_text("required /usr/lib/pyxis.so\n")
    slurm.enable()
    assert slurm.stack.read_text() == f"{line}\n# site\ninclude plugstack.conf.d/*\n"
    assert [plugin.path for plugin in slurm.site().plugins][1] == "/usr/lib/pyxis.so"
    slurm.disable()
    assert slurm.stack.read_text() == "# site\ninclude plugstack.conf.d/*\n"


def test_files_beside_a_relative_slurm_conf_are_found(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(slurm.conf.parent)
    slurm.stack.write_text("include plug*.d\n")
    slurm.stack.with_name("plug.d").write_text(f"{slurm.build_companion()}\n")
    slurm.conf = Path("slurm.conf")
    assert [plugin.path for plugin in slurm.site().plugins] == [str(slurm.places.companion)]


def test_a_companion_that_is_not_built_is_not_loaded(slurm: Slurm) -> None:
    slurm.enable()
    assert not slurm.stack.exists()


def test_a_site_without_plugins_gets_a_file_that_users_can_read(slurm: Slurm) -> None:
    line = slurm.build_companion()
    slurm.enable()
    assert slurm.stack.read_text() == f"{line}\n"
    assert slurm.stack.stat().st_mode & 0o7777 == 0o644, "srun reads it as the user"


def test_the_file_that_plug_stack_config_names_is_the_one(slurm: Slurm, tmp_path: Path) -> None:
    line = slurm.build_companion()
    slurm.write(f"{CONF}\nPlugStackConfig={tmp_path}/other.conf\n")
    slurm.enable()
    assert (tmp_path / "other.conf").read_text() == f"{line}\n"


def test_pyxis_before_the_companion_is_told(slurm: Slurm) -> None:
    line = slurm.build_companion()
    slurm.stack.write_text(f"required pyxis.so\n{line} timeout=60\n")
    assert any("pyxis comes before" in note for note in slurm.to_enable().notes)
    slurm.disable()
    assert slurm.stack.read_text() == "required pyxis.so\n"


# --- the commands


def run(slurm: Slurm, tmp_path: Path, *words: str, code: int = Exit.OK) -> str:
    site = Site(tmp_path)
    done = site.run(*words, f"--slurm-conf={slurm.conf}")
    assert done.exit_code == code, done.output
    return done.stdout


def test_without_yes_it_is_only_told(slurm: Slurm, tmp_path: Path) -> None:
    told = run(slurm, tmp_path, "enable")
    assert f"+ Prolog={slurm.places.prolog}" in told
    assert "Nothing was done yet" in told
    assert slurm.conf.read_text() == CONF


def test_with_yes_it_is_done_and_the_next_command_is_told(slurm: Slurm, tmp_path: Path) -> None:
    slurm.build_companion()
    told = run(slurm, tmp_path, "enable", "--yes")
    assert "one without it will drain" in told
    assert "scontrol reconfigure" in told
    assert "systemctl restart slurmd" in told
    assert slurm.to_enable().empty


@pytest.mark.parametrize("ends", [0, 1])
def test_where_systemd_runs_the_sweep_is_started_once_it_is_done(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: int
) -> None:
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    asked = []

    def systemctl(argv: list[str], **how: object) -> Ran:
        asked.append(argv[1:])
        return Ran(tuple(argv), ends, "", "Failed to connect to bus")

    monkeypatch.setattr("forestage.system.run.run", systemctl)
    run(slurm, tmp_path, "enable")
    assert asked == []
    slurm.places.etc.rename(tmp_path / "was")  # what Site made
    (tmp_path / "lustre").rmdir()
    told = run(slurm, tmp_path, "enable", "--yes")
    assert asked == [["enable", "--now", "forestage-sweep.timer"]]
    assert ("is not on" in told) == bool(ends)


def test_what_is_refused_has_an_exit_status_and_is_told_to_tools_as_well(
    slurm: Slurm, tmp_path: Path
) -> None:
    slurm.write("Prolog=/site/prolog\n")
    told = run(slurm, tmp_path, "enable", "--yes", "--json", code=Exit.REFUSED)
    document = json.loads(told)
    assert document["done"] is False
    assert "Prolog=/site/prolog" in document["refusals"][0]


def test_slurm_conf_is_where_slurm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    (option,) = [one for one in enable.params if one.name == "slurm_conf"]
    assert callable(option.default)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert option.default() == "/etc/slurm/slurm.conf"
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm/etc/slurm.conf")
    assert option.default() == "/opt/slurm/etc/slurm.conf"


def test_bytes_that_are_no_text_come_through(slurm: Slurm) -> None:
    slurm.conf.write_bytes(b"ClusterName=c\r\n# caf\xe9\r\n")
    slurm.enable()
    assert slurm.conf.read_bytes().startswith(b"ClusterName=c\r\n# caf\xe9\r\nProlog=")
    assert edits.text_of(str(slurm.conf.parent / "none")) == ""
