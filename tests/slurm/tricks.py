"""What the jobs of hostile users do before their steps; each notes in a file that it was done.

huge        the comment names files of holes, one of 15 TiB and one larger than the cache
namespace   a process leaves the job, with a user's mount namespace that has the redirect in it
lease       one leaves the job with a write lease (F_SETLEASE) on the copy, if nobody reads that
fuse        a file system of the user's covers the folder of an image that is redirected there
renames     the folder of an image is renamed all the time, while steps ask for that image
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from jobs import Site

Trick = Literal["", "huge", "namespace", "lease", "fuse", "renames"]
TRICKS: Sequence[Trick] = ("huge", "namespace", "lease", "fuse", "renames")
ON_PICTURE = ("namespace", "lease")  # those with a task that looks at the job's first picture
STEPS = 2  # that a trick has at the most
FOLDER = "odd"  # where a job has an image of its own: /shared/USER/odd-JOB

OF_HOLES: Mapping[str, int] = {  # the larger one is what ext4 takes
    "/shared/alice/huge.sqsh": 15 << 40,
    "/shared/bob/holes.sqsh": 57 << 20,
}
COVER = "/shared/alice/tiny.sqsh"  # a squashfs that can be mounted
DONE = "/shared/tricks"  # a line for each trick that was done
OVER = "/shared/over"  # once it is there, what has left its job ends

# Who keeps a read-through file keeps its keeper, and a user may have only so many of these.
HOLD = f"""\
echo namespace >>{DONE}
grep -q " fuse.forestage " /proc/self/mountinfo && exec sleep 5
until test -e {OVER}; do sleep 1; done
"""
LEASE = f"""\
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("lease", file=open({DONE!r}, "a"), flush=True)
time.sleep(4)
"""
COVERING = f"""\
echo $$ >$1.pid
exec squashfuse -f {COVER} $1
"""
PROGRAMS = {"/shared/hold.sh": HOLD, "/shared/lease.py": LEASE, "/shared/cover.sh": COVERING}
# Slurm's linuxproc finds the children of the job's processes, and no others.
LEAVE = "setsid --fork {program} </dev/null >/dev/null 2>&1"
PRIVATE = "unshare --user --map-root-user --mount --propagation private sh /shared/hold.sh"
ONE = "srun --nodes=1 --ntasks=1 --overlap --container-image={image}"
OWN = f"""\
own=$PWD/{FOLDER}-$SLURM_JOB_ID
mkdir -p $own && cp {{image}} $own/{{name}} || own=
"""
SCRIPTS: Mapping[Trick, str] = {
    "": "",
    "huge": f"echo huge >>{DONE}\n",
    "namespace": f'{ONE} sh -c "{LEAVE.format(program=PRIVATE)}"\n',
    "lease": f'{ONE} sh -c "{LEAVE.format(program="python3 /shared/lease.py {image}")}"\n',
    "fuse": f"""{OWN}
for step in 1 2; do test -n "$own" && srun --container-image=$own/{{name}} true; done
{LEAVE.format(program="sh /shared/cover.sh $own")}
for look in 1 2 3 4 5 6 7 8 9 10; do
    mountpoint -q $own && echo fuse >>{DONE} && break
    sleep 0.1
done
test $((SLURM_JOB_ID % 2)) = 0 && kill -9 $(cat $own.pid)
""",
    "renames": f"""{OWN}
while test -n "$own"; do mv $own $own.x; sleep 0.01; mv $own.x $own; sleep 0.01; done &
for step in 1 2; do test -n "$own" && srun --container-image=$own/{{name}} true; done
kill $! && echo renames >>{DONE}
""",
}


def script(trick: Trick, image: str) -> str:
    """Pure: the lines of the job's script; whether they succeed does not matter for its end."""
    return SCRIPTS[trick].format(image=image, name=image.rpartition("/")[2])


def prepare(site: Site) -> None:
    """Puts on the shared file system what the tricks need."""
    for path, size in OF_HOLES.items():
        with site.source(path).open("wb") as file:
            file.truncate(size)
    for path, text in PROGRAMS.items():
        site.cluster.write(path, text)
    site.cluster.write(DONE, "", mode=0o666)
    site.image(COVER.rpartition("/")[2].removesuffix(".sqsh"))


def end(site: Site) -> None:
    """Ends what has left its job, and takes off the users' file systems."""
    site.cluster.write(OVER, "")
    for node in site.cluster.nodes:
        table = (line.split() for line in site.cluster.mounts(node).splitlines())
        for point in [row[4] for row in table if f"/{FOLDER}-" in row[4]]:
            site.root(["umount", "--lazy", point], node)
