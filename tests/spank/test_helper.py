"""The helper is started as agreed, once, and whatever it does the step goes on without a trace."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from companion import GID, JOB, LEASES, OLD_KEY, UID, Step

from forestage.slurm.step_protocol import PROTOCOL_GREETING
from node import until

PREFIX = "SPANK__SLURM_SPANK_OPTION_pyxis_container_"


def until_gone(pid: int) -> None:
    def gone() -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"

    until(gone, f"the end of {pid}")


def pids(step: Step, name: str = "pids") -> list[int]:
    return [int(word) for word in (step.folder / name).read_text().split()]


def environ(step: Step) -> dict[str, str]:
    lines = (step.folder / "environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if line)


@pytest.mark.parametrize("image", ["", "dockerd://ubuntu", "/" + "x" * 100_000])
def test_step_with_an_image_that_is_no_path_starts_no_helper(step: Step, image: str) -> None:
    assert step.run(image=image).report.count("fact task 0") == 1
    assert step.asked() == 0


def test_image_variable_of_pyxis_starts_the_helper_without_the_option(step: Step) -> None:
    step.run(f"env=PYXIS_CONTAINER_IMAGE={step.image}", image="")
    assert step.asked() == 1


def test_step_that_only_saves_a_container_starts_the_helper(step: Step) -> None:
    step.answers("leave\tno-image", first=f"cat /proc/$$/environ > {step.folder}/environ")
    step.run("save=/x/saved.sqsh", image="")
    assert environ(step)[f"{PREFIX}save"] == "/x/saved.sqsh"
    assert f"{PREFIX}image" not in environ(step)


def test_helper_gets_only_the_environment_of_the_protocol(step: Step) -> None:
    hostile = {"LD_PRELOAD": "/none.so", "PYTHONPATH": "/x", "BASH_ENV": "/x", "ENV": "/x"}
    step.environ = {"PYTHONPATH": "/x", "BASH_ENV": "/x", "ENV": "/x", "SLURMD_NODENAME": "n1"}
    step.answers("leave\tnone", first=f"cat /proc/$$/environ > {step.folder}/environ")
    given = [f"env={name}={value}" for name, value in hostile.items()]
    given += ["env=SLURM_JOB_PARTITION=batch", "env=SLURMD_NODENAME=batch-host"]
    given += ["env=SLURM_JOB_NODELIST=n[1-4]", "env=SLURM_STEP_NODELIST=n[2-3]"]
    step.run(*given, f"save={step.folder}/save.sqsh", f"cwd={step.folder}", "arg=timeout=33")
    assert environ(step) == {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "SLURM_SCRIPT_CONTEXT": "spank_step",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_UID": str(UID),
        "SLURM_JOB_GID": str(GID),
        "FORESTAGE_GROUPS": f"{GID},{GID + 1}",
        "SLURM_STEP_ID": "4294967291",
        "SLURM_JOB_WORK_DIR": str(step.folder),
        "SLURM_JOB_PARTITION": "batch",
        "SLURM_STEP_NODELIST": "n[2-3]",
        "SLURMD_NODENAME": "n1",
        f"{PREFIX}image": str(step.image),
        f"{PREFIX}save": f"{step.folder}/save.sqsh",
        "FORESTAGE_MANAGER": environ(step)["FORESTAGE_MANAGER"],  # see the next test
        "FORESTAGE_TIMEOUT": "33",
        "FORESTAGE_PATH": os.environ["PATH"],
        "FORESTAGE_ENVIRONMENT": "3",
    }


@pytest.mark.parametrize("contained", [False, True])
def test_helper_gets_the_step_managers_pid_also_in_a_contained_step(
    step: Step, contained: bool
) -> None:
    """With ContainSpank that is a process which ends with user_init."""
    told = f"cat /proc/$$/environ > {step.folder}/environ; echo $PPID > {step.folder}/parent"
    step.answers("leave\tnone", first=told)
    step.run(*["contained=1"] * contained)
    started = (step.folder / "parent").read_text().strip()
    assert (environ(step)["FORESTAGE_MANAGER"] != started) is contained


@pytest.mark.parametrize("save", ["", "/" + "x" * 4096])
def test_invalid_save_path_is_not_passed_to_the_helper(step: Step, save: str) -> None:
    step.answers("leave\tnone", first=f"cat /proc/$$/environ > {step.folder}/environ")
    step.run(f"save={save}")
    assert environ(step)[f"{PREFIX}image"] == str(step.image)
    assert f"{PREFIX}save" not in environ(step)


@pytest.mark.parametrize("save", ["name.sqsh", "deep/name", "./name", "/name"])
def test_any_save_path_of_pyxis_is_passed_to_the_helper(step: Step, save: str) -> None:
    step.answers("leave\tnone", first=f"cat /proc/$$/environ > {step.folder}/environ")
    step.run(f"save={save}")
    assert environ(step)[f"{PREFIX}save"] == save


HOME, NO_HOME = f"{PREFIX}mount_home", f"{PREFIX}mount_home".replace("pyxis_", "pyxis_no_")


@pytest.mark.parametrize(
    ("said", "arrives"),
    [
        ([], set()),
        (["flag=container-mount-home"], {HOME}),
        (["flag=no-container-mount-home"], {NO_HOME}),
        (["flag=no-container-mount-home", "env=ENROOT_MOUNT_HOME=y"], {NO_HOME}),
        (["env=PYXIS_CONTAINER_MOUNT_HOME=true"], {HOME}),
        (["env=PYXIS_CONTAINER_MOUNT_HOME=0", "env=ENROOT_MOUNT_HOME=y"], {NO_HOME}),
        (["env=PYXIS_CONTAINER_MOUNT_HOME=what", "env=ENROOT_MOUNT_HOME=y"], {HOME}),
        (["env=ENROOT_MOUNT_HOME=0"], {HOME}),
        (["env=ENROOT_MOUNT_HOME=no"], {NO_HOME}),
        (["env=ENROOT_MOUNT_HOME="], set()),
    ],
)
def test_mount_home_setting_of_the_container_is_passed_to_the_helper(
    step: Step, said: list[str], arrives: set[str]
) -> None:
    step.answers("leave\tnone", first=f"cat /proc/$$/environ > {step.folder}/environ")
    step.run(*said, "env=HOME=/home/me")
    given = environ(step)
    assert {HOME, NO_HOME} & given.keys() == arrives
    assert given["FORESTAGE_HOME"] == "/home/me"


@pytest.mark.parametrize(("bytes_long", "arrives"), [(65536, True), (65537, False)])
def test_node_list_is_passed_to_the_helper_whole_or_not_at_all(
    step: Step, bytes_long: int, arrives: bool
) -> None:
    # Half a list would name other nodes; a longer one might keep the helper from starting.
    nodes = "n" * bytes_long
    step.answers("leave\tnone", first=f"cat /proc/$$/environ > {step.folder}/environ")
    step.run(f"env=SLURM_STEP_NODELIST={nodes}", "env=SLURM_JOB_PARTITION=batch")
    assert environ(step).get("SLURM_STEP_NODELIST") == (nodes if arrives else None)
    assert environ(step)["SLURM_JOB_PARTITION"] == "batch"


def test_image_path_is_passed_to_the_helper_unchanged(step: Step) -> None:
    step.answers("leave\tnone", first=f"printenv {PREFIX}image > {step.folder}/image")
    step.run(image="./a\nLD_PRELOAD=/x;$(reboot)", helper=True)
    assert (step.folder / "image").read_text() == "./a\nLD_PRELOAD=/x;$(reboot)\n"


STATE = """#!/usr/bin/python3 -I
import json, os, signal
def opened(fd):
    try:
        return os.readlink(f"/proc/self/fd/{{fd}}")
    except OSError:
        return None
