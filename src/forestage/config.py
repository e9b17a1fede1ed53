"""What did the admin decide? The keys, their defaults, and where each value comes from.

`Config` below is the only place where defaults are written; etc/forestage.yaml is generated from
it. How a value is read is kinds.py's part, reading the files is settings.py's.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import msgspec

from forestage import kinds
from forestage.address import Address, parse
from forestage.kinds import (
    PER_PARTITION,
    Direct,
    Engine,
    Key,
    OnDeadline,
    OnError,
    Redirect,
    UserMessages,
)
from forestage.units import Amount


class Peering(msgspec.Struct, frozen=True, kw_only=True):
    """`peers:`, what nodes of a job get from each other. Sizes are bytes."""

    enabled: Annotated[
        bool, Key("Get chunks from the job's other nodes, and let them be served.", kinds.FLAG)
    ] = False
    port: Annotated[int, Key("Of the peer service, on every node.", kinds.PORT)] = 7717
    listen: Annotated[
        str, Key('An address, a name or an interface; "" is all addresses.', kinds.LISTEN)
    ] = ""
    address: Annotated[
        str,
        Key("Where a node is found, such as {node}-ib or {node}.cluster:7718.", kinds.ADDRESS),
    ] = "{node}"
    addresses: Annotated[
        Mapping[str, str],
        Key("Nodes that are found elsewhere, and where: {n1: 10.0.0.1}.", kinds.ADDRESSES),
    ] = MappingProxyType({})
    key_file: Annotated[
        str | None,
        Key("A secret that all nodes share, instead of munge; root's, 0600.", kinds.FILE),
    ] = None
    bandwidth: Annotated[
        int | None, Key("The most a node gives away in a second; null is no limit.", kinds.LIMIT)
    ] = None
    uploads: Annotated[int, Key("Chunks that a node sends at once.", kinds.UPLOADS)] = 16
    downloads: Annotated[
        int, Key("Chunks that one copy gets from peers at once.", kinds.DOWNLOADS)
    ] = 8

    def of(self, node: str) -> Address:
        """Where the others find a node."""
        text = self.addresses.get(node) or self.address.replace("{node}", node)
        return parse(text, self.port)


class Metering(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics:`, what Prometheus gets to know."""

    textfile: Annotated[
        str | None,
        Key("Where node exporter's textfile collector reads; null writes none.", kinds.TEXTFILE),
    ] = "/var/lib/prometheus/node-exporter/forestage.prom"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings one job is served with. Sizes are bytes, durations seconds."""

    enabled: Annotated[bool, Key("If false, the hooks do nothing.", kinds.FLAG, PER_PARTITION)] = (
        True
    )
    sources: Annotated[
        tuple[str, ...],
        Key(
            "Absolute directories; only regular files below them are staged.",
            kinds.SOURCES,
            PER_PARTITION,
        ),
    ] = ()
    cache: Annotated[
        str, Key("Where the cache lies on the node; not below /tmp or /dev/shm.", kinds.CACHE)
    ] = "/mnt/nvme/forestage"
    require_mount: Annotated[
        bool, Key("Do not stage while the cache lies on the root file system.", kinds.FLAG)
    ] = True
    max_image_size: Annotated[
        int | None,
        Key("Images above this size are not staged; null is no limit.", kinds.LIMIT, PER_PARTITION),
    ] = None
    max_size: Annotated[
        Amount, Key("The most the cache may take: a size, or a share of its disk.", kinds.CAPACITY)
    ] = Amount(share=0.9)
    min_free: Annotated[
        Amount, Key("What always stays free on that disk: a size, or a share.", kinds.AMOUNT)
    ] = Amount(share=0.05)
    low_watermark: Annotated[
        Amount, Key("The Epilog and the timer evict down to this share of max_size.", kinds.SHARE)
    ] = Amount(share=0.8)
    redirect: Annotated[
        Redirect,
        Key(
            "Lay the copy over the path: bind (node), spank (step), none.",
            kinds.REDIRECT,
            PER_PARTITION,
        ),
    ] = "bind"
    engine: Annotated[
        Engine, Key("chunks copies with several threads, rsync runs that program.", kinds.ENGINE)
    ] = "chunks"
    threads: Annotated[
        int | None, Key("Threads of one copy; auto is two for each core, 4 to 8.", kinds.THREADS)
    ] = None
    chunk_size: Annotated[
        int,
        Key("The unit of copying and resuming; each thread takes 4 MiB of memory.", kinds.CHUNK),
    ] = 16 * 1024 * 1024
    direct: Annotated[
        Direct,
        Key("Copy past the page cache: auto where both sides are local disks.", kinds.DIRECT),
    ] = "auto"
    digest: Annotated[
        bool, Key("Keep a digest of each chunk, so that a copy can be verified.", kinds.FLAG)
    ] = True
    bandwidth: Annotated[
        int | None, Key("The most one copy may read in a second; null is no limit.", kinds.LIMIT)
    ] = None
    max_copies: Annotated[
        int, Key("Copies at once on a node; further ones queue in order.", kinds.COPIES)
    ] = 4
    deadline: Annotated[
        float | None,
        Key(
            "How long a hook may make a job wait; auto is what slurm.conf allows.",
            kinds.DEADLINE,
            PER_PARTITION,
        ),
    ] = None
    prolog_wait: Annotated[
        float | None,
        Key(
            "How long of that for copies; auto is all, 0 only starts them.",
            kinds.DEADLINE,
            PER_PARTITION,
        ),
    ] = None
    step_wait: Annotated[
        float,
        # slurm_step_launch_wait_start() of srun ends a step that has not begun after 600 s.
        Key(
            "How long a step may wait for a copy; srun gives up after 10m.",
            kinds.DURATION,
            PER_PARTITION,
        ),
    ] = 480.0
    on_deadline: Annotated[
        OnDeadline,
        Key(
            "Then the job starts from its original path and the copy goes on: continue, or abort.",
            kinds.ON_DEADLINE,
            PER_PARTITION,
        ),
    ] = "continue"
    max_stage_wait: Annotated[
        float, Key("The most that a user's stage-wait= may ask for.", kinds.DURATION, PER_PARTITION)
    ] = 600.0
    on_error: Annotated[
        OnError,
        Key(
            "What our own failure does to the node: continue, or drain it.",
            kinds.ON_ERROR,
            PER_PARTITION,
        ),
    ] = "continue"
    user_messages: Annotated[
        UserMessages,
        Key("What a step's user reads: none, problems, or all.", kinds.MESSAGES, PER_PARTITION),
    ] = "problems"
    peers: Peering = Peering()
    metrics: Metering = Metering()


def _keys(of: type[msgspec.Struct], above: str = "") -> Iterator[tuple[str, Key]]:
    for name, hint in get_type_hints(of, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            yield above + name, hint.__metadata__[0]
        else:
            yield from _keys(hint, f"{name}.")


KEYS: Mapping[str, Key] = MappingProxyType(dict(_keys(Config)))
"""By their names in messages: `deadline`, `peers.port`."""

GROUPS = tuple(dict.fromkeys(name.partition(".")[0] for name in KEYS if "." in name))
"""Keys of the file that hold keys: `peers`, `metrics`."""

_ABOUT = {
    "peers": "Chunks from the other nodes of the job, so that they read the shared file system"
    " once.",
    "metrics": "What Prometheus gets to know: `forestage metrics`, run by a timer, writes it.",
}

PARTITION_KEYS = tuple(name for name, key in KEYS.items() if key.per_partition)


def value_of(config: Config, name: str) -> Any:
    """What holds for one of KEYS."""
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


def replaced(config: Config, values: Mapping[str, object]) -> Config:
    """The same with other values for some of KEYS."""
    changes: dict[str, Any] = {name: it for name, it in values.items() if "." not in name}
    for group in GROUPS:
        within = {
            name.partition(".")[2]: it
            for name, it in values.items()
            if name.startswith(f"{group}.")
        }
        changes[group] = msgspec.structs.replace(getattr(config, group), **within)
    return msgspec.structs.replace(config, **changes)


def sample() -> str:
    """The text of etc/forestage.yaml: every key commented out, its default, one sentence."""
    keys = "\n".join(
        f"# {key.sentence}\n#{_line(name)}\n" for name, key in KEYS.items() if "." not in name
    )
    groups = "\n".join(
        f"# {_ABOUT[group]}\n#{group}:\n"
        + "".join(
            f"#  # {key.sentence}\n#  {_line(name)}\n"
            for name, key in KEYS.items()
            if name.startswith(f"{group}.")
        )
        for group in GROUPS
    )
    return f"""\
# forestage: what the admin decides. Every key is shown with its default.
# Files in conf.d/*.yaml beside this one are read after it, in sorted order; a later file
# wins key by key. `forestage config` shows what holds, and which file says so.

{keys}
{groups}
# What differs for the jobs of a partition. Possible here:
# {", ".join(PARTITION_KEYS)}.
#partitions:
#  debug:
#    enabled: false
#  training:
#    deadline: 2m
"""


def _line(name: str) -> str:
    """A key and its default as a line of YAML."""
    return f"{name.rpartition('.')[2]}: {KEYS[name].kind.show(value_of(Config(), name))}"
