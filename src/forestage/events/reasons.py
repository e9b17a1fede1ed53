"""The reasons of outcomes, each with a sentence for people; the outcome's `detail` is added.

Those that one feature alone gives are in the `reasons.py` of its folder.
"""

from forestage.features import doors

FAILURES = frozenset(
    (
        *("busy", "cache-format", "cache-not-mounted", "cache-not-ours", "cache-other-disk"),
        *("config", "copy", "disk-full"),
        *("evicted-stays", "helper", "io", "lease-damaged", "loop", "program"),
        *("redirect", "slurm-conf"),
    )
)
"""Those of a `Failed`: the node or forestage is at fault. All others say why one was declined."""

REASONS = {
    "registry": "An image of a registry is staged when a step starts, where pyxis asks forestage's"
    " importer for it (`importer=`), with `redirect: spank` and a store (`registry: store:`).",
    "bare-name": "A name that begins neither with / nor with . is an image of a registry to pyxis,"
    " but a file of that name lies in the job's directory.",
    "wrong-bytes": "The entry's bytes or rights were not those of its source.",
    "bad-path": "This is no path that can be staged.",
    "missing": "The file was not there when the job started.",
    "no-permission": "The job's user could not read the file.",
    "not-a-file": "Only regular files are staged.",
    "not-squashfs": "With `redirect: bind` only squashfs images are staged, since everybody on the"
    " node would see the redirect.",
    "truncated": "The image is shorter than its own superblock says: it was not copied whole, or is"
    " still being written. No container starts from it, with forestage or without.",
    "set-id": "With `redirect: bind` nothing is staged that gives another user's rights, since the"
    " redirect would take them from everybody on the node.",
    "unlisted": "With `redirect: bind` only files are staged whose directory the user can list.",
    "written": "A process of this node had the file open for writing: a copy might lack what it"
    " writes, and a redirect for the whole node would be in its way.",
    "outside-sources": "The admin has not named this directory in `sources:`.",
    "empty": "There is nothing to copy.",
    "below-bind": "A redirect would have kept the job's container from starting.",
    "saved": "A job saves its container to this path; a redirect would be in its way.",
    "loop": "A loop device could not be set up or released.",
    "too-many": "The job holds as many images on this node as one job may.",
    "too-large": "The image is above the admin's `max_image_size:`, or has too many chunks.",
    "source-error": "The shared file system gave an error.",
    "source-hangs": "The shared file system did not answer in time.",
    "no-room": "The cache could not free enough space: its entries are leased or pinned, the image"
    " is larger than the cache may be, or other data fills its disk.",
    "deadline": "The copy takes longer than this job may wait (`stage-wait=` in the comment or the"
    " admin's `deadline:` moves that), or the time of its hook was used up before.",
    "no-through": "The step could not read through the copy while it was made.",
    "no-mount": "It could not be mounted in the step; its path or mount point is unchanged.",
    "mount-hangs": "A process held the file or directory, so that nothing could be mounted over it"
    " in time. `fuser -v PATH` on the node shows who has it open; a copy of your own or stage=off"
    " avoids it.",
    "mount-queue": "The node mounted for so many other tasks that a task of the step waited in vain"
    " for its turn. Fewer tasks at once on a node, or fewer mounts on it, avoid that.",
    "busy": "A lock of the node was held too long.",
    "changed": "The file was written to or replaced during the copy; a partial copy is not used.",
    "stopped": "The copy was stopped; what has arrived is kept until a job wants the image again.",
    "off": "The job asked for this with stage=off.",
    "other-job": "A job of another user has the same number, since slurmctld counts from the start"
    " again, and has not ended on this node.",
    "disabled": "The admin has switched staging off for this partition or node.",
    "access": "The file server grants this user more than the file's mode shows, so the local copy"
    " would not have been readable.",
    "bad-hint": "The comment names no image, but has a hint that could not be read.",
    "evicted-stays": "What was evicted could not be deleted.",
    "lease-damaged": "A lease file on the node cannot be read.",
    "config": "The configuration on the node could not be used: see `forestage config`.",
    "disk-errors": "The cache's disk has lost data. Nothing is served from it until the sweep has"
    " read every entry again; jobs read the shared path meanwhile.",
    "cache-hangs": "The cache's disk did not answer, as if it were frozen or its controller reset;"
    " the job read its original path. It is used again as soon as it answers.",
    "cache-not-mounted": "The cache's disk was not mounted: see `forestage status`.",
    "cache-other-disk": "Nothing was mounted where the cache's disk had been, and another disk lies"
    " below: `forestage check` says how to have that one used.",
    "cache-on-network": "The cache lies on a network file system, which is no disk of the node.",
    "cache-not-ours": "The cache's directory is not a directory of root's with mode 0700.",
    "cache-format": "The cache was written by another release.",
    "copy": "The copy ended with an error, or was killed.",
    "program": "A program that forestage needs is not installed.",
    "helper": "A process of forestage's own died.",
    "killed": "A process of forestage's own was killed, and killed again when it was tried once"
    " more: an epilog of the site's may kill all processes of a user.",
    "slow-names": "The node's name service did not say in time which groups and home directory the"
    " user has.",
    "acl": "The cache's file system cannot keep the file's access rights.",
    "redirect": "The local copy could not be mounted over the path, or be unmounted. Of an Epilog:"
    " the file server does not answer; a later Epilog unmounts it.",
    "slurm-conf": "Slurm's configuration could not be read.",
    "disk-full": "A file system of the node had no space left, or no inodes, for forestage's own"
    " files: the detail names one. `forestage check` says what to do.",
    "io": "The node had an I/O error.",
}


def collect_reasons() -> dict[str, str]:
    """Return each reason that this release knows, also those of features, with its sentence."""
    found = dict(REASONS)
    for reasons in doors.load_doors(doors.REASONS):
        found |= reasons.REASONS
    return found


def collect_failures() -> frozenset[str]:
    """Return those of them that are of a `Failed`."""
    return FAILURES.union(*(reasons.FAILURES for reasons in doors.load_doors(doors.REASONS)))