state = {{
    "fds": {{fd: opened(fd) for fd in range(2000) if opened(fd)}},
    "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "hup": signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,
    "leads": os.getpgrp() == os.getpid(),
    "umask": os.umask(0),
    "cwd": os.getcwd(),
}}
with open("{out}", "w") as file:
    json.dump(state, file)
print("{number}")
print("leave\tnone")
"""


@pytest.mark.parametrize("parent", ["leak=1", "closed=1"])
def test_helper_runs_as_root_with_only_standard_descriptors_and_the_environment(
    step: Step, parent: str
) -> None:
    out = step.folder / "out"
    step.helper.write_text(STATE.format(out=out, number=PROTOCOL_GREETING))
    assert step.run(parent).lines("verbose")[0].endswith("none")
    state = json.loads(out.read_text())
    fds = state.pop("fds")
    assert set(fds) == {"0", "1", "2", "3"}
    assert fds["3"].startswith("/memfd:environment")
    assert fds["0"] == fds["2"] == "/dev/null"
    assert fds["1"].startswith("pipe:")
    assert state == {
        "ids": [0] * 6,
        "blocked": 0,
        "hup": True,
        "leads": True,
        "umask": 0o022,
        "cwd": "/",
    }


def test_image_is_not_redirected_if_the_helper_is_missing_or_not_executable(step: Step) -> None:
    step.helper.unlink()
    assert "gave no answer" in step.run().logged
    step.helper.touch(0o644)
    assert "gave no answer" in step.run().logged


@pytest.mark.parametrize(
    "text",
    [
        "exit 1",
        "kill -9 $$",
        "exec >&-",
        "printf use",
        "printf 'leave\\tnone'",
        "echo rubbish",
        "printf '\\0\\0\\n'",
        "printf 'use\\t/a\\t/b\\n'",
        "printf 'use\\ta\\tb\\t1\\t2\\t3\\t4\\t1\\n'",
        "printf 'use\\t/%05000d\\t/b\\t1\\t2\\t3\\t4\\t1\\n' 0",
        "printf 'use\\t/a\\t/%05000d\\t1\\t2\\t3\\t4\\t1\\n' 0",
        "printf 'use\\t/a\\t/b\\t1\\t2\\t3\\tx\\t1\\n'",
        "printf 'use\\t/a\\t/b\\t1\\t\\t3\\t4\\t1\\n'",
        "printf 'use\\t/a\\t/b\\t1\\t2\\t3\\t4\\t1\\tmore\\n'",
        "head -c 1048576 /dev/zero | tr '\\0' x",
        "yes | head -c 1048576",
        "head -c 16384 /dev/zero | tr '\\0' x; echo; printf 'leave\\tnone\\n'",
    ],
)
def test_invalid_answer_of_the_helper_redirects_no_image(step: Step, text: str) -> None:
    step.script(f"echo '{PROTOCOL_GREETING}'\n{text}")
    ran = step.run(f"task=cat {step.image}; echo $$")
    assert "stays as it is" in ran.logged
    assert ran.said == []
    assert str(step.image) not in ran.mounts[0]


def test_helper_messages_reach_the_user_up_to_100_lines(step: Step) -> None:
    step.answers(
        "say\tforestage: 50 %s %n", then="yes 'say\tmore' | head -n 500; printf 'leave\\tx\\n'"
    )
    ran = step.run()
    assert ran.said[0] == "forestage: 50 %s %n"
    assert len(ran.said) == 100
    assert ran.lines("verbose")[0].endswith("stays as it is: x")


@pytest.mark.parametrize("before", ["", "exec >&-;", "yes 'say\tx' &"])
def test_hanging_helper_is_killed_with_its_process_group(step: Step, before: str) -> None:
    pids_of = f"sleep 1000 & echo $$ $! > {step.folder}/pids"
    step.script(f"echo '{PROTOCOL_GREETING}'\n{pids_of}\n{before} wait")
    for seconds in (1, 10, 100):  # on a busy machine it may be ended before it has begun
        ran = step.run(f"arg=timeout={seconds}")
        assert "took too long" in ran.logged or "no answer" in ran.logged
        if (step.folder / "pids").exists() and pids(step):
            break
    for pid in pids(step):
        until_gone(pid)


def test_helper_that_does_not_exit_after_its_answer_is_killed(step: Step) -> None:
    lingers = f"sleep 1000 & echo $$ $! > {step.folder}/pids"
    step.answers(step.use(), first=lingers, then="wait")
    ran = step.run()
    for pid in pids(step):
        until_gone(pid)
    assert str(step.image) in ran.mounts[0]


def test_stager_in_its_own_session_is_not_killed_with_the_helper(step: Step) -> None:
    stager = f"setsid sh -c 'echo $$ > {step.folder}/pids; exec sleep 1000' > /dev/null &"
    step.answers(then=f"{stager}\nwhile [ ! -s {step.folder}/pids ]; do :; done\n" + answer(step))
    ran = step.run()
    (stager_pid,) = pids(step)
    os.kill(stager_pid, signal.SIGKILL)
    assert str(step.image) in ran.mounts[0]


def answer(step: Step) -> str:
    return f"printf '%s\\n' '{step.use()}'"


@pytest.mark.parametrize("uid", [0, UID])
def test_signal_by_root_or_the_steps_user_ends_the_wait_for_the_helper(
    step: Step, uid: int
) -> None:
    step.script("exec sleep 1000")
    ran = step.run(f"request={uid}")  # which sees to it that no child is left
    assert "being signalled" in ran.logged


def test_signal_by_another_user_does_not_end_the_wait_for_the_helper(step: Step) -> None:
    """In that time the companion has looked ten times; three are enough for who may."""
    step.script("exec sleep 1000")
    assert "took too long" in step.run("request=999", "arg=timeout=1").logged


def test_helper_of_a_contained_step_runs_in_the_nodes_mount_namespace(step: Step) -> None:
    # With SlurmdParameters=contain_spank the job's mount namespace is around user_init.
    names = step.folder / "names"
    step.answers(step.use(), first=f"readlink /proc/$$/ns/mnt >> {names}")
    between = f"between=readlink /proc/self/ns/mnt >> {names}"
    ran = step.run("contained=1", between)
    helper, manager = names.read_text().splitlines()
    assert helper == manager
    assert str(step.image) in ran.mounts[0]


def test_helper_of_a_contained_step_gets_a_timeout_of_50_s(step: Step) -> None:
    out = step.folder / "timeout"
    step.answers("leave\tnone", first=f"printenv FORESTAGE_TIMEOUT > {out}")
    step.run("contained=1")
    assert out.read_text() == "50\n"


@pytest.fixture
def hinted(step: Step) -> Step:
    """A step of a job whose comment names another image, as its Prolog noted it."""
    LEASES.mkdir()
    (LEASES / f"{JOB}.hinted").touch()
    (step.folder / "shared/other.sqsh").write_text("an older image\n")
    return step


def other(step: Step) -> str:
    """The helper's answer for that one."""
    path = step.folder / "shared/other.sqsh"
    st = path.stat()
    numbers = (st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns, 1)
    return "\t".join(["also", "use", str(step.entry(OLD_KEY)), str(path), *map(str, numbers)])


