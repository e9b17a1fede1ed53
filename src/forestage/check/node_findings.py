"""Findings about the node itself: programs, the kernel, slurmd's mounts, timers."""

import os
import re
from collections.abc import Iterator
from time import sleep

from forestage.check import slurm_site as sites
from forestage.check.finding import CheckFinding
from forestage.check.slurm_site import TIMER_UNIT, ParsedSlurmConf
from forestage.config import Config, directories, switch
from forestage.paths import NodePaths
from forestage.system import forked_child, processes
from forestage.system.file_systems import find_exhausted_resource
from forestage.system.tree import RootedTree

_HOLD_UNIT = "forestage-hold.service"
_SERVICE_UNIT = "forestage.service"
_UNIT_DIRECTORY = "/etc/systemd/system"
REMOVED_UNITS = {
    f"forestage-{name}" for name in ("sweep", "room", "metrics", "prefetch", "boot", "ask")
}
"""Units that are there no more: what an admin had for them is without effect."""
_HEALTH_PROGRAM = "/usr/lib/forestage/bin/forestage-health"
_CGROUPS = "/sys/fs/cgroup"
_CGROUP_LIMITS = ("memory.max", "memory.high", "cpu.max")
SECOND_LOOK_AFTER = 1.0  # seconds until a second look at the slurmds
MIN_OPEN_FILES = 1024  # what any system allows by default
MIN_KERNEL = (5, 14)  # EL 9's; the oldest of those on which forestage is run


def list_findings(
    files: RootedTree, places: NodePaths, config: Config, now: float
) -> Iterator[CheckFinding]:
    """Looks at /proc, /sys and programs."""
    if off := switch.find_off_reason(places, config, now):
        yield CheckFinding(
            "switched-off",
            "warning",
            f"staging is switched off: {off}",
            "Every job reads its image from the shared file system",
            "`forestage on`, or `enabled: true`, when the reason for it is gone",
        )
    yield from _list_full_findings(files)
    for name in ("setpriv", *(["rsync"] if config.engine == "rsync" else [])):
        if not files.find_program(name):
            package = "util-linux" if name == "setpriv" else name
            yield CheckFinding(
                "program-missing",
                "critical",
                f"{name} is not installed",
                "Copies fail",
                f"install the package {package}",
            )
    kernel = _find_kernel_release(files)
    if kernel and kernel < MIN_KERNEL:
        yield CheckFinding(
            "kernel-old",
            "warning",
            f"Linux {kernel[0]}.{kernel[1]} is older than 5.14",
            "Nobody has run forestage on it; nothing is switched off for that",
            "Linux 5.14 or newer: another release of the distribution",
        )
    if files.read_number_or_none("/proc/sys/user/max_mnt_namespaces") == 0:
        yield CheckFinding(
            "mount-namespaces",
            "critical",
            "the kernel's settings forbid mount namespaces",
            "A step's redirect needs one, and so does a look at a source below a redirect",
            "/etc/sysctl.d/99-forestage.conf: user.max_mnt_namespaces=65536",
        )
    if _slurmd_has_own_mounts(files):
        yield CheckFinding(
            "slurmd-mounts",
            "warning",
            "slurmd has mounts of its own, apart from the node's",
            "`forestage status` and the sweep do not see the bind mounts that its Prologs make, and"
            " cannot unmount them after a crash",
            "systemctl edit slurmd: no PrivateTmp=, ProtectSystem=, ProtectHome= and the like",
        )
    allowed = _find_open_file_limit(files)
    if allowed is not None and allowed < MIN_OPEN_FILES:
        yield CheckFinding(
            "few-open-files",
            "warning",
            f"slurmd, and what it starts, may open {allowed} files at most",
            "A copy needs 16, and what serves the tasks of a step one for each that starts at the"
            " same time: above that they wait for each other",
            f"systemctl edit slurmd: LimitNOFILE={MIN_OPEN_FILES} or more, or ulimit -Hn where it"
            " is started without systemd",
        )
    if sharing := _list_slurmds_sharing_run(files):
        yield CheckFinding(
            "slurmds-share-run",
            "critical",
            f"{len(sharing)} slurmds (processes {', '.join(sharing)}) have the same"
            f" {NodePaths().run}",
            "The Epilog of one releases a job that goes on at the other: its leases and its own"
            " directory are gone",
            "one slurmd on a host, or each in a mount namespace with a /run of its own",
        )
    if sites.lacks_enabled_unit(files, TIMER_UNIT):
        yield CheckFinding(
            "timer-off",
            "warning",
            f"{TIMER_UNIT} is not enabled",
            "No room is made between Epilogs, and what crashes leave stays: leases of jobs whose"
            " Epilog never ran keep their entries from being evicted",
            f"systemctl enable --now {TIMER_UNIT}",
        )
    yield from _list_removed_unit_findings(files)
    yield from _list_listable_findings(files, places)
    yield from _list_hold_findings(files)


