"""Users who mean harm: no effect but the original path, and root runs nothing of theirs."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from host import wait_until
from jobs import Site, device_and_inode
from spec import BOB, ClusterSpec
from steps import SHOW, accompanied, seen_at, served, wrong
from test_data import POINT, comment

from forestage.features.data.squashfs_server import PROGRAMS
from forestage.system.files import open_descriptor

MARK = "/shared/alice/root-was-here"
PRELOAD = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void mark(void)
{
    if (getuid() == 0 || geteuid() == 0)
        close(open("%s", O_CREAT | O_WRONLY, 0666));
}
"""
MODULE = f"import os\nif 0 in (os.getuid(), os.geteuid()): open({MARK!r}, 'w')\n"
LISTS = "/shared/alice/lists"
LIST = f"""
import ctypes, mmap, os, platform, signal, subprocess, sys, time
point = "/tmp/page"
os.makedirs(point)
os.makedirs("/tmp/of-page")
open("/tmp/of-page/page", "wb").write(os.urandom(4096))
subprocess.run(["mksquashfs", "/tmp/of-page", "/tmp/page.sqsh", "-quiet"], check=True)
server = subprocess.Popen(["squashfuse", "-f", "/tmp/page.sqsh", point])
while not os.path.ismount(point):
    time.sleep(0.05)
file = os.open(point + "/page", os.O_RDONLY)
page = mmap.mmap(file, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
there = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
server.send_signal(signal.SIGSTOP)
os.waitpid(server.pid, os.WUNTRACED)
folder = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
open({LISTS!r}, "w").close()
number = dict(x86_64=217, aarch64=61)[platform.machine()]  # getdents64(2)
ctypes.CDLL(None).syscall(number, folder, there, 4096)
"""
SHELL = f"test $(id -u) != 0 || touch {MARK}\n"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return accompanied(1)


@contextlib.contextmanager
def swapping(site: Site, path: str, targets: list[str]) -> Iterator[None]:
    """While it lasts, a loop of alice's makes `path` a link to each target in turn, by rename."""
    loop = (
        "import os, itertools\n"
        f"for n, target in enumerate(itertools.cycle({targets!r})):\n"
        f"    os.symlink(target, {path!r} + '.new')\n"
        f"    os.rename({path!r} + '.new', {path!r})\n"
    )
    swapper = site.cluster.popen(["python3", "-c", loop])
    try:
        yield
    finally:
        os.killpg(swapper.pid, signal.SIGKILL)
        swapper.communicate()
        for left in (path, f"{path}.new"):
            site.source(left).unlink(missing_ok=True)


def test_repeatedly_swapped_symlink_makes_no_step_read_another_image(spank: Site) -> None:
    own, other = spank.image("own"), spank.image("other", seed=1)
    secret = spank.image("secret", seed=2, owner=BOB, mode=0o600)
    for image, user in ((own, "alice"), (other, "alice"), (secret, "bob")):
        spank.srun(image, user=user)  # in the cache, so that it could be bound
    link, passwd = "/shared/alice/swapped.sqsh", "/etc/passwd"
    digests = {spank.sha256(path): path for path in (own, other)}
    step = f"srun -n8 --overcommit --container-image={link} sha256sum {own} {other}"
    steps = f"for n in 1 2 3 4 5; do {step} 2>/dev/null; done"
    results: list[str] = []
    with swapping(spank, link, [own, secret, other, passwd]):
        for _ in range(10):  # half of the targets may be had
            ran = spank.sbatch(steps)
            # Whatever lay there when it was bound: a task's two images are what they were.
            assert set(ran.stdout.splitlines()) <= {f"{d}  {path}" for d, path in digests.items()}
            results += [one.result for one in served(spank, ran.job, "n1")]
            if "hit" in results:
                break
    assert "hit" in results, "the companion found nothing to bind"
    found = seen_at(spank, link)
    assert len(found) >= 10, "the steps did not run"
    for one in found:
        if one.error is None and one.mount_point != "/":  # /etc/passwd, as it is
            assert one.mount_point in ("/shared", digests[one.sha256])
        assert one.error in (None, "Permission denied")
    assert spank.cached_paths() == sorted([own, other, secret])


def test_helper_run_as_root_executes_nothing_from_the_users_environment(spank: Site) -> None:
    image = spank.image("environment")
    place = Path("/shared/alice/evil")
    spank.source(str(place)).mkdir(exist_ok=True)
    for name in ("sitecustomize", "forestage", "msgspec", "os"):
        spank.cluster.write(str(place / f"{name}.py"), MODULE)
    spank.cluster.write(str(place / "shell"), SHELL)
    spank.cluster.write(str(place / "preload.c"), PRELOAD % MARK)
    library = place / "preload.so"
    build = ["gcc", "-shared", "-fPIC", "-o", str(library), str(place / "preload.c")]
    spank.cluster.run(build, user="root")
    evil = f"LD_PRELOAD={library} PYTHONPATH={place} PYTHONHOME={place} BASH_ENV={place}/shell"
    paths = f"ENV={place}/shell PATH={place}:$PATH LD_LIBRARY_PATH={place} TMPDIR={place}"
    # env: only the step is to have them. srun must not crash over its own Python or shell.
    job = spank.sbatch(f"env {evil} {paths} srun --container-image={image} {SHOW}")
    assert wrong(spank, image, spank.seen(job.job)) == []
    assert not spank.source(MARK).exists()
    spank.cluster.run(["sh", "-c", f"LD_PRELOAD={library} id"], user="root")
    assert spank.source(MARK).exists(), "the trap does not work"
    spank.source(MARK).unlink()


