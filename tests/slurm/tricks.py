"""What the jobs of hostile users do before their steps; each notes in a file that it was done.

huge        the comment names files of holes, one of 15 TiB and one larger than the cache
namespace   a process leaves the job, with a user's mount namespace that has the redirect in it
lease       one leaves the job with a write lease (F_SETLEASE) on the copy, if nobody reads that
fuse        a file system of the user's covers the folder of an image that is redirected there
renames     the folder of an image is renamed all the time, while steps ask for that image
parked      a write to an image of the user's is under way while a step asks for it, and lands later
sparse      the comment names a directory with a file of holes, larger than the cache
keeps       one leaves the job with a descriptor of the job's own directory, and of a copy
stopped     the squashfuse of a mounted file is stopped, and never goes on
escapes     it becomes a program that leaves its session, twice forked
above       a file system of the user's, which forges bytes, covers the directory above a source
holds       an image of the user's is read in a system call that does not end, while steps mount it
lists       one leaves the job that lists, reads and locks all of /run that the user may
registry    steps ask for images of a registry, and some are killed while theirs is imported
holes       steps read an image and a directory of a file system that lies about where holes are
tasks       a step of 200 tasks, on one node
shm         the job holds the lock of /dev/shm while it makes a name there, and a step starts
kernel      it has the kernel log its own words, which look like an error of the cache's disk

Nodes have, besides: many mounts (`furnish`), that file system, a home that answers after seconds,
and an /etc/group without a group that slurmctld knows.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import images
from jobs import Site
from registry import IMPORTS, STORE, Registry
from spec import BOB, CAROL

from parking import with_fuse

Trick = Literal[
    "",
    "huge",
    "namespace",
    "lease",
    "fuse",
    "renames",
    "parked",
    "sparse",
    "keeps",
    "stopped",
    "escapes",
    "above",
    "holds",
    "lists",
    "registry",
    "holes",
    "tasks",
    "shm",
    "kernel",
]
TRICKS: Sequence[Trick] = get_args(Trick)[1:]
BY_HINT = ("huge", "sparse", "keeps", "stopped", "escapes", "holes")
IN_STEPS = ("keeps", "stopped", "escapes")  # those that need the companion
TASKS = 200
# How many tasks of theirs look at the job's first picture.
ON_PICTURE: Mapping[Trick, int] = {"namespace": 1, "lease": 1, "tasks": TASKS, "shm": 1}
STEPS = 2  # that a trick has at the most
FOLDER = "odd"  # where a job has an image of its own: /shared/USER/odd-JOB

OF_HOLES: Mapping[str, int] = {  # the larger one is what ext4 takes
    "/shared/alice/huge.sqsh": 15 << 40,
    "/shared/bob/holes.sqsh": 57 << 20,
}
COVER = "/shared/alice/tiny.sqsh"  # a squashfs that can be mounted
SPARSE = "/shared/alice/sparse"  # with a file of holes
POINT = "/shared/alice/point"
PARKED = "parked.sqsh"  # what is written to, in a folder of the job's own
SITE = "/shared/site"  # anybody's; the source is below it
ABOVE = f"{SITE}/images/above.sqsh"
# What root has mounted over it on the nodes lies, on each node in a way of its own (farfs.c).
LIES = "/shared/lies"
LIED = f"{LIES}/lied.sqsh"
TREE = f"{LIES}/tree"
WORDS = ("nodata 1", "later 64", "same 1")
READ = "/shared/read"  # a line for each task that has read TREE, with the digest of all its files
SLOW_HOME = f"/home/{CAROL.name}"
HOME_MS = 2000  # that each look there takes
FAR_GID = 21101  # a group of which no node knows
FAR_MEMBERS = (BOB,)
NODE_GROUPS = "/etc/group.nodes"
SERVER = "farfs-of-root"
SERVERS = 2  # that a node has
LATEST = (PARKED, ABOVE.rpartition("/")[2])  # the last step is to be shown what LANDED says
HINTS: Mapping[Trick, str] = {
    "huge": ",".join(["", *OF_HOLES]),
    "sparse": f",{SPARSE}/",
    "keeps": " stage-dir=16M",
    "stopped": f",{COVER}@{POINT}",
    "escapes": f",{COVER}@{POINT}",
    "holes": f",{TREE}/",
}
LANDED = "/shared/landed"  # a line for each of these jobs, and what its file has in the end
HOST_MOUNTS = 2000  # that a node has besides, as one with many containers or an automounter
CROWD = "/mnt/crowd"  # where they are
TOOLS = 3  # images in the registry
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
# The write's bytes lie in a file of a squashfuse that is stopped meanwhile. It goes past the page
# cache, for which ext4 has to have the blocks already.
PARK = f"""\
import mmap, os, signal, subprocess, sys, time
path, folder = sys.argv[1:]
os.mkdir(folder)
quiet = {{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}}
server = subprocess.Popen(["squashfuse", "-f", {COVER!r}, folder], **quiet)
while not os.path.ismount(folder):
    time.sleep(0.01)
