"""Findings about settings that are right one by one, and fit each other or this node badly."""

from collections.abc import Iterator

from forestage.check.event_log_facts import ImageUse
from forestage.check.finding import CheckFinding
from forestage.check.slurm_site import ParsedSlurmConf
from forestage.config import DEFAULT, REMOVED_KEYS, Config, LoadedConfig, format_key_name
from forestage.paths import NodePaths
from forestage.system.tree import RootedTree
from forestage.units import format_duration, format_size

LAUNCH_TIMEOUT = (
    600.0  # seconds; srun ends a step that has not begun (slurm_step_launch_wait_start())
)
CONTAINED_LAUNCH_TIMEOUT = 50.0  # the same with SlurmdParameters=contain_spank
SMALLEST_IMAGE_BYTES = 1024 * 1024  # bytes; no site has images that are smaller


def list_findings(
    files: RootedTree,
    conf: ParsedSlurmConf | None,
    settings: LoadedConfig,
    images: tuple[ImageUse, ...],
    places: NodePaths,
) -> Iterator[CheckFinding]:
    """Reads where the cache and the sources lie, and how large the cache's disk is."""
    if conf is not None:
        yield from _list_partition_findings(conf, settings)
        yield from _list_wait_findings(conf, settings)
    yield from _list_path_findings(
        files, settings.config, locate_config_file(settings, places, "sources")
    )
    yield from _list_size_findings(files, settings, images, places)


def list_removed_key_findings(settings: LoadedConfig) -> Iterator[CheckFinding]:
    """Yield a finding for each key that is still there and was removed. Pure."""
    for key, files in settings.removed.items():
        yield CheckFinding(
            "removed-key",
            "warning",
            f"{key} is ignored: it was removed",
            f"Whatever it says, {REMOVED_KEYS[key]}",
            f"{', '.join(files)}: remove {key}",
        )


def locate_config_file(settings: LoadedConfig, places: NodePaths, key: str) -> str:
    """The file that sets a key, or that would."""
    found = settings.origins.get(key, DEFAULT)
    return str(places.etc / "forestage.yaml") if found == DEFAULT else found


def _list_partition_findings(
    conf: ParsedSlurmConf, settings: LoadedConfig
) -> Iterator[CheckFinding]:
    for name in settings.partitions:
        # A slurm.conf without any partition is not all that slurmctld has.
        if conf.partitions and name not in conf.partitions:
            key = format_key_name(name, next(iter(settings.partitions[name])))
            yield CheckFinding(
                "partition-unknown",
                "warning",
                f"partitions.{name} is none of {conf.path}",
                "These settings apply to no job",
                f"{settings.origins[key]}: partitions: one of"
                f" {', '.join(sorted(conf.partitions - {'DEFAULT'}))}",
            )


def _list_wait_findings(conf: ParsedSlurmConf, settings: LoadedConfig) -> Iterator[CheckFinding]:
    longest = (
        CONTAINED_LAUNCH_TIMEOUT
        if conf.has_flag("slurmdparameters", "contain_spank")
        else LAUNCH_TIMEOUT
    )
    for name, config in settings.list_configs():
        if name and not {"deadline", "cold", "redirect"} & settings.partitions[name].keys():
            continue
        steps_wait = config.redirect == "spank" and config.cold_start_mode == "wait"
        if not steps_wait or (config.deadline or 0.0) < longest:
            continue
        key = format_key_name(name, "deadline")
        yield CheckFinding(
            "deadline-launch",
            "warning",
            f"{key}: {format_duration(config.deadline or 0.0)} is longer than srun waits for a"
            f" step to begin ({format_duration(longest)})",
            "A step whose copy takes so long ends with a launch failure",
            f"{settings.origins[key]}: deadline: {format_duration(longest * 0.8)}",
        )


def _list_path_findings(files: RootedTree, config: Config, where: str) -> Iterator[CheckFinding]:
    reals = files.resolve_paths((config.cache, *config.sources))
    cache = reals[config.cache].rstrip("/")
    for source in config.sources:
        real = reals[source].rstrip("/")
        if f"{real}/".startswith(f"{cache}/"):
            yield CheckFinding(
                "source-in-cache",
                "critical",
                f"the source {source} lies in the cache, {config.cache}",
                "No image below it is staged: the cache is root's alone",
                f"{where}: sources without {source}",
            )
        elif f"{cache}/".startswith(f"{real}/") and real:
            yield CheckFinding(
                "cache-in-source",
                "warning",
                f"the cache, {config.cache}, lies below the source {source}",
                "Files of this disk are taken for images of the shared file system, and copies of"
                " them save nothing",
                f"{where}: sources: the shared file systems only",
            )


def _list_size_findings(
    files: RootedTree, settings: LoadedConfig, images: tuple[ImageUse, ...], places: NodePaths
) -> Iterator[CheckFinding]:
    """Limits below which no image of this site comes, by what jobs have asked for so far."""
    config = settings.config
    sizes = [image.size for image in images if image.size]
    smallest = min(sizes, default=0)
    if config.max_image_size is not None and sizes and config.max_image_size < smallest:
        yield CheckFinding(
            "max-image-size-small",
            "critical",
            f"max_image_size: {format_size(config.max_image_size)} is less than each image that"
            f" jobs asked for (the smallest has {format_size(smallest)})",
            "Nothing is staged",
            f"{locate_config_file(settings, places, 'max_image_size')}: max_image_size:"
            f" {format_size(max(sizes)).replace(' ', '')}",
        )
    disk = files.find_statvfs(config.cache)
    if disk is None:
        return
    total = disk.f_blocks * disk.f_frsize
    told = f"less than each image that jobs asked for (the smallest has {format_size(smallest)})"
    if not sizes:  # `max_size: 60`, which lacks its unit
        smallest, told = SMALLEST_IMAGE_BYTES, "less than any image has"
    if config.max_size.resolve_bytes(total) < smallest <= total:
        yield CheckFinding(
            "max-size-small",
            "critical",
            f"max_size: the cache may take {format_size(config.max_size.resolve_bytes(total))},"
            f" {told}",
            "Nothing is staged",
            f"{locate_config_file(settings, places, 'max_size')}: max_size",
        )
    if config.low_watermark.resolve_bytes(total) == 0:
        yield CheckFinding(
            "keeps-nothing",
            "warning",
            "low_watermark: 0 leaves no entry in the cache once its jobs are over",
            "Each job copies its image anew",
            f"{locate_config_file(settings, places, 'low_watermark')}: low_watermark",
        )