def _list_removed_unit_findings(files: RootedTree) -> Iterator[CheckFinding]:
    """Yield what an admin has written or enabled for a unit whose work another one does now."""
    names = files.list_names(_UNIT_DIRECTORY)
    wants = [f"{_UNIT_DIRECTORY}/{name}" for name in names if name.endswith(".wants")]
    paths = [
        f"{folder}/{name}"
        for folder in (_UNIT_DIRECTORY, *wants)
        for name in files.list_names(folder)
    ]
    for path in paths:
        if path.rpartition("/")[2].partition(".")[0] not in REMOVED_UNITS:
            continue
        why, change = "systemd finds nothing to start for it", f"rm {path}"
        if path.endswith(".d"):
            why = "What it says, such as where Slurm's commands are, counts for no unit"
            change = (
                f"move what is still wanted to {_UNIT_DIRECTORY}/{_SERVICE_UNIT}.d,"
                f" and rm -r {path}"
            )
        yield CheckFinding(
            "unit-gone",
            "warning",
            f"{path} is for a unit that is not there any more",
            why,
            f"{change}; systemctl daemon-reload",
        )


def _list_full_findings(files: RootedTree) -> Iterator[CheckFinding]:
    """Yield what is said where forestage's own files find no space."""
    run, log = str(NodePaths().run), str(NodePaths().events.parent)
    if lack := _find_missing_space(files, run):
        yield CheckFinding(
            "run-full",
            "critical",
            f"the file system of {run} has no {lack} left",
            "Nothing is staged, as no lease can be written. forestage's own files there are small",
            f"`df {run}; df -i {run}; du -xsh /run/*` show what fills it: delete that",
        )
    if lack := _find_missing_space(files, log):
        yield CheckFinding(
            "log-full",
            "warning",
            f"the file system of {log} has no {lack} left",
            "Jobs are served, but no event is recorded: `explain` and `report` miss these jobs, and"
            " `metrics` cannot count",
            f"`df {log}; df -i {log}` show it: make room there (forestage takes 32 MiB)",
        )


def _find_missing_space(files: RootedTree, path: str) -> str:
    facts = files.find_statvfs(path)
    return find_exhausted_resource(facts) if facts else ""


def _find_kernel_release(files: RootedTree) -> tuple[int, int] | None:
    """Return the release of the kernel that runs, as (5, 14); None where nothing tells it."""
    found = re.match(r"(\d+)\.(\d+)", files.read_text_or_none("/proc/sys/kernel/osrelease") or "")
    return (int(found[1]), int(found[2])) if found else None


def list_untended_findings(
    files: RootedTree, conf: ParsedSlurmConf | None
) -> Iterator[CheckFinding]:
    """Where no systemd runs, as in a container: whether slurmd has the sweep run."""
    if conf is None or files.find_mode("/run/systemd/system") is not None:
        return
    program = conf.settings.get("healthcheckprogram", "")
    if "forestage" not in program and not sites.list_lines_naming_forestage(files, program):
        yield CheckFinding(
            "no-systemd",
            "warning",
            "no systemd runs here, and HealthCheckProgram is not forestage's nor mentions it",
            "Nothing runs the sweep: what crashes leave stays, and leases of jobs whose Epilog"
            " never ran keep their entries. Users' questions are not answered here",
            f"{conf.path}: HealthCheckProgram={_HEALTH_PROGRAM}, HealthCheckInterval=300",
        )


def _slurmd_has_own_mounts(files: RootedTree) -> bool:
    """Returns False also where no slurmd runs, or where nobody may look."""
    pid = find_slurmd_pid(files)
    ours, theirs = (
        _find_mount_namespace(files, "1"),
        _find_mount_namespace(files, pid) if pid else None,
    )
    return ours is not None and theirs is not None and theirs != ours


def find_slurmd_pid(files: RootedTree) -> str:
    """The process of a slurmd; "" where none runs."""
    return next(iter(_list_slurmd_pids(files)), "")