@pytest.mark.parametrize("image", ["", "dockerd://ubuntu"])
def test_step_without_an_image_gets_the_image_of_the_jobs_comment(hinted: Step, image: str) -> None:
    first = f"cat /proc/$$/environ > {hinted.folder}/environ"
    hinted.answers(other(hinted), "leave\tno-image", first=first)
    ran = hinted.run("tasks=2", f"task=stat -c %i {hinted.folder}/shared/other.sqsh", image=image)
    assert ran.out.split() == [str(hinted.entry(OLD_KEY).stat().st_ino)] * 2
    assert f"{PREFIX}image" not in environ(hinted)
    assert ran.logged == ""


def test_step_with_an_image_also_gets_the_image_of_the_jobs_comment(hinted: Step) -> None:
    hinted.answers(other(hinted), hinted.use())
    ran = hinted.run(f"task=stat -c %i {hinted.image} {hinted.folder}/shared/other.sqsh")
    entries = (hinted.entry(), hinted.entry(OLD_KEY))
    assert ran.out.split() == [str(entry.stat().st_ino) for entry in entries]


def test_answer_with_too_many_comment_images_still_redirects_the_steps_image(hinted: Step) -> None:
    hinted.answers(*[other(hinted)] * 40, hinted.use())
    ran = hinted.run(f"task=stat -c %i {hinted.image}")
    assert ran.out.split() == [str(hinted.entry().stat().st_ino)]