fd = os.open(f"{{folder}}/padding", os.O_RDONLY)
mapped = mmap.mmap(fd, 4096, prot=mmap.PROT_READ, offset=512 << 10)
os.kill(server.pid, signal.SIGSTOP)
before = os.stat(path).st_ctime_ns
if os.fork() == 0:
    os.pwrite(os.open(path, os.O_RDWR | os.O_DIRECT), mapped, 8192)
    os._exit(0)
while os.stat(path).st_ctime_ns == before:  # it has begun
    time.sleep(0.01)
print("parked", flush=True)
sys.stdin.readline()
os.kill(server.pid, signal.SIGCONT)
_, status = os.wait()
print("landed" if status == 0 else "failed", flush=True)
server.kill()
subprocess.run(["fusermount3", "-uz", folder])
"""
PARKING = f"""\
own=$PWD/{FOLDER}-$SLURM_JOB_ID
mkdir -p $own/tmp && cp --sparse=never {{image}} $own/{PARKED} && sync $own/{PARKED} || own=
if test -n "$own"; then
    coproc python3 /shared/park.py $own/{PARKED} $own/tmp/fuse
    read word <&${{{{COPROC[0]}}}}
    test "$word" = parked && srun --container-image=$own/{PARKED} true
    echo >&${{{{COPROC[1]}}}}
    read word <&${{{{COPROC[0]}}}}
    if test "$word" = landed; then
        echo parked >>{DONE}
        set -- $(sha256sum $own/{PARKED})
        echo $SLURM_JOB_ID $1 >>{LANDED}
        srun --container-image=$own/{PARKED} true
    fi
fi
"""
COVER_ABOVE = f"""\
exec 9>/shared/lock-$SLURMD_NODENAME
flock 9
/shared/farfs {SITE} /shared/forges {SITE} allow_other,default_permissions 9>&- &
one="srun --nodes=1 --ntasks=1 --nodelist=$SLURMD_NODENAME --overlap --container-image={ABOVE}"
until mountpoint -q {SITE}; do test -e /proc/$! && sleep 0.02 || break; done
mountpoint -q {SITE} && $one true && echo above >>{DONE}
fusermount3 -uz {SITE}
wait
set -- $(sha256sum {ABOVE})
echo $SLURM_JOB_ID $1 >>{LANDED}
$one true
exec 9>&-
"""
HOLDING = f"""\
{{own}}
mkdir $own/fuse && coproc /shared/park $own/{{name}} read $own/fuse
read word <&${{{{COPROC[0]}}}}
test "$word" = parked && srun --container-image=$own/{{name}} true && echo holds >>{DONE}
echo >&${{{{COPROC[1]}}}}
wait
"""
# Of who makes or looks for a name in that directory, each waits in the kernel until the list ends.
SHM = f"""\
own=$PWD/{FOLDER}-$SLURM_JOB_ID
mkdir -p $own/fuse && coproc /shared/park /dev/shm list $own/fuse
read word <&${{{{COPROC[0]}}}}
touch /dev/shm/forestage-load-$SLURM_JOB_ID && rm /dev/shm/forestage-load-$SLURM_JOB_ID &
test "$word" = parked && {{one}} true && echo shm >>{DONE}
echo >&${{{{COPROC[1]}}}}
wait
"""
# The user's own path is in what overlayfs says of it, as in messages of the kernel about a disk.
KERNEL = """\
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
ids = os.getuid(), os.getgid()
if libc.unshare(0x10020000):  # CLONE_NEWUSER | CLONE_NEWNS
    sys.exit(os.strerror(ctypes.get_errno()))
