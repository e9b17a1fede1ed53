"""The hooks as processes: which have work, how they end, and what a warm one loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forestage import events
from forestage.cache.layout import Entry
from forestage.cache.source_image import SourceImage
from forestage.clock import Clock
from forestage.hooks.boundary import (
    IMAGE_OPTION,
    HookRun,
)
from forestage.paths import NodePaths
from forestage.sources.source import OpenImage
from forestage.system.as_user import User

END = """
import atexit, sys
from forestage.hooks import boundary
atexit.register(print, "taken apart")
def body(name):
    BODY
boundary._run_to_exit_status = body
try:
    boundary.main("prolog")
finally:
    print("came back")
"""


def end(body: str) -> subprocess.CompletedProcess[str]:
    script = END.replace("BODY", body)
    return subprocess.run(
        [sys.executable, "-BIc", script], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("code", [0, 2])
def test_hook_process_exits_with_the_return_code_of_the_hook(code: int) -> None:
    ran = end(f"return {code}")
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, "", "")


def test_hook_without_work_logs_one_line_and_exits_0() -> None:
    ran = subprocess.run(
        [sys.executable, "-BIc", "from forestage.hooks.boundary import main; main('prolog')"],
        env={"SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "")
    assert ran.stderr == "forestage: prolog job=7 result=none\n"


def test_event_of_a_step_names_its_user(tmp_path: Path) -> None:
    """The companion sends no name: `named` finds it."""
    places = NodePaths(tmp_path)
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "0", "SLURM_JOB_GID": "0", IMAGE_OPTION: "/a"}
    HookRun("step", environ, 0.0).run(places, Clock())
    (event,) = events.read_events(places.events)
    assert (event.user, event.uid) == ("root", 0)


HIT = """
import sys, time
from forestage.hooks.boundary import HookRun
from pathlib import Path
forks = []
sys.addaudithook(lambda event, args: forks.append(event) if event == "os.fork" else None)
start = time.monotonic()
from forestage.clock import Clock
from forestage.paths import NodePaths
from forestage.slurm.job import Job
from forestage.sources.source import OpenImage
HookRun("prolog", ENVIRON, start).run(NodePaths(Path(ROOT)), Clock())
heavy = {"subprocess"} if sys.version_info >= (3, 11) else set()  # there msgspec's uuid needs it
heavy |= {"xxhash", "filelock", "concurrent.futures", "threading.local", "rich", "click"}
heavy |= {f"forestage.stage.{name}" for name in ("pipeline", "stager", "chunks", "engines")}
heavy |= {f"forestage.cache.{name}" for name in ("evict", "digest", "space")}
heavy |= {f"forestage.{name}" for name in ("hooks.epilog", "hooks.step", "system.run", "commands")}
heavy |= {"forestage.features.prefetch"}
print(sorted(heavy & set(sys.modules)), len(forks))
"""


def test_hook_of_a_hit_imports_no_module_that_only_a_copy_needs(
    tmp_path: Path,
    me: User,
    shared: Path,
    look: Callable[[Path], OpenImage],
    publish: Callable[[SourceImage], Entry],
) -> None:
    """The cache is at /cache of a root of its own; with `redirect: none` no mount needs root."""
    (shared / "image.sqsh").write_bytes(b"12345")
    opened = look(shared / "image.sqsh")
    opened.close()
    publish(opened.image)
    etc = NodePaths(tmp_path).etc
    etc.mkdir(parents=True)
    (etc / "forestage.yaml").write_text(
        f"cache: /cache\nsources: [{shared}]\nrequire_mount: false\nredirect: none\n"
    )
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_USER": "",
        "SLURM_JOB_UID": str(me.uid),
        "SLURM_JOB_GID": str(me.gid),
        IMAGE_OPTION: f"{shared}/image.sqsh",
    }
    script = HIT.replace("ENVIRON", repr(environ)).replace("ROOT", repr(str(tmp_path)))
    ran = subprocess.run(
        [sys.executable, "-BIc", script], capture_output=True, text=True, check=True
    )
    (event,) = events.read_events(NodePaths(tmp_path).events)
    assert (event.outcome.result, event.outcome.key) == ("hit", opened.image.key)
    assert ran.stdout == "[] 3\n", "who the user is, the look as they, the probe of the disk"
