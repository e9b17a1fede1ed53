"""Findings about plugstack.conf: whether the companion can do its work, and what stands in its way.

A step that reads through its copy needs the kernel's /dev/fuse, and no program or library of FUSE.

The companion says which Slurm it was built for in a file beside it, which its Makefile writes; what
this node runs, `slurmd -V` says, which asks no daemon.
"""

from collections.abc import Iterator

import msgspec

from forestage.check import slurm_site as sites
from forestage.check.finding import CheckFinding
from forestage.check.slurm_conf_findings import AUTO_IS_NONE
from forestage.check.slurm_site import (
    COMPANION_PATH,
    ParsedSlurmConf,
    PluginStack,
    SlurmSite,
    StackPlugin,
)
from forestage.config import DEFAULT, CompanionPresence, Config, LoadedConfig, format_key_name
from forestage.config import resolve_auto_redirect as of_auto
from forestage.system.tree import RootedTree

HELPER_PATH = "/usr/lib/forestage/bin/forestage"

_JOB_PROLOG = b"\0slurm_spank_job_prolog\0"


def resolve_auto_redirects(
    files: RootedTree, site: SlurmSite | None, settings: LoadedConfig, is_marked: bool
) -> LoadedConfig:
    """Returns the settings with what `redirect: auto` means on this node.

    `is_marked`: whether slurmd has loaded the companion since the boot (slurm/companion.py).
    """
    loads = _read_companion_presence(files, site)
    if loads == "unknown" and not is_marked:
        loads = "absent"
    auto = of_auto(Config(), loads).redirect
    partitions = {
        name: {
            key: auto if key == "redirect" and one == "auto" else one for key, one in own.items()
        }
        for name, own in settings.partitions.items()
    }
    return msgspec.structs.replace(
        settings, config=of_auto(settings.config, loads), partitions=partitions
    )


def _read_companion_presence(files: RootedTree, site: SlurmSite | None) -> CompanionPresence:
    """Return whether Slurm would load the companion, as far as its files can be read."""
    if site is None or (site.stack.read_error and not site.stack.companion):
        return "unknown"
    ours = site.stack.companion
    return (
        "loaded"
        if ours and ours.exists and _is_for_this_slurm(files, site.conf, ours)
        else "absent"
    )


def list_findings(
    files: RootedTree, site: SlurmSite, settings: LoadedConfig
) -> Iterator[CheckFinding]:
    """Reads the plugins' files and asks slurmd for its release; no plugin is loaded."""
    stack, ours = site.stack, site.stack.companion
    everywhere = settings.list_configs()
    yield from _list_read_through_findings(files, everywhere)
    yield from list_stack_findings(files, site)
    if ours is None and not stack.read_error:
        line = f"{stack.file}: {_format_companion_line(site)}, before pyxis"
        by_default = settings.origins["redirect"] == DEFAULT
        if not stack.includes and settings.config.redirect == "bind" and by_default:
            yield CheckFinding(
                "companion-advised",
                "warning",
                f"{stack.file} does not name the companion, so `redirect: auto` is bind",
                "The first job of an image gains nothing on a node, `srun --container-image` in a"
                " batch script is not seen, and a redirect is the whole node's",
                f"{line} (package forestage-spank); or `redirect: bind` in the configuration",
            )
        if any(config.redirect == "spank" for _, config in everywhere):
            yield CheckFinding(
                "companion-absent",
                "critical",
                f"redirect: spank, but {stack.file} does not name the companion",
                "Images are copied, and no job ever sees a copy",
                line,
            )


def list_stack_findings(files: RootedTree, site: SlurmSite) -> Iterator[CheckFinding]:
    """What is wrong with plugstack.conf as it is, whatever the configuration says."""
    stack = site.stack
    ours, pyxis = stack.companion, stack.pyxis
    if stack.read_error:  # the companion may be named in what could not be read
        yield _make_unread_finding(stack)
    elif ours is None and stack.includes:
        yield _make_unmatched_finding(files, site)
    if ours:
        yield from _list_companion_findings(files, site, ours)
        if pyxis and (late := stack.misplaced_line):
            # How a line that says `required` is to read, that finding says.
            is_changed = late is ours.line and ours.line.required
            line = f"line {late.first}" if is_changed else f"`{late.text}`"
            yield CheckFinding(
                "plugstack-order",
                "warning",
                f"{pyxis.line.path} comes before {ours.line.path}",
                "A step's image may be read from the shared file system before it is redirected",
                f"{late.file}: {line} before the line of {pyxis.line.path} ({pyxis.line.where})",
            )
    for one in stack.plugins:
        # A plugin's string table has the names that it defines, each between two NULs; nobody but
        # Slurm calls this one, so whoever has the name defines it.
        if _JOB_PROLOG in (files.read_bytes_or_none(one.path) or b""):
            yield CheckFinding(
                "spank-job-prolog",
                "warning" if ours else "critical",
                f"{one.path} defines slurm_spank_job_prolog",
                "With such a plugin in the stack, Slurm hides --container-image from the Prolog:"
                + (" copies start with the first step" if ours else " no such image is staged"),
                f"{one.line.file}: without line {one.line.first}"
                + ("" if ours else f", or `{_format_companion_line(site)}` before pyxis"),
            )


