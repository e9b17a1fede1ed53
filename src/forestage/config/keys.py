"""The keys of the configuration file: type, notation, default and one sentence of each.

The structs below are the only place where a key is described. `KEYS` lists them by name; reading
and printing are made from it, and by packaging/man/configuration the sample file
(etc/forestage.yaml) and the manual page.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_origin

import msgspec

from forestage.config import values
from forestage.config.values import UP_TO_64, ServiceAddress, ValueNotation, parse_address
from forestage.units import SizeOrShare

RedirectMode: TypeAlias = Literal["auto", "spank", "bind", "none"]
UserMessages: TypeAlias = Literal["none", "problems", "all"]
EngineName: TypeAlias = Literal["chunks", "rsync"]
ColdStartMode: TypeAlias = Literal["auto", "through", "shared", "wait"]
OfflineMode: TypeAlias = Literal["fail", "use-last"]
PeerReach: TypeAlias = Literal["job", "cluster"]
CompanionPresence: TypeAlias = Literal["loaded", "absent", "unknown"]  # in the steps that start now

ByteLimit: TypeAlias = int | None  # bytes

CHUNKS = 256  # of an image, if `chunk_size: auto` may be as small as that takes
LARGEST_CHUNK = 16 << 20  # bytes, of `chunk_size: auto`

ANYWHERE = ("/",)
"""In place of a configuration's sources, where paths are looked at and none is staged. No
configuration can have it."""


class ConfigKey(msgspec.Struct, frozen=True):
    """What is known of a key besides its type and its default.

    `notation` of a Literal are its words, whatever is said here. `none` is the word for None in the
    file: `null`, or `auto` for what is decided where the facts for it are.
    """

    sentence: str
    notation: ValueNotation = values.FLAG
    none: Literal["", "null", "auto"] = ""
    per_partition: bool = False

    def parse_value(self, raw: object) -> Any:
        """Returns the value that YAML's `raw` means. ValueError says what was expected."""
        if self.none and raw == (None if self.none == "null" else self.none):
            return None
        try:
            return self.notation.parse(raw)
        except ValueError as error:
            if not self.none:
                raise
            problem = str(error).replace("expected ", f"expected {self.none} or ", 1)
            raise ValueError(problem) from None

    def format_value(self, value: Any) -> str:
        """Returns `value` as the file would have it."""
        return self.none if value is None else self.notation.format(value)


class PartitionKey(ConfigKey, frozen=True):
    """A key that may differ between partitions: it concerns a job, not the node's one cache."""

    per_partition: bool = True


class PeersSection(msgspec.Struct, frozen=True, kw_only=True):
    """`peers:`, what nodes of a job get from each other. Sizes are bytes."""

    # Decided by features/peers/activation.py alone; features.list_switched_on says whether to
    # import it.
    enabled: Annotated[
        bool | None,
        ConfigKey(
            "Share chunks with the job's other nodes; auto: if the service runs.",
            values.FLAG,
            "auto",
        ),
    ] = None
    reach: Annotated[
        PeerReach,
        ConfigKey(
            "Whom a copy asks: the nodes of its job, or any of the node's partitions (cluster)."
        ),
    ] = "job"
    port: Annotated[
        int,
        ConfigKey("Of the peer service, on every node.", values.make_integer_notation(1, 65535)),
    ] = 7717
    listen: Annotated[
        str | None,
        ConfigKey(
            'An address, a name or an interface; "" is all; null: where other nodes find this one.',
            values.LISTEN,
            "null",
        ),
    ] = None
    address: Annotated[
        str,
        ConfigKey(
            "Where a node is found, such as {node}-ib; with {node} alone at its NodeAddr.",
            values.PATTERN,
        ),
    ] = "{node}"
    key_file: Annotated[
        str | None,
        ConfigKey(
            "A secret of all nodes, in place of Slurm's munge or key; root's, 0600.",
            values.PATH,
            "null",
        ),
    ] = None
    bandwidth: Annotated[
        ByteLimit,
        ConfigKey(
            "The most a node sends to others per second; null is no limit.", values.LIMIT, "null"
        ),
    ] = None

    def node_address(self, node: str) -> ServiceAddress:
        """Returns where the other nodes find `node`."""
        return parse_address(self.address.replace("{node}", node), self.port)


class PrefetchSection(msgspec.Struct, frozen=True, kw_only=True):
    """`prefetch:`, images that are copied before the jobs begin which wait for a node."""

    host: Annotated[
        str | None,
        ConfigKey(
            "HOST or HOST:PORT, which reads the queue and tells nodes what it names; null: nobody.",
            values.HOST,
            "null",
        ),
    ] = None
    bandwidth: Annotated[
        ByteLimit,
        ConfigKey(
            "The most such a copy may read of its source in a second; null: while no job runs.",
            values.LIMIT,
            "null",
        ),
    ] = None