@pytest.mark.parametrize("line", ["also", "also\t", "also\tuse\t/x", "also\tleave\tnone"])
def test_invalid_answer_line_for_a_further_image_is_ignored(hinted: Step, line: str) -> None:
    hinted.answers(line, hinted.use())
    ran = hinted.run(f"task=stat -c %i {hinted.image}")
    assert ran.out.split() == [str(hinted.entry().stat().st_ino)]


@pytest.mark.parametrize("number", ["", "forestage 3", "forestage 40", "say\tforestage 4", "use"])
def test_answer_of_a_helper_of_another_release_is_not_used(step: Step, number: str) -> None:
    lines = "\\n".join([number, "env\tA\tx", step.use()])
    step.script(f"printf '{lines}\\n'")
    ran = step.run(f"task=stat -c %i {step.image}")
    assert ran.out.split() == [str(step.image.stat().st_ino)]
    assert "it is of another release" in ran.logged
    assert not [line for line in ran.lines("fact") if "A=x" in line]


def test_unknown_line_in_the_answer_is_ignored_and_the_image_is_redirected(step: Step) -> None:
    step.answers("new\tword", "use\tmore\tfields", step.use())
    ran = step.run(f"task=stat -c %i {step.image}")
    assert ran.out.split() == [str(step.entry().stat().st_ino)]
