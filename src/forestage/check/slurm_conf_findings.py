"""Findings about slurm.conf: the time that it leaves a Prolog for a copy, and containers.

What each setting does was tried on a cluster or read in slurm.conf(5); see timeouts.py.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.check.finding import CheckFinding
from forestage.check.slurm_site import ParsedSlurmConf
from forestage.config import LoadedConfig, format_key_name
from forestage.slurm import slurm_conf, timeouts
from forestage.slurm.slurm_release import COMMENT_IN_PROLOG
from forestage.system.tree import RootedTree
from forestage.units import format_duration

AUTO_IS_NONE = "`redirect: auto` is none: only the companion shows a job its copy"
_TIMEOUT_SETTINGS = ("prologepilogtimeout", "prologtimeout", "epilogtimeout")


def make_unread_finding(why: str) -> CheckFinding:
    """Return what is said where slurm.conf cannot be read; `why` names the file. Pure."""
    return CheckFinding(
        "slurm-conf",
        "unknown",
        why,
        "Without it nothing of Slurm can be checked, a Prolog takes 15 s at most, and where slurmd"
        f" has loaded the companion {AUTO_IS_NONE}",
        "make that file readable for root, or SLURM_CONF=/where/it/is/slurm.conf forestage check",
    )


def list_findings(conf: ParsedSlurmConf, settings: LoadedConfig) -> Iterator[CheckFinding]:
    """Pure."""
    yield from list_flag_findings(conf)
    yield from _list_timeout_findings(conf)
    yield from _list_deadline_findings(conf, settings)
    if conf.has_flag("slurmdparameters", "contain_spank"):
        yield CheckFinding(
            "contain-spank",
            "warning",
            "SlurmdParameters has contain_spank",
            "The companion cannot see there that a step was cancelled, so with `cold: wait` steps"
            " wait 50 s for a copy at most",
            f"{conf.path}: SlurmdParameters without contain_spank",
        )


def compute_launch_limit(conf: dict[str, str]) -> float:
    """Seconds after which the job may be lost, whatever would end the Prolog."""
    return timeouts.compute_limits(
        {k: v for k, v in conf.items() if k not in _TIMEOUT_SETTINGS}
    ).job_lost_after


def list_flag_findings(conf: ParsedSlurmConf) -> Iterator[CheckFinding]:
    """Pure: what PrologFlags lacks, and what it should not have."""
    lacks = conf.missing_flags
    line = f"{conf.path}: {conf.wanted_prolog_flags}"
    if "alloc" in lacks:
        yield CheckFinding(
            "prolog-alloc",
            "warning",
            "PrologFlags has no Alloc: the Prolog runs at a job's first step only",
            "The copy starts late, and every srun dies whose Prolog takes longer than"
            " MessageTimeout + BatchStartTimeout, 20 s by default",
            line,
        )
    elif "deferbatch" in lacks:
        yield CheckFinding(
            "prolog-deferbatch",
            "warning",
            "PrologFlags has no DeferBatch",
            "A batch job starts when its first node is ready, and loses its first srun where"
            " another node's Prolog takes longer than MessageTimeout + BatchStartTimeout, 20 s by"
            " default",
            line,
        )
    if conf.is_old:
        yield CheckFinding(
            "slurm-hints",
            "warning",
            f"Slurm {conf.release} tells a Prolog no comment",
            "Hints in a job's comment (`stage=…`) have no effect: images are found by"
            " --container-image alone",
            f"Slurm {COMMENT_IN_PROLOG} or newer, if users want hints",
        )
    if "serial" in conf.prolog_flags:
        yield CheckFinding(
            "prolog-serial",
            "warning",
            "PrologFlags has Serial: all Prologs and Epilogs of a node wait for each other",
            "While one job waits for a copy (`cold: wait`), no other starts or ends on the node",
            line,
        )
    if "runinjob" in conf.prolog_flags:
        yield CheckFinding(
            "prolog-run-in-job",
            "warning",
            "PrologFlags has RunInJob: the Prolog runs in the job's own container",
            "The memory that a copy passes through is charged to the job; under"
            " job_container/tmpfs the redirects of the Prolog are hidden from the job",
            line,
        )


def _list_timeout_findings(conf: ParsedSlurmConf) -> Iterator[CheckFinding]:
    limits = timeouts.compute_limits(conf.settings)
    if limits.node_drained_after is not None and limits.node_drained_after < timeouts.SAFE:
        name = "PrologTimeout" if "prologtimeout" in conf.settings else "PrologEpilogTimeout"
        yield CheckFinding(
            "prolog-timeout",
            "warning",
            f"{name} is so short that a job waits {format_duration(limits.node_drained_after)} for"
            " a copy at most",
            "Slurm kills a Prolog there and drains the node; what takes longer to copy is read from"
            " the shared file system at its first start",
            f"{conf.path}: {name}=600",
        )


def _list_deadline_findings(
    conf: ParsedSlurmConf, settings: LoadedConfig
) -> Iterator[CheckFinding]:
    allowed = timeouts.compute_limits(conf.settings).job_lost_after
    for name, config in settings.list_configs():
        wanted, key = config.deadline, format_key_name(name, "deadline")
        if name and not {"deadline", "cold", "redirect"} & settings.partitions[name].keys():
            continue
        # With the companion the steps wait, not the Prolog.
        if (
            config.cold_start_mode != "wait"
            or config.redirect == "spank"
            or not (wanted or 0) > allowed
        ):
            continue
        assert wanted is not None
        yield CheckFinding(
            "deadline-cut",
            "warning",
            f"{key}: {format_duration(wanted)} is cut to {format_duration(allowed)}, what this"
            " slurm.conf allows a Prolog to take",
            "Slurm would drain the node, or end or requeue a batch job that waits longer when its"
            " node registers: at `scontrol reconfigure`, when slurmd starts, every 33 min by"
            " default",
            f"{conf.path}: {_format_longer_timeouts(conf, wanted)}",
        )


def _format_longer_timeouts(conf: ParsedSlurmConf, seconds: float) -> str:
    """The settings that let a Prolog take so long."""
    wanted = int(seconds * 4 / 3 + 5)
    change = []
    if compute_launch_limit(conf.settings) < seconds:
        change.append(f"BatchStartTimeout={wanted}")
        if compute_launch_limit({**conf.settings, "batchstarttimeout": str(wanted)}) < seconds:
            others = [
                f for f in conf.list_flags("authinfo") if not f.lower().startswith("cred_expire=")
            ]
            change.append(f"AuthInfo={','.join([*others, f'cred_expire={wanted}'])}")
    drains = timeouts.compute_limits(conf.settings).node_drained_after
    if drains is not None and drains < seconds:
        change.append(f"PrologEpilogTimeout={wanted}")
    return ", ".join(change)


class CoveredPaths(msgspec.Struct, frozen=True):
    """Directories that job_container/tmpfs covers for jobs; `why` they may be more than these."""

    paths: tuple[str, ...] = ()
    why: str = ""

    def list_findings(self) -> Iterator[CheckFinding]:
        """Return what is said where its file cannot be read. Pure."""
        if self.why:
            yield CheckFinding(
                "job-container-conf",
                "unknown",
                self.why,
                "It says which directories job_container/tmpfs covers for jobs: a cache below one"
                " of them is seen by no job",
                "make that file readable for root",
            )


def read_covered_paths(files: RootedTree, conf: ParsedSlurmConf | None) -> CoveredPaths:
    """Read what job_container/tmpfs covers for jobs: its Dirs and its own BasePath."""
    if conf is None or "tmpfs" not in conf.settings.get("jobcontainertype", ""):
        return CoveredPaths()
    path = str(Path(conf.path).with_name("job_container.conf"))
    found = ["/tmp", "/dev/shm"]  # noqa: S108 - its default
    try:
        text = slurm_conf.read_conf_text(str(files.host_path(path)))
    except OSError as error:
        return CoveredPaths(tuple(found), slurm_conf.explain_read_error(error))
    for line in slurm_conf.join_lines(path, text):
        for word in line.text.split():
            name, _, value = word.partition("=")
            if name.lower() in ("basepath", "dirs") and value.lower() != "none":
                found += value.split(",")
    return CoveredPaths(tuple(found))