class DataSection(msgspec.Struct, frozen=True, kw_only=True):
    """`data:`, what a comment asks for besides images: directories, mounts, a job's own disk."""

    enabled: Annotated[bool, ConfigKey("Stage what comments ask for besides images.")] = True
    share: Annotated[
        SizeOrShare, ConfigKey("The most of the cache's space that data may take.", values.SHARE)
    ] = SizeOrShare(share=0.6)
    max_files: Annotated[
        int,
        ConfigKey(
            "Directories with more files are not staged.",
            values.make_integer_notation(1, 10_000_000),
        ),
    ] = 200_000
    mount_roots: Annotated[
        tuple[str, ...],
        ConfigKey(
            "Mount points below these are made for a step where they are missing.", values.PATHS
        ),
    ] = ()
    job_dir: Annotated[
        SizeOrShare,
        ConfigKey(
            "The most that all jobs' stage-dir= may take together of the cache's disk.",
            values.AMOUNT,
        ),
    ] = SizeOrShare(share=0.5)


class RegistrySection(msgspec.Struct, frozen=True, kw_only=True):
    """`registry:`, how images of registries are resolved, imported and kept."""

    enabled: Annotated[
        bool, ConfigKey("Stage images of registries where pyxis' importer= is forestage's.")
    ] = True
    store: Annotated[
        str | None,
        ConfigKey(
            "A shared directory for imported images; null: enroot imports, in each step.",
            values.PATH,
            "null",
        ),
    ] = None
    offline: Annotated[
        OfflineMode,
        ConfigKey("When a registry is silent or busy: fail, or use what its tag meant last."),
    ] = "fail"
    keep: Annotated[
        float,
        ConfigKey(
            "Imported images that were not used for this long are deleted from the store.",
            values.DURATION,
        ),
    ] = 30 * 86400.0
    max_user_size: Annotated[
        ByteLimit,
        ConfigKey(
            "The most a user's images take in the store; null is no limit.", values.LIMIT, "null"
        ),
    ] = None

    @property
    def stores(self) -> tuple[str, ...]:
        """Where imported images are: the store, if there is one."""
        return (self.store,) if self.store else ()


