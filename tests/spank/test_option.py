"""`--stage` in the commands that submit: what the job's Prologs get of it, and what is refused."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from companion import Step
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import properties  # noqa: F401 - how many examples
from forestage.slurm.hints import MAX_OPTION_CHARS, REFUSED_EXIT_STATUS

SLURMS = "_SLURM_SPANK_OPTION_forestage_stage"


@dataclass(frozen=True)
class Submitted:
    """What came of a command: `prologs` has what those of each part get."""

    code: int
    said: list[str]
    errors: list[str]
    prologs: list[list[str]]
    environment: list[str]

    @property
    def words(self) -> list[list[str]]:
        """The words that each part hands over, in our variable and no other."""
        assert all(len(part) <= 1 for part in self.prologs)
        name = "SPANK_FORESTAGE_STAGE="
        given = ["".join(part).removeprefix(name) for part in self.prologs]
        return [text.split("\x01")[:-1] for text in given]


@dataclass
class Command:
    """srun, sbatch or salloc, with a program that is asked whether the words are right."""

    step: Step
    runs: int = 0
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def asked(self) -> list[str]:
        """What the program was asked, a line each."""
        file = self.step.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def answers(self, text: str) -> None:
        words = 'for word; do printf "%s\\n" "$word"; done'
        self.step.script(f"{words} >>{self.step.folder}/asked\n{text}")

    def run(self, *words: str | bytes, context: str = "allocator") -> Submitted:
        self.runs += 1
        report = self.step.folder / f"submitted{self.runs}"
        sanitizer = self.step.folder / "sanitizer"
        options = f"log_path={sanitizer}:exitcode=99"
        done = subprocess.run(
            [
                self.step.program,
                report,
                "submit",
                context,
                f"arg=helper={self.step.helper}",
                *words,
            ],
            env={
                "PATH": os.environ["PATH"],
                "ASAN_OPTIONS": options,
                "UBSAN_OPTIONS": options,
                **self.environ,
            },
            timeout=240,
            check=False,
        )
        assert not list(self.step.folder.glob("sanitizer*")), done
        lines = report.read_bytes().decode(errors="surrogateescape").split("\n")
        report.unlink()
        facts = [line.removeprefix("fact ") for line in lines if line.startswith("fact ")]
        prologs: list[list[str]] = []
        for fact in facts:
            if fact.startswith("part "):
                prologs.append([])
            elif fact.startswith("prolog "):
                prologs[-1].append(fact.removeprefix("prolog "))
        return Submitted(
            done.returncode,
            [line.removeprefix("user ") for line in lines if line.startswith("user ")],
            [line.removeprefix("error ") for line in lines if line.startswith("error ")],
            prologs,
            [one.partition(" ")[2] for one in facts if one.startswith("environment ")],
        )


@pytest.fixture
def command(step: Step) -> Command:
    command = Command(step)
    command.answers("exit 0")
    return command


@pytest.mark.parametrize("context", ["local", "allocator"])
def test_stage_options_reach_the_prologs_in_their_order(command: Command, context: str) -> None:
    given = ["--stage=/a.sqsh", "--stage=/b c,d%20.sqsh", "--stage-wait=5m", "--stage-tell"]
    done = command.run(*given, "--stage-dir=9GiB,ram", "--stage=/e@job", context=context)
    assert done.words == [
        [
            *("stage=/a.sqsh", "stage=/b c,d%20.sqsh", "stage-wait=5m", "stage-tell=yes"),
            *("stage-dir=9GiB,ram", "stage=/e@job"),
        ]
    ]
    assert (done.code, done.errors, done.said) == (0, [], [])


def test_job_without_stage_options_sets_no_variable_and_runs_no_check(command: Command) -> None:
    done = command.run()
    assert (done.words, done.environment) == ([[]], [])
    assert command.asked == []


def test_words_of_each_part_of_a_het_job_reach_only_the_prologs_of_that_part(
    command: Command,
) -> None:
    done = command.run("--stage=/a", "--stage-wait=5m", ":", "--stage=/b", ":", ":", "--stage=/c")
    assert done.words == [["stage=/a", "stage-wait=5m"], ["stage=/b"], [], ["stage=/c"]]


@pytest.mark.parametrize("context", ["local", "allocator"])
@pytest.mark.parametrize("name", [SLURMS, f"{SLURMS}_wait", f"{SLURMS}_dir", f"{SLURMS}_tell"])
def test_stage_option_variable_of_an_earlier_submission_is_not_inherited(
    command: Command, name: str, context: str
) -> None:
    command.environ = {f"SLURM_SPANK_{name}": "/parents", name: "/parents"}
    done = command.run(context=context)
    assert (done.words, done.environment) == ([[]], [])
    assert command.run("--stage=/own", context=context).words == [["stage=/own"]]


def test_stage_words_variable_of_an_earlier_submission_is_not_inherited(command: Command) -> None:
    command.environ = {"SLURM_SPANK_FORESTAGE_STAGE": "stage=/parents\n"}
    assert command.run().environment == []


def test_job_environment_has_no_slurm_option_variable_after_submission(command: Command) -> None:
    left = command.run("--stage=/a", "--stage-tell").environment
    assert [one for one in left if "OPTION" in one] == []


def test_stage_options_of_each_het_job_part_are_checked_by_one_call(command: Command) -> None:
    command.run("--stage=/a b", "--stage-tell", ":", "--stage=/c")
    assert command.asked == [
        *("hints", "--", "stage=/a b", "stage-tell=yes"),
        *("hints", "--", "stage=/c"),
    ]


@pytest.mark.parametrize("context", ["local", "allocator"])
def test_job_with_refused_stage_options_is_not_submitted_and_each_reason_is_printed(
    command: Command, context: str
) -> None:
    command.answers(f"echo --stage=x: one; echo another; exit {REFUSED_EXIT_STATUS}")
    done = command.run("--stage=x", context=context)
    assert done.errors == ["forestage: --stage=x: one", "forestage: another"]
    assert (done.code, done.prologs) == (1, [])


def test_refused_stage_option_exits_with_the_code_of_slurm_exit_error(command: Command) -> None:
    command.answers(f"echo no; exit {REFUSED_EXIT_STATUS}")
    command.environ = {"SLURM_EXIT_ERROR": "77"}
    assert command.run("--stage=x").code == 77


@pytest.mark.parametrize(
    "answer",
    [
        "echo Traceback; exit 1",
        "echo usage; exit 2",
        "kill -9 $$",
        f"exit {REFUSED_EXIT_STATUS}",  # without a word
        "echo fine; exit 0",
        "exec >&-; exit 0",
    ],
)
def test_failing_check_of_stage_options_does_not_prevent_submission(
    command: Command, answer: str
) -> None:
    command.answers(answer)
    done = command.run("--stage=/a")
    assert (done.code, done.words, done.errors) == (0, [["stage=/a"]], [])


@pytest.mark.parametrize("hangs", ["sleep 600", "exec >&-; sleep 600", "yes"])
def test_hanging_check_of_stage_options_does_not_prevent_submission(
    command: Command, hasty: Step, hangs: str
) -> None:
    assert command.step is hasty
    command.answers(hangs)
    done = command.run("--stage=/a")
    assert (done.code, done.words, done.errors) == (0, [["stage=/a"]], [])


@pytest.mark.parametrize("missing", ["gone", "not executable"])
def test_missing_check_of_stage_options_does_not_prevent_submission(
    command: Command, missing: str
) -> None:
    command.step.helper.unlink()
    if missing != "gone":
        command.step.helper.write_text("#!/bin/sh\n")
    assert command.run("--stage=/a").words == [["stage=/a"]]


def test_companion_with_an_invalid_argument_passes_stage_options_unchecked(
    command: Command,
) -> None:
    command.answers(f"echo no; exit {REFUSED_EXIT_STATUS}")
    done = command.run("arg=helpr=/x", "--stage=/a")
    assert (done.words, done.errors) == ([["stage=/a"]], [])


def test_check_of_stage_options_gets_no_variable_of_the_user(command: Command) -> None:
    command.answers(f"env >{command.step.folder}/env; exit 0")
    command.environ = {"PYTHONHOME": "/wrong", "LD_PRELOAD": "", "SECRET": "x"}
    command.run("--stage=/a")
    found = (command.step.folder / "env").read_text().splitlines()
    own = {line.partition("=")[0] for line in found} - {
        "PWD",
        "SHLVL",
        "_",
        "OLDPWD",
    }  # the shell's
    assert own == {"PATH", "LANG"}


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOBID"])
def test_stage_option_of_a_step_is_reported_once_as_too_late_and_ignored(
    command: Command, name: str
) -> None:
    command.answers(f"echo no; exit {REFUSED_EXIT_STATUS}")
    command.environ = {name: "7"}
    done = command.run("--stage=./x", ":", "--stage-tell", context="local")
    assert (done.code, done.errors, done.words) == (0, [], [[], []])
    (line,) = done.said
    assert "too late for a step" in line
    assert command.run(context="local").said == []


def test_sbatch_within_a_job_passes_its_stage_options(command: Command) -> None:
    command.environ = {"SLURM_JOB_ID": "7"}
    assert command.run("--stage=/a").words == [["stage=/a"]]


def test_stage_options_above_16384_bytes_are_refused(command: Command) -> None:
    # execve(2) takes 128 KiB in one variable: a Prolog that cannot be started drains its node.
    done = command.run(*[f"--stage=/{'x' * 4000}"] * 5)
    assert (done.code, done.prologs) == (1, [])
    assert "more than 16384 bytes" in done.errors[0]
    assert command.asked == []
    assert command.run(*[f"--stage=/{'x' * 4000}"] * 4).code == 0


@pytest.mark.parametrize("option", ["--stage=/a\n/l.sqsh", "--stage-dir=5GiB\n"])
def test_stage_option_value_with_a_newline_is_refused_by_the_options_name(
    command: Command, option: str
) -> None:
    # Else what comes after it would be a word of its own, and be told as one that is not known.
    done = command.run("--stage=/a", option)
    name = option.partition("=")[0]
    assert (done.code, done.prologs, command.asked) == (1, [], [])
    assert [error.replace("\n", "") for error in done.errors] == [
        f"forestage: {name}: its value holds a newline"
    ]
    assert command.run("--stage=/a").words == [["stage=/a"]]


VALUE = st.binary(max_size=60).map(lambda raw: raw.replace(b"\0", b"\n"))
LONG = st.integers(1000, 9000).map(lambda size: b"/" + b"x" * size)
OPTION = st.tuples(st.sampled_from([b"stage", b"stage-wait", b"stage-dir"]), VALUE | LONG)
PART = st.lists(OPTION, max_size=8)


@given(st.lists(PART, min_size=1, max_size=3))
@example([[(b"stage", b"")], [(b"stage", b"\n")], [(b"stage-dir", b"=" * 16373)]])
@example([[(b"stage", b"x" * (MAX_OPTION_CHARS - 7))]])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stage_options_of_any_bytes_are_passed_unchanged_or_refused(
    program: Path, parts: list[list[tuple[bytes, bytes]]]
) -> None:
    with tempfile.TemporaryDirectory(prefix="forestage-spank-") as folder:
        command = Command(Step(Path(folder), program))
        words: list[bytes] = []
        for part in parts:
            words += [b":"] * (part is not parts[0])
            words += [b"--" + name + b"=" + value for name, value in part]
        done = command.run(*words)
    texts = [b"".join(n + b"=" + v + b"\n" for n, v in part) for part in parts]
    broken = any(b"\n" in value for part in parts for _, value in part)
    if broken or any(len(text) > MAX_OPTION_CHARS for text in texts):
        assert done.code == 1
        return
    wanted = [f"SPANK_FORESTAGE_STAGE={os.fsdecode(text)}".replace("\n", "\x01") for text in texts]
    assert done.prologs == [[one] if text else [] for one, text in zip(wanted, texts, strict=True)]