maps = ("setgroups", "deny"), ("uid_map", f"0 {ids[0]} 1"), ("gid_map", f"0 {ids[1]} 1")
for name, text in maps:
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
lower = f"lowerdir=/no I/O error\\, dev {sys.argv[1]}\\, sector 1 x"
libc.mount(b"overlay", b"/mnt", b"overlay", 0, lower.encode())
"""
SAYING = f"""\
disk=$(findmnt -n -o SOURCE -T /mnt/nvme)
python3 /shared/kernel.py ${{{{disk#/dev/}}}} && echo kernel >>{DONE}
"""
LIST = f"""\
until test -e {OVER}; do
    ls -lR /run
    find /run -type d,f -readable -exec flock --nonblock {{{{}}}} sleep 0.02 \\;
    find /run -type f -readable -exec cat {{{{}}}} +
done >/dev/null 2>&1 &
echo lists >>{DONE}
"""
PULL = f"""\
export STANDIN_LOG={IMPORTS}
tool=$1$((SLURM_JOB_ID % {TOOLS} + 1)):1
one="srun --nodes=1 --ntasks=1 --overlap --container-image=$tool"
timeout --signal=KILL 0.7 $one true
$one true && echo registry >>{DONE}
"""
READING = f"""\
set -- $(cat {TREE}/* | sha256sum)
echo $SLURM_JOB_ID $1 >>{READ}
"""
FILL = f"""\
mkdir {TREE} && cd {TREE} && head -c 1M /dev/urandom >full
truncate -s 1M holes && cat full >>holes && truncate -s 3M holes
"""
MOUNTING = f"""\
mount --bind {NODE_GROUPS} /etc/group
show() {{
    setsid --fork /shared/{SERVER} $1 $2 $1 allow_other,default_permissions </dev/null >$2.log 2>&1
    until grep -q " $1 fuse" /proc/self/mounts; do sleep 0.05; done
}}
show {LIES} /shared/lies-$(hostname)
show {SLOW_HOME} /shared/slow-$(hostname)
"""
CROWDING = f"""\
mkdir -p {CROWD} && mount -t tmpfs tmpfs {CROWD} && mkdir {CROWD}/at && cd {CROWD}
mount --make-private {CROWD}
seq {HOST_MOUNTS} | xargs mkdir -p
python3 -c 'import ctypes
mount = ctypes.CDLL(None).mount
for number in range(1, {HOST_MOUNTS} + 1):
    if mount(b"{CROWD}/at", b"{CROWD}/%d" % number, None, 4096, None):
        raise SystemExit(1)'
"""
KEEP = f"""\
exec 9<$1 8<$2
echo keeps >>{DONE}
until test -e {OVER}; do sleep 1; done
"""
TOUCH = """\
test -n "$FORESTAGE_DIR" || exit 0
head -c 1M /dev/zero >$FORESTAGE_DIR/file
setsid --fork sh /shared/keep.sh $FORESTAGE_DIR/file {image} </dev/null >/dev/null 2>&1
sleep 0.5
"""
# Of this user, whichever step's: one at a time, or a step would wait for what another has stopped.
STOP = f"""\
exec 9>/shared/lock-$SLURMD_NODENAME
flock 9
ls {POINT} >/dev/null
for pid in $(pgrep -u $(id -u) squashfuse); do
    tr '\\0' ' ' </proc/$pid/cmdline | grep -q /dev/fd/ && kill -STOP $pid && echo stopped >>{DONE}
done
"""
ESCAPE = f"""\
exec 9>/shared/lock-$SLURMD_NODENAME
flock 9
ls {POINT} >/dev/null
for pid in $(pgrep -u $(id -u) squashfuse); do
    tr '\\0' ' ' </proc/$pid/cmdline | grep -q /dev/fd/ && /shared/inject $pid /shared/escape.sh
done
"""
ESCAPED = f"""\
#!/bin/sh
echo escapes >>{DONE}
setsid sh -c 'setsid --fork sleep 4260; exec sleep 4261' </dev/null >/dev/null 2>&1 &
exec sleep 4262
"""
PROGRAMS = {"/shared/park.py": PARK, "/shared/keep.sh": KEEP, "/shared/stop.sh": STOP}
PROGRAMS |= {"/shared/escape.sh": ESCAPED, "/shared/become.sh": ESCAPE}
PROGRAMS |= {"/shared/read.sh": READING, "/shared/kernel.py": KERNEL}
PROGRAMS |= {"/shared/hold.sh": HOLD, "/shared/lease.py": LEASE, "/shared/cover.sh": COVERING}
# Slurm's linuxproc finds the children of the job's processes, and no others.
LEAVE = "setsid --fork {program} </dev/null >/dev/null 2>&1"
PRIVATE = "unshare --user --map-root-user --mount --propagation private sh /shared/hold.sh"
ONE = "srun --nodes=1 --ntasks=1 --overlap --container-image={image}"
MANY = ONE.replace("--ntasks=1", f"--ntasks={TASKS} --overcommit")
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
    "parked": PARKING,
    "sparse": f"srun true && echo sparse >>{DONE}\n",
    "keeps": f"srun --nodes=1 --ntasks=1 --overlap sh -c '{TOUCH}'\n",
    "stopped": "srun --nodes=1 --ntasks=1 --overlap sh /shared/stop.sh\n",
    "escapes": "srun --nodes=1 --ntasks=1 --overlap sh /shared/become.sh\n",
    "above": COVER_ABOVE,
    "holds": HOLDING.replace("{own}", OWN.rstrip("\n")),
    "lists": LIST,
    "registry": "sh /shared/pull.sh\n",
    "holes": f"srun --container-image={LIED} true && srun sh /shared/read.sh"
    f" && echo holes >>{DONE}\n",
    "shm": SHM.replace("{one}", ONE),
    "kernel": SAYING,
    "tasks": f"{MANY} true && echo tasks >>{DONE}\n",
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
    site.cluster.run(["chmod", "755", "/shared/escape.sh"], user="root")
    for path in (DONE, LANDED, READ):
        site.cluster.write(path, "", mode=0o666)
    inject = site.source("/shared/inject")
    subprocess.run(["gcc", "-o", inject, Path(__file__).with_name("inject.c")], check=True)
    for node in site.cluster.nodes:
        site.cluster.write(f"/shared/lock-{node}", "", mode=0o666)
    _prepare_above(site)
    _prepare_nodes(site)
    for folder in (POINT, SPARSE):
        site.cluster.run(["mkdir", "-p", folder], user="alice")
    site.cluster.run(["truncate", "-s", "200M", f"{SPARSE}/holes"], user="alice")
    site.image(COVER.rpartition("/")[2].removesuffix(".sqsh"))


def prepare_registry(site: Site, registry: Registry) -> None:
    """Images of a registry, a store for them, and the program that asks."""
    site.cluster.run(["mkdir", "-m", "1777", STORE], user="root")
    site.cluster.write(IMPORTS, "", mode=0o666)
    for tool in range(1, TOOLS + 1):
        registry.push(f"team/tool{tool}:1", f"tool{tool}", mib=2)
    site.cluster.write("/shared/pull.sh", PULL.replace("$1", f"{registry.host}#team/tool"))


def furnish(site: Site, node: str) -> None:
    """Gives the node, anew after each boot, HOST_MOUNTS mounts more, and what else it has."""
    site.root(["sh", "-ec", CROWDING + MOUNTING], node)


def _prepare_nodes(site: Site) -> None:
    """What `furnish` needs, and what lies on the file system that lies."""
    for node, words in zip(site.cluster.nodes, WORDS, strict=True):
        site.cluster.write(f"/shared/lies-{node}", f"{words}\n")
        site.cluster.write(f"/shared/slow-{node}", f"delay {HOME_MS}\n")
    site.cluster.run(["install", "-d", "-o", "alice", LIES], user="root")
    images.make_image(site.cluster, LIED, mib=3, seed=4)
    site.cluster.run(["sh", "-c", FILL])
    site.cluster.run(["cp", "/shared/farfs", f"/shared/{SERVER}"], user="root")
    known = site.cluster.read("/etc/group")
    site.cluster.write(NODE_GROUPS, known)
    members = ",".join(user.name for user in FAR_MEMBERS)
    site.cluster.write("/etc/group", f"{known}far:x:{FAR_GID}:{members}\n")


def _prepare_above(site: Site) -> None:
    site.cluster.write("/etc/fuse.conf", "user_allow_other\n")
    site.cluster.write("/shared/forges", "forges 1\n")
    site.cluster.write("/shared/forges.calls", "", mode=0o666)
    site.cluster.run(["install", "-d", "-m", "777", SITE], user="root")
    site.cluster.run(["install", "-d", f"{SITE}/images"], user="root")
    image = site.image("above", seed=3)
    site.cluster.run(["mv", image, ABOVE], user="root")
    for name in ("farfs", "park"):
        with_fuse(name, site.source("/shared"))


def end(site: Site) -> None:
    """Ends what has left its job, and takes off the users' file systems."""
    site.cluster.write(OVER, "")
    for node in site.cluster.nodes:
        table = (line.split() for line in site.cluster.mounts(node).splitlines())
        for point in [row[4] for row in table if f"/{FOLDER}-" in row[4] or row[4] == SITE]:
            site.root(["umount", "--lazy", point], node)
