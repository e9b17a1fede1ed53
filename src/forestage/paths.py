"""Where forestage's own files lie, apart from the cache, whose root the configuration names."""

from pathlib import Path

import msgspec


class NodePaths(msgspec.Struct, frozen=True):
    """Every fixed path as a property of one value; tests pass a root of their own."""

    root: Path = Path("/")
    munge: str = ""  # the socket of another munged than the node's own
    slurm_conf: str = ""  # $SLURM_CONF as slurmd has it, else slurm.conf is in a usual place

    def with_slurm_conf(self, named: str) -> "NodePaths":
        """Return the same places with this $SLURM_CONF; "" for none. Pure."""
        return msgspec.structs.replace(self, slurm_conf=named)

    @property
    def etc(self) -> Path:
        return self.root / "etc/forestage"

    @property
    def config_parts(self) -> Path:
        return self.etc / "conf.d"

    @property
    def config_names(self) -> Path:
        """The names in it, for users, who cannot list it; see config/directories.py."""
        return self.run / "conf.d.json"

    @property
    def run(self) -> Path:
        """On a tmpfs: gone after a reboot, as jobs are. Users cannot list it."""
        return self.root / "run/forestage"

    @property
    def known_disks(self) -> Path:
        """Which disk each cache was made on, see cache/known_disks.py. It outlives a reboot."""
        return self.root / "var/lib/forestage/caches.json"

    @property
    def config_memo(self) -> Path:
        """What the configuration's files said, see config/memo.py."""
        return self.run / "config.json"

    @property
    def leases(self) -> Path:
        return self.run / "leases"

    @property
    def prolog(self) -> Path:
        """What Prolog= names. The packages make it when they are installed, and leave it there
        when they are removed: a Prolog that is missing drains its node."""
        return self.root / "usr/libexec/forestage/prolog"

    @property
    def epilog(self) -> Path:
        return self.root / "usr/libexec/forestage/epilog"

    @property
    def companion(self) -> Path:
        """The SPANK plugin, where it is built."""
        return self.root / "usr/lib/forestage/spank/forestage.so"

    @property
    def disabled(self) -> Path:
        """While it is there, no job is served; see config/switch.py."""
        return self.run / "disabled"

    @property
    def lasting_off_file(self) -> Path:
        """What `forestage off` writes: it counts as `disabled` does, and outlives a reboot."""
        return self.etc / "disabled"

    @property
    def loaded(self) -> Path:
        """The companion leaves it when Slurm loads it; see slurm/companion.py."""
        return self.run / "companion"

    @property
    def background_marks(self) -> Path:
        """Whose Prologs may end before their work does, see hooks/background_prolog.py."""
        return self.run / "background"

    def hook_call_mark(self, hook: str) -> Path:
        """What a Prolog or Epilog leaves when Slurm calls it (hooks/boundary), and a sweep."""
        return self.run / f"called.{hook}"

    @property
    def redirects(self) -> Path:
        """Where a redirect is made read-only before it is mounted over a job's path."""
        return self.run / "redirects"

    @property
    def mounting(self) -> Path:
        """Who mounts locks a byte of it; src/spank/task_namespace.c does, too."""
        return self.run / "mounting"

    @property
    def through(self) -> Path:
        """A directory for each image that read-through servers show, see cache/arrival_map.py."""
        return self.run / "through"

    @property
    def job_dir(self) -> Path:
        """Where a step's tasks see the job's own directory; an empty one on the node itself."""
        return self.root / "forestage/job"

    @property
    def served_sockets(self) -> Path:
        """Sockets of the files mounted in steps, see features/data/squashfs_server.py."""
        return self.run / "served"

    @property
    def images(self) -> Path:
        """A file for each step with an image of a registry, see features/registry/step_image.py. A
        user reaches
        their own by its name, and cannot list them."""
        return self.run / "images"

    @property
    def disk_errors(self) -> Path:
        """What is known of errors of the cache's disk, see cache/disk_errors.py."""
        return self.run / "disk.json"

    @property
    def store_check_mark(self) -> Path:
        """When this node's sweep looked at the store of images, see
        features/registry/store_commands.py."""
        return self.run / "collected"

    @property
    def probes(self) -> Path:
        """A file for each disk and server that is asked whether it answers, see system/probe.py."""
        return self.run / "probes"

    @property
    def claims(self) -> Path:
        """A lock for each redirect that is being unmounted, see bind/unmount.py. Not on the
        cache's disk, which may hang."""
        return self.run / "claims"

    @property
    def locks(self) -> Path:
        """The locks of commands, and of the parts of the minute's work (commands/tend.py).

        Not in `run` itself, see lock.held_for_work.
        """
        return self.run / "locks"

    @property
    def users(self) -> Path:
        """A folder for each user, with the events of their jobs, see events/user_files.py."""
        return self.run / "users"

    @property
    def nodes(self) -> Path:
        """The nodes that copies may ask besides their job's, see features/peers/node_list.py."""
        return self.run / "nodes.json"

    @property
    def proven_node(self) -> Path:
        """Which other node last proved its key, see features/peers/proven_node.py."""
        return self.run / "proven.json"

    @property
    def wrong_bytes_notes(self) -> Path:
        """A file for each key of which some node read wrong bytes, see
        features/peers/wrong_data_notices.py."""
        return self.run / "wrong"

    @property
    def silent_nodes(self) -> Path:
        """A file for each node without an answer, see features/peers/silent_nodes.py."""
        return self.run / "unanswered"

    @property
    def peer_sign(self) -> Path:
        """The sign of this node's peer service, see features/peers/activation.py."""
        return self.run / "peer.sign"

    @property
    def peer_counts(self) -> Path:
        """What the peer service counts."""
        return self.run / "peer.json"

    @property
    def events(self) -> Path:
        return self.root / "var/log/forestage/events.jsonl"

    @property
    def lost_events(self) -> Path:
        """Which events could not be recorded since the node booted, see events/losses.py."""
        return self.run / "lost-events.json"

    @property
    def tally(self) -> Path:
        """What was counted of the events, and how far; beside them, to go where they go."""
        return self.root / "var/log/forestage/tally.json"
