"""The reasons of outcomes, each with a sentence for people; the outcome's `detail` is added."""

FAILURES = frozenset(
    (
        *("busy", "cache-format", "cache-not-mounted", "cache-not-ours", "cache-other-disk"),
        *("config", "copy", "disk-full"),
        *("evicted-stays", "helper", "io", "job-dir", "lease-damaged", "loop", "program"),
        *("redirect", "slurm-conf"),
    )
)
"""Those of a `Failed`: the node or forestage is at fault. All others say why one was declined."""

REASONS = {
    "registry": "An image of a registry is staged when a step starts, where pyxis asks forestage's"
    " importer for it (`importer=`), with `redirect: spank` and a store (`registry: store:`).",
    "bare-name": "A name that begins neither with / nor with . is an image of a registry to pyxis,"
    " but a file of that name lies in the job's directory.",
    "bad-reference": "This is no reference to an image of a registry.",
    "registry-denied": "The registry refuses this user; `enroot import` would be refused as well.",
    "registry-missing": "The registry has no such image, or hides it from this user.",
    "registry-busy": "The registry gets too many requests from here (429).",
    "registry-silent": "The registry could not be reached, or failed.",
    "registry-odd": "The registry's answer was invalid.",
    "environment": "The job's environment is too large to be read.",
    "enroot": "enroot, or its configuration, could not be used as the job's user.",
    "registry-moved": "The tag was pushed again during the import, by an enroot that"
    " does not support digests.",
    "container": "The step's container is there already; its image is not looked at.",
    "import-failed": "`enroot import` ended with an error; the detail has its last words.",
    "store-full": "The store had no space for the image, or the user's quota was exhausted.",
    "enroot-full": "The disk for enroot's temporary files (ENROOT_TEMP_PATH) or for its layers"
    " (ENROOT_CACHE_PATH) was full, or the user's quota there was exhausted.",
    "store-gone": "The store of images could not be reached, or be written to.",
    "store-local": "The store of images lies on the disk of the node's cache, which users could"
    " fill.",
    "store-foreign": "The user's directory in the store is not theirs alone.",
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
    "no-companion": "Data shows in steps only through forestage's SPANK plugin, which this node's"
    " plugstack.conf does not load.",
    "not-a-directory": "The hint ends with a slash, as a directory's does; this is none.",
    "odd-file": "The directory holds something that is neither a file, a directory nor a link, or"
    " another file system; it is staged whole or not at all.",
    "too-many-files": "The directory has more files than the admin's `data: max_files:`, or than a"
    " step can look at in the time that it has.",
    "bad-look": "Another node of the job reported impossible contents of the directory.",
    "no-erofs": "The node's kernel lacks the file system of which copies of directories are made.",
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
    "job-dir": "The job has no directory of its own on this node.",
    "job-dir-full": "It did not fit into the job's own directory.",
    "not-put": "It could not be put into the job's own directory.",
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
