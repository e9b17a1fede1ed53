"""An image that somebody holds, so that nothing can be mounted over it, is in no step's way."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator

import pytest
from host import wait_until
from jobs import Site
from spec import INSIDE_STATE, ClusterSpec
from steps import accompanied
from suite import on_suite

from parking import with_fuse

POINT = "/tmp/held"
STEPS = 6
TASKS = 4

Holding = Callable[..., contextlib.AbstractContextManager[None]]


@pytest.fixture(
    scope="module", params=["bookworm", pytest.param("trixie", marks=pytest.mark.suite("trixie"))]
)
def cluster_spec(request: pytest.FixtureRequest, machine: None) -> ClusterSpec:
    spec = accompanied(1, UnkillableStepTimeout="10", KillWait="5")
    return spec if request.param == "bookworm" else on_suite(spec, request.param)


@pytest.fixture
def holding(spank: Site) -> Holding:
    """alice holds a file of hers while it lasts, from the login node: there is but one kernel."""
    with_fuse("park", spank.cluster.state)

    @contextlib.contextmanager
    def hold(path: str, *how: str) -> Iterator[None]:
        spank.cluster.run(["mkdir", "-p", POINT], user="alice")
        argv = [str(INSIDE_STATE / "park"), path, how[0], POINT, *how[1:]]
        process = spank.cluster.popen(argv, stdin=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "parked\n"
            yield
        finally:
            process.communicate()
        hung = "forestage-task"
        wait_until(lambda: not spank.named("n1", hung), 60, lambda: "a mounter lives on")

    return hold


def stuck(site: Site) -> list[str]:
    """The names of root's processes in D."""
    rows = site.root(["ps", "-U", "root", "-o", "stat=,comm="], "n1").splitlines()
    return [row.split()[1] for row in rows if row.startswith("D")]


def step(site: Site, image: str) -> list[str]:
    """What bob's tasks read."""
    argv = ["srun", f"--ntasks={TASKS}", "--overcommit", f"--comment=stage={image}"]
    ran = site.run([*argv, "sha256sum", image], user="bob")
    assert ran.code == 0, ran
    return [line.split()[0] for line in ran.stdout.splitlines()]


def test_image_repeatedly_held_by_its_owner_is_read_correctly_by_other_users_steps(
    spank: Site, holding: Holding
) -> None:
    image = spank.image("loop", mib=2)
    digest = spank.sha256(image)
    with holding(image, "read", "400"):
        for _ in range(STEPS):
            assert step(spank, image) == [digest] * TASKS
            assert "slurmstepd" not in stuck(spank)


def test_image_held_by_its_owner_is_read_from_the_source_and_the_node_is_not_drained(
    spank: Site, holding: Holding
) -> None:
    image = spank.image("held", mib=2)
    digest = spank.sha256(image)
    assert step(spank, image) == [digest] * TASKS  # it is in the cache now
    with holding(image, "read"):
        ran = spank.srun(image, "sh", "-c", "echo $FORESTAGE_RESULT", user="bob")
        assert (ran.code, ran.stdout) == (0, "mount-hangs\n"), ran
        assert "(mount-hangs)" in ran.stderr
        assert step(spank, image) == [digest] * TASKS
        assert stuck(spank) == ["forestage-task"]
        spank.cluster.wait_idle()  # a drained node is not idle


def test_image_being_written_by_its_owner_does_not_block_other_users_steps(
    spank: Site, holding: Holding
) -> None:
    """It is another image by its times, so that the copy is not used, or is made anew."""
    image = spank.image("written", mib=2)
    digest = spank.sha256(image)
    assert step(spank, image) == [digest] * TASKS
    with holding(image, "write"):
        assert step(spank, image) == [digest] * TASKS
        assert "slurmstepd" not in stuck(spank)
        spank.cluster.wait_idle()
