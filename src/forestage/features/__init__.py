"""What is not the core: a folder for each feature, which could be deleted.

The table says what the core must know of a feature before it imports any of it. It has literals
alone and imports nothing but os, since each hook reads it, also one that then has nothing to do.
"""

import os

TYPE_CHECKING = False  # as in hooks/boundary.py
if TYPE_CHECKING:
    from collections.abc import Iterable


class Feature:
    """A row of the table."""

    __slots__ = (
        "commands",
        "debts",
        "doors",
        "heading",
        "kinds",
        "marks",
        "name",
        "needs",
        "options",
        "raw_words",
        "sign",
        "unit",
        "words",
    )

    def __init__(
        self,
        name: str,
        *,
        doors: tuple[str, ...] = (),
        needs: tuple[str, ...] = (),
        marks: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        words: tuple[str, ...] = (),
        raw_words: tuple[str, ...] = (),
        kinds: tuple[str, ...] = (),
        sign: str = "",
        heading: str = "",
        commands: tuple[tuple[int, str, str], ...] = (),
        unit: str = "",
        debts: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.doors = doors
        """The files of its folder, and functions of them, that the core calls (doors.py)."""
        self.needs = needs
        """The features that it imports."""
        self.marks = marks
        """Files below /run/forestage: the job's Epilog has work for it while one is there."""
        self.options = options
        """The words that a job's comment and options of srun may have for it."""
        self.words = words
        """The words that only a job's comment may have for it."""
        self.raw_words = raw_words
        """More of them, which slurm/hints.py leaves to the feature: `JobHints.words` has their
        values, in the Prolog and in the job's steps."""
        self.kinds = kinds
        """What a job asks it for, besides images by their paths: a `reference` in place of a path,
        or `data`. Only then, or for a raw word, do Prolog and step import it."""
        self.sign = sign
        """A file below /run/forestage: while it is there, the feature is on where its key `enabled`
        leaves that to the node."""
        self.heading = heading
        """Below which heading of `forestage --help` its commands stand."""
        self.commands = commands
        """The commands in its commands.py: the place below that heading, the name, the first
        sentence of the command's own help.
        """
        self.unit = unit
        """The unit of systemd's that `forestage enable` starts, where its checks.py wants that."""
        self.debts = debts
        """What else knows of it (tests/delete_feature): a file, or `file: word`. Only to shrink."""


FEATURES = (
    Feature(
        "registry",
        doors=(
            "checks.findings",
            "commands",
            "commands.import_reference",
            "epilog.before_lease_drop",
            "explain.explain_outcome",
            "metrics.read_metrics",
            "prolog.before_lease",
            "reasons",
            "status.read_status",
            "step.before_lease",
            "sweep.afterwards",
            "sweep.fields",
            "sweep.lines",
            "sweep.without_cache",
        ),
        marks=("images/{job}.asked",),
        kinds=("reference",),
        heading="Images before a job",
        commands=((8, "registry", "Images of registries in the store that all nodes share."),),
        debts=(
            *("src/forestage/config/keys.py: stores", "src/forestage/config/keys.py: OfflineMode"),
            *(
                "src/forestage/paths.py: collected",
                "src/forestage/slurm/companion.py: find_importer",
            ),
            "src/forestage/slurm/companion.py: is_own_importer",
            "src/forestage/commands/command_context.py: FullSummaryGroup",
            "src/forestage/slurm/companion.py: IMPORTER",
            "tests/unit/slurm/test_companion.py: find_importer",
            "tests/unit/config/test_config.py: registry.enabled",
            "tests/unit/config/test_config.py: registry.max_user_size",
            "tests/unit/config/test_config.py: registry: {enabled: false}",
            "tests/unit/hooks/test_boundary.py: test_epilog_has_work_if_a_step_used_a_registry",
            "tests/hooks/test_order.py: broken without a lease",
            "tests/hooks/test_reused_job_number.py: asking",
            "tests/hooks/test_node_failures.py: test_epilog_without_a_cache_deletes_the_image_mark",
        ),
    ),
    # What every job with an image needs: no folder.
    Feature(
        "core",
        marks=("leases/{job}.json", "leases/{job}.prolog", "leases/{job}.hinted"),
        options=("stage", "stage-tell", "stage-wait"),
    ),
    Feature(
        "data",
        doors=(
            "epilog.after_lease_drop",
            "explain.explain_outcome",
            "prolog.after_lease",
            "reasons",
            "service.routes",
            "status.read_status",
            "step.after_lease",
            "submitted.must_be_possible",
            "sweep.fields",
            "sweep.in_each_cache",
            "sweep.lines",
        ),
        marks=("leases/{job}.data",),
        options=("stage-dir",),
        words=("stage-list",),
        kinds=("data",),
        debts=(
            *(
                "src/forestage/cache/evict.py: of_data",
                "src/forestage/check/enable_plan.py: for_jobs",
            ),
            "src/forestage/check/enable_plan.py: gres",
            *(
                "src/forestage/cache/job_notes.py: trees",
                "src/forestage/cache/job_notes.py: DirectoryCopyState",
            ),
            "tests/unit/cache/test_lease.py: trees",
            "tests/unit/cache/test_lease.py: DirectoryCopyState",
            "tests/unit/config/test_config.py: data.enabled",
            "tests/unit/config/test_config.py: data.max_files",
            "tests/unit/config/test_config.py: data.share",
            "tests/unit/config/test_config.py: data.job_dir",
            "tests/unit/config/test_config.py: data.mount_roots",
            "tests/unit/config/test_config.py: data: {enabled: false}",
            "tests/jobdir.py",
            "tests/features/peers/hooks/test_peer_service.py: published_scan",
            (
                "tests/features/peers/hooks/test_peer_service.py: "
                "test_scan_client_reconnects_after_a_restart_of_the_peer_service"
            ),
            (
                "tests/features/peers/hooks/test_peer_service.py: "
                "test_peer_service_records_a_proven_client_only_from_another_address"
            ),
            "tests/hooks/test_earlier_cache.py: Dirs",
            "tests/hooks/test_shares.py: test_no_entry_is_evicted_to_unpack_a_file_that_is_mounted",
            "tests/hooks/test_groups.py: show",
            "tests/hooks/test_groups.py: test_directory_readable_only_in_a_step_is_copied_then",
            "tests/hooks/test_user_fuse.py: is_declined",
            "tests/hooks/test_earlier_cache.py: job_dirs",
            "tests/hooks/test_order.py: _is_settled",
        ),
    ),
    Feature(
        "metrics",
        doors=(
            "commands",
            "sweep.afterwards",
            "tend.each_minute",
        ),
        heading="The whole cluster",
        commands=(
            (
                2,
                "metrics",
                "Write counters and the node's state for Prometheus, through its node exporter.",
            ),
        ),
        debts=(
            *("packaging/prometheus/forestage.rules.yml", "packaging/grafana/forestage.json"),
            *("packaging/build: prometheus/", "packaging/build: grafana/"),
            "docs/operations.md: forestage/prometheus/",
            "docs/operations.md: forestage/grafana/",
            *("tests/alerts.yml", "tests/test_alerts.py"),
            (
                "tests/faults/test_locked_directories.py: "
                "test_metrics_lock_is_acquired_while_a_user_locks_run_or_var_log"
            ),
            "src/forestage/commands/status.py: STATE_NAMES",
            "src/forestage/config/values.py: TEXTFILE",
            "tests/hooks/test_node_failures.py: metrics",
        ),
    ),
    Feature(
        "peers",
        doors=(
            "activation.is_on",
            "queried_node.query_node",
            "checks.findings",
            "checks.wants_unit",
            "commands",
            "engine.helpers",
            "engine.uploaded",
            "metrics.count",
            "metrics.read_metrics",
            "status.read_sent",
            "status.read_status",
            "sweep.ask_slurm",
            "sweep.with_cache",
            "tend.each_minute",
        ),
        sign="peer.sign",
        heading="The whole cluster",
        commands=((3, "peer", "Serve chunks to the other nodes until it is ended."),),
        unit="forestage-peer.service",
        debts=(
            "src/forestage/config/load.py: _check_peers_need_chunks",
            *("src/forestage/config/load.py: peers.addresses", "src/forestage/paths.py: munge"),
            "src/forestage/config/load.py: peers.downloads",
            "src/forestage/config/load.py: peers.uploads",
            *("src/forestage/config/keys.py: PeerReach", "src/forestage/config/values.py: LISTEN"),
            "src/forestage/config/values.py: PATTERN",
            "src/forestage/config/values.py: _parse_address_pattern",
            "src/forestage/config/values.py: fallback_host",
            *("src/forestage/paths.py: peer_counts", "src/forestage/paths.py: peer_sign"),
            "src/forestage/paths.py: silent_nodes",
            "src/forestage/slurm/slurm_conf.py: locate_conf",
            "src/forestage/cache/disk_errors.py: start_doubt",
            "src/forestage/cache/arrival_map.py: request_chunk_soon",
            "src/forestage/cache/arrival_map.py: clear_arrived",
            "src/forestage/stage/chunks.py: clear_arrived",
            "tests/test_layers.py: test_only_config_and_peers_activation_read_peers_enabled",
            *("tests/peering.py", "tests/features/data/hooks/test_shared_scan.py"),
        ),
    ),
    Feature(
        "prefetch",
        doors=(
            "checks.findings",
            "commands",
            "explain.explain_outcome",
            "metrics.read_metrics",
            "service.routes",
            "status.read_status",
            "tend.each_minute",
            "tend.works_for_others",
        ),
        needs=("peers", "prepare"),
        heading="Images before a job",
        commands=((3, "prefetch", "Copy images before the jobs begin which wait for a node."),),
        debts=("src/forestage/stage/copy_queue.py: alone",),
    ),
    Feature(
        "prepare",
        doors=(
            "commands",
            "hints",
            "tend.each_minute",
        ),
        heading="Images before a job",
        commands=(
            (
                1,
                "images",
                "List the images below DIR, or below the site's sources: name, size, owner, label.",
            ),
            (2, "warm", "Have nodes copy images before a job wants them."),
            (4, "stage", "Copy images into this node's cache, without a job and without Slurm."),
            (5, "publish", "Copy IMAGE into DIR, on Lustre spread over all OSTs."),
            (6, "pack", "Make one squashfs image of all that is in DIR."),
            (7, "hints", "Say what is wrong with --stage options, as srun, sbatch and salloc do."),
        ),
        debts=("src/forestage/config/keys.py: warm_at_boot",),
    ),
    Feature(
        "report",
        doors=("commands",),
        heading="The whole cluster",
        commands=(
            (1, "report", "Report what staging saved: as a text, or with -o as an HTML page."),
        ),
    ),
)


def list_names_with_door(door: str, features: "Iterable[Feature] | None" = None) -> list[str]:
    """Return the names of those of these features, or of all, that have this door."""
    return [one.name for one in (FEATURES if features is None else features) if door in one.doors]


def list_requested_features(words: "Iterable[str]") -> list[Feature]:
    """Return the features that a job asks, by one of these kinds or raw words."""
    asked = set(words)
    return [one for one in FEATURES if not asked.isdisjoint((*one.kinds, *one.raw_words))]


def list_with_job_marks(job: int, run: str) -> list[Feature]:
    """Return the features beside the core that have a mark of the job below `run`."""
    return [
        one
        for one in FEATURES
        if one.doors and any(os.path.exists(f"{run}/{mark.format(job=job)}") for mark in one.marks)
    ]


def list_switched_on(door: str, config: object, run: str) -> list[Feature]:
    """Return the features with this door that may be on, as the configuration and signs say it."""
    found = []
    for one in FEATURES:
        enabled = getattr(getattr(config, one.name, None), "enabled", True)
        is_on = os.path.exists(f"{run}/{one.sign}") if enabled is None else enabled
        if door in one.doors and is_on:
            found.append(one)
    return found