def _list_slurmd_pids(files: RootedTree) -> list[str]:
    """Return the processes of root's that are called slurmd: any user's may call itself that."""
    pids = [pid for pid in files.list_names("/proc") if pid.isdigit()]
    named = (pid for pid in pids if files.read_text_or_none(f"/proc/{pid}/comm") == "slurmd\n")
    return [pid for pid in named if processes.is_trusted(files.host_path(f"/proc/{pid}"))]


def _find_open_file_limit(files: RootedTree) -> int | None:
    """Return the hard limit of slurmd's open files; None where there is none, or nothing tells."""
    pid = find_slurmd_pid(files)
    limits = files.read_text_or_none(f"/proc/{pid}/limits") if pid else None
    found = re.search(r"^Max open files +\S+ +(\d+) ", limits or "", re.MULTILINE)
    return int(found[1]) if found else None


def _list_slurmds_sharing_run(files: RootedTree) -> list[str]:
    """Return the slurmds that have the same /run/forestage, where there are several for a while.

    slurmd starts a step manager by a child that ends at once (_forkexec_slurmstepd in req.c): for a
    moment the manager is called slurmd, and is no child of one.
    """
    found = _list_sharing_now(files)
    if found:
        sleep(SECOND_LOOK_AFTER)
        again = _list_sharing_now(files)
        found = [pid for pid in found if pid in again]
    return found if len(found) > 1 else []


def _list_sharing_now(files: RootedTree) -> list[str]:
    """Return the slurmds that have the same /run/forestage now, where there are several.

    A child of slurmd's has its name until it is another program.
    """
    found: dict[tuple[int, int], list[str]] = {}
    slurmds = _list_slurmd_pids(files)
    for pid in slurmds:
        run = f"/proc/{pid}/root{NodePaths().run}"
        try:
            if str(processes.read_stat(files.host_path(f"/proc/{pid}")).parent) in slurmds:
                continue
            facts = files.host_path(run).stat()
        except OSError:
            continue
        found.setdefault((facts.st_dev, facts.st_ino), []).append(pid)
    return next((pids for pids in found.values() if len(pids) > 1), [])


def _find_mount_namespace(files: RootedTree, pid: str) -> str | None:
    try:
        return os.readlink(files.host_path(f"/proc/{pid}/ns/mnt"))
    except OSError:
        return None


def _list_listable_findings(files: RootedTree, places: NodePaths) -> Iterator[CheckFinding]:
    """About the configuration's directories, where hooks run and users may list these."""
    try:
        found = (
            directories.list_listable_directories(places)
            if directories.has_run_hooks(places)
            else []
        )
    except OSError:
        return
    for path in found:
        shown = "/" + os.path.relpath(path, places.root)
        facts = files.find_statvfs(shown)
        is_fixed = facts is not None and bool(facts.f_flag & os.ST_RDONLY)
        yield CheckFinding(
            "config-listable",
            "note" if is_fixed else "warning",
            f"users may list {shown}" + (", which is read-only" if is_fixed else ""),
            "A user can list a directory so slowly that whoever makes a name in it waits for them:"
            " an editor, configuration management",
            "where it is made: mode 0711 (in a ConfigMap it cannot be set, and may stay)"
            if is_fixed
            else f"chmod go-r {shown} (the sweep does, within ten minutes of the first job)",
        )


def _list_hold_findings(files: RootedTree) -> Iterator[CheckFinding]:
    """About the cgroups of what outlives a job: with cgroup v2 and systemd."""
    v2 = files.find_mode(f"{_CGROUPS}/cgroup.controllers") is not None
    if not v2 or files.find_mode("/run/systemd/system") is None:
        return
    if files.find_mode(f"/{forked_child.HOLD_CGROUP}/serve") is None:
        yield CheckFinding(
            "hold-absent",
            "warning",
            f"{_HOLD_UNIT} does not run",
            "Copies and the processes that serve a job's mounts are in no unit: nothing bounds a"
            " copy's memory, and no tool shows what is whose",
            f"systemctl start {_HOLD_UNIT}",
        )
    for name in _CGROUP_LIMITS:
        for leaf in ("", "/serve"):
            limit = (
                files.read_text_or_none(f"/{forked_child.HOLD_CGROUP}{leaf}/{name}") or "max"
            ).split()[0]
            if limit != "max":
                yield CheckFinding(
                    "hold-bounded",
                    "warning",
                    f"{name} of {_HOLD_UNIT}{leaf} is {limit}",
                    "It counts for the processes that serve a job's mounts: its reads would fail"
                    " with I/O errors, or wait",
                    f"no such limit for {_HOLD_UNIT}: bound its cgroup copy alone",
                )