class MetricsSection(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics:`, what Prometheus gets to know."""

    textfile: Annotated[
        str | None,
        ConfigKey(
            "Where node exporter's textfile collector reads; null writes none.",
            values.TEXTFILE,
            "null",
        ),
    ] = "/var/lib/prometheus/node-exporter/forestage.prom"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings one job is served with. Sizes are bytes, durations seconds."""

    enabled: Annotated[bool, PartitionKey("If false, the hooks do nothing.")] = True
    sources: Annotated[
        tuple[str, ...],
        PartitionKey("Absolute directories; only what is below them is staged.", values.PATHS),
    ] = ()
    user_mounts: Annotated[
        Mapping[str, str],
        ConfigKey(
            "FUSE mounts of a service's user to stage from: {/juice: fuse.juicefs 994}, type, uid.",
            values.USER_MOUNTS,
        ),
    ] = msgspec.field(default_factory=dict)
    cache: Annotated[
        str,
        ConfigKey("The cache's directory on the node; not below /tmp or /dev/shm.", values.CACHE),
    ] = "/mnt/nvme/forestage"
    require_mount: Annotated[
        bool, ConfigKey("Do not stage while the cache is on the root file system.")
    ] = True
    max_image_size: Annotated[
        ByteLimit,
        PartitionKey(
            "Images above this size are not staged; null is no limit.", values.LIMIT, "null"
        ),
    ] = None
    max_size: Annotated[
        SizeOrShare,
        ConfigKey("The most the cache may take: a size, or a share of its disk.", values.CAPACITY),
    ] = SizeOrShare(share=0.6)
    min_free: Annotated[
        SizeOrShare,
        ConfigKey("What always stays free on that disk: a size, or a share.", values.AMOUNT),
    ] = SizeOrShare(share=0.2)
    low_watermark: Annotated[
        SizeOrShare,
        ConfigKey(
            "The Epilog evicts down to this share of max_size, or of what other data leaves.",
            values.SHARE,
        ),
    ] = SizeOrShare(share=0.8)
    max_user_share: Annotated[
        SizeOrShare,
        ConfigKey(
            "Above this share of space and copies, a user does not displace others.",
            values.SHARE,
        ),
    ] = SizeOrShare(share=0.5)
    unpack_ratio: Annotated[
        int,
        ConfigKey(
            "How many times its size an image takes on that disk unpacked; 0: it is not unpacked.",
            values.make_integer_notation(0, 100),
        ),
    ] = 3
    redirect: Annotated[
        RedirectMode,
        PartitionKey(
            "The path shows the copy to a step (spank), the node (bind), none; auto prefers spank."
        ),
    ] = "auto"
    engine: Annotated[
        EngineName, ConfigKey("chunks copies with several threads, rsync runs that program.")
    ] = "chunks"
    threads: Annotated[
        int | None,
        ConfigKey(
            "Threads of one copy, of 4 MiB each; auto is two for each core, 4 to 8.",
            UP_TO_64,
            "auto",
        ),
    ] = None
    chunk_size: Annotated[
        int | None,
        ConfigKey(
            "The unit of copying and resuming; auto: 1 MiB to 16 MiB, by the image's size.",
            values.CHUNK,
            "auto",
        ),
    ] = None
    bandwidth: Annotated[
        ByteLimit,
        ConfigKey(
            "The most one copy may read of its source in a second; null is no limit.",
            values.LIMIT,
            "null",
        ),
    ] = None
    max_copies: Annotated[
        int,
        ConfigKey("Copies at once on a node; others queue, those that jobs need first.", UP_TO_64),
    ] = 4
    warm_at_boot: Annotated[
        tuple[str, ...],
        ConfigKey("Images that the node copies when it boots.", values.PATHS),
    ] = ()
    cold: Annotated[
        ColdStartMode,
        PartitionKey(
            "How a job starts without its copy: through (with spank only), shared, or wait for it."
        ),
    ] = "auto"
    deadline: Annotated[
        float | None,
        PartitionKey(
            "How long a job waits with cold: wait; auto: what slurm.conf allows, for a step 8m.",
            values.DURATION,
            "auto",
        ),
    ] = None
    max_stage_wait: Annotated[
        float, PartitionKey("The most that a user's stage-wait= may ask for.", values.DURATION)
    ] = 600.0
    user_messages: Annotated[
        UserMessages, PartitionKey("What a step's user reads: none, problems, or all.")
    ] = "problems"
    data: DataSection = DataSection()
    peers: PeersSection = PeersSection()
    prefetch: PrefetchSection = PrefetchSection()
    registry: RegistrySection = RegistrySection()
    metrics: MetricsSection = MetricsSection()

    @property
    def staged_from(self) -> tuple[str, ...]:
        """Where files are staged from: below `sources`, and the store of imported images."""
        return (*self.sources, *self.registry.stores)

    def chunk_bytes_for(self, size: int) -> int:
        """Return the bytes of one chunk of an image of `size` bytes, the same on all nodes. Pure.

        What a peer has of a chunk counts only when all of it is there. So nodes have something to
        exchange early only where an image has many chunks; above 4 GiB it has anyway.
        """
        if self.chunk_size is not None:
            return self.chunk_size
        wanted = -(-size // CHUNKS)
        return min(LARGEST_CHUNK, max(values.MIN_CHUNK, 1 << (wanted - 1).bit_length()))

    @property
    def cold_start_mode(self) -> Literal["through", "shared", "wait"]:
        """How a job starts while its image is copied: `cold` as far as `redirect` allows it."""
        if self.cold == "shared" or self.cold == "wait":
            return self.cold
        # In a step's own mount namespace only: `df` on the node must never meet it.
        return "through" if self.redirect == "spank" else "shared"


_AUTO: Mapping[CompanionPresence, RedirectMode] = {
    "loaded": "spank",
    "absent": "bind",
    "unknown": "none",
}


def _list_keys(struct: Any, above: str = "") -> Iterator[tuple[str, ConfigKey]]:
    # Not get_type_hints(), which evaluates them all again: each hook would pay for it.
    for name, hint in struct.__annotations__.items():
        if hasattr(hint, "__metadata__"):
            key = hint.__metadata__[0]
            if get_origin(hint.__origin__) is Literal:
                key = msgspec.structs.replace(
                    key, notation=values.make_word_notation(hint.__origin__)
                )
            yield above + name, key
        else:
            yield from _list_keys(hint, f"{name}.")


def resolve_auto_redirect(config: Config, companion: CompanionPresence) -> Config:
    """Return `config` with what `redirect: auto` means on a node. Pure.

    Where it is unknown whether Slurm loads the companion, no Prolog mounts anything for the whole
    node. A companion that is loaded shows its steps their copies all the same.
    """
    if config.redirect != "auto":
        return config
    return msgspec.structs.replace(config, redirect=_AUTO[companion])


KEYS: Mapping[str, ConfigKey] = dict(_list_keys(Config))
"""By their names in messages: `deadline`, `peers.port`."""

GROUPS = tuple(dict.fromkeys(name.partition(".")[0] for name in KEYS if "." in name))
"""Keys of the file that hold keys: `data`, `peers`, `registry`, `metrics`."""

PARTITION_KEYS = tuple(name for name, key in KEYS.items() if key.per_partition)


def get_key_value(config: Config, name: str) -> Any:
    """Returns the value of one of KEYS."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def with_values(config: Config, changed: Mapping[str, object]) -> Config:
    """Returns a copy of `config` with other values for some of KEYS."""
    changes: dict[str, Any] = {}
    groups: dict[str, dict[str, object]] = {}
    for name, value in changed.items():
        group, dot, within = name.partition(".")
        if dot:
            groups.setdefault(group, {})[within] = value
        else:
            changes[name] = value
    for group, inner in groups.items():
        changes[group] = msgspec.structs.replace(getattr(config, group), **inner)
    return msgspec.structs.replace(config, **changes)
