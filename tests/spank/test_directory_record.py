"""A job's own directory shows by its record where no helper answers: upgraded, or removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from companion import GID, JOB, LEASES, OWN, UID, Step, keeping, line

from conftest import OTHERS, built
from forestage.cache.lease import EntryUse, Lease, LeaseDirectory
from forestage.features.data import directory_record
from forestage.slurm.step_protocol import PROTOCOL_GREETING, LineFields
from forestage.system.as_user import User

FORMAT = directory_record.DIRECTORY_RECORD_FORMAT
NEXT_GREETING = "forestage 99"
LOST = f"forestage: this step does not have its job's {OWN}: "
Record = Callable[..., None]


@pytest.fixture(scope="session")
def next_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The companion of the next release, with another language and another format."""
    others = {name: dict(values) for name, values in OTHERS.items()}
    others["constants.h"]["PROTOCOL_GREETING"] = (f'"{PROTOCOL_GREETING}"', f'"{NEXT_GREETING}"')
    others["constants.h"]["DIRECTORY_RECORD_FORMAT"] = (FORMAT, FORMAT + 1)
    return built(tmp_path_factory.mktemp("spank-next"), others)


@pytest.fixture
def record(step: Step, disk: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Record:
    """Writes the record of a directory as a hook does; no helper answers."""
    OWN.mkdir()
    leases = LeaseDirectory(LEASES)
    leases.write_lease(
        Lease(JOB, User("", UID, GID), 1.0, str(step.folder / "cache"), (EntryUse("k"),))
    )
    leases.set_hints_flag(JOB)
    step.script("exit 1")
    own: LineFields = ("device", *disk, "ext4", "rw", str(OWN), "root")

    def write(uid: int = UID, line: LineFields = own, format_: int = FORMAT) -> None:
        monkeypatch.setattr(directory_record, "DIRECTORY_RECORD_FORMAT", format_)
        seed = ("env", "CACHE", f"{OWN}/seed/CACHE")
        lines = [("env", "FORESTAGE_DIR", str(OWN)), seed, line]
        text = directory_record.format_record(uid, lines)
        if directory_record.is_write_needed(leases, JOB, text):
            directory_record.write_record(leases, JOB, text)

    write()
    return write


def shows(step: Step) -> bool:
    """Whether a step has its directory and what leads there; else it has nothing, and is told."""
    ran = step.run("env=CACHE=/mine", "tasks=2", f"task=cat {OWN}/file", image="")
    if not ran.out:
        assert ran.environ == {"CACHE": "/mine"}
        assert [said.partition(": ")[0] for said in ran.said] == ["forestage"]
        assert ran.said[0].startswith(LOST)
        return False
    assert ran.out == 2 * "from the disk\n"
    assert ran.environ["FORESTAGE_DIR"] == str(OWN)
    assert ran.environ["CACHE"] == f"{OWN}/seed/CACHE"
    assert ran.said == []
    return True


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "kill -KILL $$",
        "echo 'forestage 3'; echo leave x",
        f"echo '{PROTOCOL_GREETING}'; printf 'served\\t'; exit 1",
    ],
)
def test_job_directory_is_mounted_from_its_record_if_the_helper_fails(
    step: Step, record: Record, script: str
) -> None:
    step.script(script)
    assert shows(step)


def test_job_directory_is_mounted_from_its_record_if_the_helper_is_missing(
    step: Step, record: Record
) -> None:
    step.helper.chmod(0o644)
    assert shows(step)
    step.helper.unlink()
    assert shows(step)


def test_job_directory_in_memory_is_mounted_from_its_record(step: Step, record: Record) -> None:
    with keeping(step, "clones") as socket:
        record(line=("served", str(socket), str(OWN), "root"))
        ran = step.run(f"task=cat {OWN}/file", image="")
    assert (ran.out, ran.said) == ("from the keeper\n", [])


def test_helpers_answer_overrides_the_record_of_the_job_directory(
    step: Step, record: Record
) -> None:
    step.answers("say\tit is gone", line("env", "FORESTAGE_DIR"), "leave\tno-image")
    ran = step.run(f"task=ls {OWN}", image="")
    assert (ran.out, ran.environ, ran.said) == ("", {}, ["it is gone"])


# --- this build and the next one


@pytest.mark.ci
def test_companion_of_the_next_release_reads_the_directory_record_of_this_release(
    step: Step, record: Record, next_program: Path
) -> None:
    step.program = next_program
    assert shows(step)  # no helper answers
    step.answers("leave\tno-image")  # one of this release
    assert shows(step)


def test_directory_record_of_this_release_is_used_beside_a_helper_of_the_next_release(
    step: Step, record: Record, disk: tuple[str, str]
) -> None:
    record(format_=FORMAT + 1)
    step.script(f"echo '{NEXT_GREETING}'; echo leave x")
    assert shows(step)


def test_companion_reads_directory_records_only_of_its_own_and_the_previous_format(
    step: Step, record: Record, next_program: Path
) -> None:
    file = LeaseDirectory(LEASES).directory_record_file(JOB)
    text = file.read_text()
    found = {}
    for program in (step.program, next_program):
        step.program = program
        for number in range(FORMAT - 1, FORMAT + 3):
            file.write_text(text.replace(f"directory {FORMAT}\n", f"directory {number}\n", 1))
            found[program == next_program, number - FORMAT] = shows(step)
    readable = [(False, 0), (True, 0), (True, 1)]
    assert [which for which, shown in found.items() if shown] == readable


# --- whose it is


def test_directory_record_of_another_user_or_boot_is_not_used(step: Step, record: Record) -> None:
    record(uid=UID + 1)
    assert not shows(step)
    record()
    assert shows(step)
    file = LeaseDirectory(LEASES).directory_record_file(JOB)
    text = file.read_text()
    boot = text.split("\n")[1]
    for spoilt in (
        text.replace(boot, f"{boot}0"),
        text.replace(f"{boot}\n", ""),
        text.replace(f"owner\t{UID}\n", ""),
        text.replace("device\t", "devices\t"),
        text.replace("directory", "dir"),
        text[:-1].rpartition("\n")[0] + "\nuse\tx\n",
        "\n",
        "",
    ):
        file.write_text(spoilt)
        assert not shows(step), spoilt
    file.write_text(text)
    file.chmod(0o666)
    assert not shows(step)


def test_job_directory_on_a_reused_loop_device_is_reported_and_sets_no_variable(
    step: Step, record: Record, disk: tuple[str, str]
) -> None:
    record(line=("device", disk[0], f"{disk[1]}0", "ext4", "rw", str(OWN), "root"))
    ran = step.run("env=CACHE=/mine", f"task=ls {OWN}", image="")
    assert (ran.out, ran.environ["CACHE"], "FORESTAGE_DIR" in ran.environ) == ("", "/mine", False)
    assert ran.said == [f"forestage: nothing is mounted at {OWN}: its device is gone"]