def _list_read_through_findings(
    files: RootedTree, everywhere: list[tuple[str | None, Config]]
) -> Iterator[CheckFinding]:
    """Whether steps can read through their copies, where the admin wants that."""
    starts = {config.cold_start_mode for _, config in everywhere}
    if "through" in starts and files.find_mode("/dev/fuse") is None:
        yield CheckFinding(
            "through-no-fuse",
            "warning",
            "steps should read through their copies, but /dev/fuse does not exist",
            "The first job of an image reads the shared file system, as with `cold: shared`",
            "/etc/modules-load.d/fuse.conf: fuse (now: modprobe fuse)",
        )
    for name, config in everywhere:
        if config.cold == "through" and config.cold_start_mode != "through":
            yield CheckFinding(
                "through-no-spank",
                "warning",
                f"{format_key_name(name, 'cold')}: through has no effect with redirect:"
                f" {config.redirect}",
                "The first job of an image reads it from the shared file system, as with `cold:"
                " shared`: only the companion can have a step read through its copy",
                f"{format_key_name(name, 'redirect')}: spank, with the companion in plugstack.conf",
            )
            return


def _format_companion_line(site: SlurmSite) -> str:
    """The line of plugstack.conf that loads the companion here, once its package is installed."""
    if site.companion_line:
        return site.companion_line
    return (
        sites.format_companion_include(site.conf.release)
        if site.conf.release
        else f"optional {COMPANION_PATH}"
    )


def _make_unmatched_finding(files: RootedTree, site: SlurmSite) -> CheckFinding:
    """plugstack.conf includes a companion, and not the one of this host, if it has any."""
    built_for, slurm = sites.read_companion_release(files), site.conf.release
    (first, *_) = site.stack.includes
    if built_for and built_for == slurm:
        change = f"{site.stack.file}: {_format_companion_line(site)}"
    else:
        change = f"install the package forestage-spank that is built for Slurm {slurm}".rstrip()
    return CheckFinding(
        "companion-missing",
        "warning",
        f"{first.where} includes {first.pattern}, and no such file is here",
        "No step on this node gets an image staged",
        change,
    )


def _list_companion_findings(
    files: RootedTree, site: SlurmSite, ours: StackPlugin
) -> Iterator[CheckFinding]:
    """What is wrong with the companion that plugstack.conf names."""
    where = ours.line.where
    required = ours.line.required
    built_for = sites.read_companion_release(files, ours.path)
    slurm = site.conf.release
    loads = (
        "slurmd does not start"
        if required
        else "No step gets an image staged, and each srun on this host may print errors"
    )
    if not ours.exists:
        yield CheckFinding(
            "companion-missing",
            "critical" if required else "warning",
            f"{ours.path} ({where}) is not there",
            loads,
            f"install the companion's package, or {ours.line.file}: without line {ours.line.first}",
        )
    elif built_for and slurm and built_for != slurm:
        yield CheckFinding(
            "companion-release",
            "critical" if required else "warning",
            f"{ours.path} was built for Slurm {built_for}, this is {slurm}",
            loads,
            f"install the package forestage-spank that is built for Slurm {slurm}",
        )
    yield from _list_required_findings(ours, "slurmd does not start")
    if program := _find_missing_helper(files, ours):
        yield CheckFinding(
            "companion-helper",
            "warning",
            f"the companion's helper {program} is not there, or not executable",
            "No step gets an image staged",
            f"{ours.line.file}: helper=/path/to/forestage, or install forestage's package",
        )


def _list_required_findings(ours: StackPlugin, fails: str) -> Iterator[CheckFinding]:
    if ours.line.required:
        yield CheckFinding(
            "companion-required",
            "warning",
            f"{ours.line.where} says `required`",
            f"If the plugin cannot be loaded, as after an upgrade of Slurm, {fails}",
            f"{ours.line.file}: {msgspec.structs.replace(ours.line, required=False).format_line()}",
        )


def _find_missing_helper(files: RootedTree, ours: StackPlugin) -> str:
    """The program that the companion would run in vain; "" where it can be run."""
    program = ours.line.find_argument("helper") or HELPER_PATH
    return "" if files.is_executable(program) else program


def list_login_findings(files: RootedTree, site: SlurmSite) -> Iterator[CheckFinding]:
    """Whether `--stage` is known where jobs are submitted, and checked.

    Nothing else of forestage has to be there, and no slurmd: the release is not compared.
    """
    ours = site.stack.companion
    if site.stack.read_error:
        yield _make_unread_finding(site.stack)
    if ours is None and site.stack.read_error:
        return
    if ours is None or not ours.exists:
        yield CheckFinding(
            "login-no-option",
            "warning",
            f"{site.stack.file} names no companion that is installed here",
            "srun, sbatch and salloc refuse --stage on this host: users write the comment",
            "install the package forestage-spank for this host's Slurm"
            + ("" if site.stack.includes else ", and the line that `forestage enable` prints"),
        )
        return
    yield from _list_required_findings(ours, "no job can be submitted")
    if program := _find_missing_helper(files, ours):
        yield CheckFinding(
            "login-no-check",
            "warning",
            f"{program} is not there, or not executable",
            "A wrong --stage is submitted, and its job's first step says so",
            "install the package forestage, or accept that",
        )


def _make_unread_finding(stack: PluginStack) -> CheckFinding:
    """Return what is said where plugstack.conf cannot be read to its end. Pure."""
    return CheckFinding(
        "plugstack-conf",
        "unknown",
        stack.read_error,
        "Which plugins Slurm loads is not known"
        + ("" if stack.companion else f"; where slurmd has loaded the companion {AUTO_IS_NONE}"),
        f"make what {stack.file} includes readable for root, and its includes end",
    )


def _is_for_this_slurm(files: RootedTree, conf: ParsedSlurmConf, ours: StackPlugin) -> bool:
    """Whether the companion is for this node's Slurm, as far as that can be told."""
    built_for = sites.read_companion_release(files, ours.path)
    return not (built_for and conf.release) or built_for == conf.release