def test_steps_with_closed_standard_descriptors_read_the_copy(spank: Site) -> None:
    image = spank.image("closed")
    closed = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
    steps = [f"srun --container-image={image} {SHOW} {one}; echo $?" for one in closed]
    job = spank.sbatch("\n".join(steps))
    assert [line for line in job.stdout.splitlines() if line.isdigit()] == ["0"] * len(closed)
    assert wrong(spank, image, spank.seen(job.job)) == []


def test_step_in_a_deleted_directory_is_served_only_by_an_absolute_path(spank: Site) -> None:
    """Slurm goes to /tmp then, and so does pyxis."""
    image = spank.image("gone")
    steps = [
        f"srun --chdir=/shared/alice/d --container-image={one} {SHOW}"
        for one in (image, "../gone.sqsh")
    ]
    job = spank.sbatch("\n".join(["mkdir d; rmdir d", *steps, "true"]))
    absolute, relative = spank.seen(job.job)
    assert wrong(spank, image, [absolute]) == []
    assert relative.error == "No such file or directory"


def test_task_cannot_write_chmod_unmount_or_replace_the_copy(spank: Site) -> None:
    image = spank.image("mine")
    before = spank.sha256(image)
    tricks = [f"echo x >>{image}", f"chmod 777 {image}", f"umount {image}", f"mv {image} {image}.x"]
    # Outside of the container the task sees the bind itself.
    script = "; ".join(f"{trick} 2>/dev/null && echo done {trick}" for trick in tricks)
    job = spank.sbatch(f"srun --container-image={image} sh -c '{script}; true'")
    assert "done echo" not in job.stdout
    assert "done umount" not in job.stdout
    (key,) = spank.entries()
    copy = spank.cache().image_path(key)
    assert device_and_inode(copy) == spank.saw(job.job).file
    assert copy.stat().st_mode & 0o777 == 0o644
    late = spank.srun(image)
    assert spank.saw(late.job).sha256 == before


@contextlib.contextmanager
def listing(site: Site, folder: str) -> Iterator[None]:
    """While it lasts, a job of alice's lists a directory into memory that does not come."""
    site.source(LISTS).unlink(missing_ok=True)
    argv = ["srun", "--nodelist=n1", "--ntasks=1", "python3", "-c", LIST, folder]
    job = site.cluster.popen(argv)
    try:
        wait_until(site.source(LISTS).exists, 90, site.cluster.overview)
        yield
    finally:
        # Without its server the page is an error, and the look ends. By the host: what enters the
        # node looks names up in /run, and waits there with a hook that makes one.
        for pid in site.named("n1", "squashfuse"):
            process = site.cluster.host_path(f"/proc/{pid}", "n1")
            with open_descriptor(process, os.O_RDONLY | os.O_DIRECTORY) as server:
                signal.pidfd_send_signal(server, signal.SIGKILL)
        job.communicate()
        site.root(["umount", "/tmp/page"], "n1")
        site.root(["rm", "-r", "/tmp/page", "/tmp/of-page", "/tmp/page.sqsh"], "n1")


@pytest.mark.ci
@pytest.mark.parametrize("folder", ["/run", "/var/log"])
def test_lock_of_a_user_on_run_or_var_log_delays_no_job(site: Site, folder: str) -> None:
    """The list holds the directory's lock; mkdir(2) waits for it, whatever is there."""
    site.configure(redirect="spank")
    image = site.image("image", owner=BOB)
    site.srun(image, user="bob")
    with listing(site, folder):
        assert site.srun(None, "true", user="bob").code == 0
        ran = site.srun(image, user="bob")
        assert site.saw(ran.job).sha256 == site.sha256(image)


LEFT = "/shared/alice/became"
BECOMES = f"""#!/bin/sh
setsid sh -c 'echo >{LEFT}; exec sleep 4251' &
exec sleep 4252
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="inject.c is for x86_64")
def test_mounted_file_server_injected_with_user_code_ends_with_the_step(spank: Site) -> None:
    """They may trace it, have it be anything, and leave its session. Slurm's linuxproc finds none
    of that; its cgroups would end it, too."""
    image = spank.image("mounted")
    spank.cluster.run(["mkdir", "-p", POINT], user="alice")
    inject = Path(__file__).with_name("inject.c")
    subprocess.run(["gcc", "-o", spank.cluster.state / "inject", inject], check=True)
    spank.cluster.write("/shared/alice/becomes", BECOMES)
    spank.cluster.run(["chmod", "755", "/shared/alice/becomes"], user="root")
    with spank.holding(None, comment=comment(image).removeprefix("--comment=")):
        (pid,) = spank.named("n1", *PROGRAMS)
        argv = ["/var/lib/cluster/inject", pid, "/shared/alice/becomes"]
        spank.cluster.run(argv, user="alice", node="n1")
        wait_until(spank.source(LEFT).exists, 60, lambda: "it became nothing")
        assert len(sleeping(spank)) == 2
    wait_until(lambda: not sleeping(spank), 60, lambda: "it lives on")
    wait_until(lambda: not spank.named("n1", "forestage-init"), 60, lambda: "its init lives on")


def sleeping(site: Site) -> list[str]:
    look = ["pgrep", "-f", "sleep 425[12]"]
    return site.cluster.run(look, user="root", node="n1", check=False).stdout.split()
