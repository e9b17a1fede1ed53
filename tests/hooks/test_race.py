"""Two hooks at the same moment: one copy, and nobody sees half of it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from forestage.cache import evict, image, redirect
from forestage.cache.image import Image
from forestage.cache.layout import Cache, Entry
from forestage.stage import wait
from forestage.system import mounts
from node import ALICE, BOB, HANGS, Node, Ran, content

fork = multiprocessing.get_context("fork")


def together(*runs: Callable[[], Ran]) -> list[Ran]:
    """Runs hooks in processes of their own; each goes on only when all have found no entry."""
    barrier = fork.Barrier(len(runs), timeout=HANGS)
    answers = fork.SimpleQueue()
    find = Cache.find

    def child(number: int, run: Callable[[], Ran]) -> None:
        met = False

        def meeting(cache: Cache, image: Image) -> Entry | None:
            nonlocal met
            found = find(cache, image)
            if not met:
                met = True
                barrier.wait()
            return found

        Cache.find = meeting  # type: ignore[method-assign]
        answers.put((number, run()))

    children = [fork.Process(target=child, args=item) for item in enumerate(runs)]
    for process in children:
        process.start()
    for process in children:
        process.join(HANGS)
        assert process.exitcode == 0
    return [ran for _, ran in sorted((answers.get() for _ in runs), key=lambda item: item[0])]


def last(node: Node, job: int, path: Path, user: object = ALICE) -> Ran:
    """A Prolog whose events are told from those of one that runs beside it."""
    ran = node.prolog(job, path, user=user)  # type: ignore[arg-type]
    return Ran(ran.code, tuple(o for o in ran.outcomes if o.image == str(path)))


def test_two_prologs_for_one_image_make_one_copy_and_both_get_it(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    together(lambda: last(node, 1, path), lambda: last(node, 2, path, BOB))

    from forestage import events

    seen = {event.job: event.outcome for event in events.read(node.places.events)}
    assert sorted(o.result for o in seen.values()) == ["copied", "joined"]
    assert sorted(o.redirect for o in seen.values()) == ["kept", "mounted"]
    assert sum(o.bytes for o in seen.values()) == len(content())
    (key,) = node.entries()
    assert node.shows_entry(path, key)
    assert {bind.path for bind in redirect.binds(node.cache)} == {str(path)}
    assert len(redirect.binds(node.cache)) == 1
    node.epilog(1)
    assert node.shows_entry(path, key)
    node.epilog(2)
    assert node.binds() == {}


def test_prologs_for_different_images_do_not_wait_for_each_other(node: Node) -> None:
    paths = [node.put(f"alice/{n}.sqsh", content(n)) for n in (1, 2)]
    rans = together(lambda: last(node, 1, paths[0]), lambda: last(node, 2, paths[1]))
    assert [ran.outcome.result for ran in rans] == ["copied", "copied"]
    assert [path.read_bytes() for path in paths] == [content(1), content(2)]


@pytest.mark.parametrize("warm", [True, False])
def test_an_entry_is_not_evicted_between_stage_and_redirect(
    node: Node, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    path = node.put("alice/image.sqsh")
    key = node.identity(path).key
    if warm:
        node.prolog(1, path)
        node.epilog(1)
    obtain = wait.obtain
    evicted: list[tuple[str, ...]] = []

    def pressed(*args: object, **kwargs: object) -> object:
        result = obtain(*args, **kwargs)  # type: ignore[arg-type]
        evicted.append(evict.evict_keys(node.cache, node.leases, [key]))
        return result

    monkeypatch.setattr(wait, "obtain", pressed)
    assert node.prolog(2, path).outcome.result == ("hit" if warm else "copied")
    assert evicted == [()]
    assert node.shows_entry(path, key)


@pytest.mark.parametrize(
    ("times", "said", "shown"),
    [(1, ("copied", ""), True), (9, ("declined", "changed"), False)],
)
def test_a_bad_entry_that_verify_evicts_under_its_lease_is_staged_again_or_given_up(
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    said: tuple[str, str],
    shown: bool,
) -> None:
    path = node.put("alice/image.sqsh")
    key = node.identity(path).key
    obtain = wait.obtain
    calls = iter(range(10))

    def robbed(*args: object, **kwargs: object) -> object:
        result = obtain(*args, **kwargs)  # type: ignore[arg-type]
        if next(calls) < times:
            node.cache.retire(key)
        return result

    monkeypatch.setattr(wait, "obtain", robbed)
    ran = node.prolog(1, path)
    assert (ran.code, *ran.said) == (0, *said)
    assert node.shows_entry(path, key) if shown else node.shows_source(path)
    assert (node.lease(1) is not None) is shown


@pytest.mark.parametrize(
    ("how", "reason"), [("write", "changed"), ("replace", "changed"), ("remove", "missing")]
)
def test_a_source_changed_between_copy_and_redirect_is_not_covered(
    node: Node, monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    path = node.put("alice/image.sqsh", content(1))
    source = node.server / "alice/image.sqsh"
    mount = redirect.mount

    def late(*args: object) -> object:
        if how == "write":
            source.write_bytes(content(2))
        elif how == "replace":
            os.replace(
                node.server / node.put("alice/new", content(2)).relative_to(node.shared), source
            )
        else:
            source.unlink()
        return mount(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(redirect, "mount", late)
    ran = node.prolog(1, path)
    assert (ran.code, *ran.said) == (0, "declined", reason)
    assert node.binds() == {}
    assert how == "remove" or path.read_bytes() == content(2)


def test_the_lease_is_there_before_the_redirect(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Epilog takes off what no lease mentions, so the other order would lose a redirect."""
    path = node.put("alice/image.sqsh")
    bind = redirect._bind
    mentioned = []

    def spying(*args: object) -> None:
        mentioned.append(node.leases.redirected())
        bind(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(redirect, "_bind", spying)
    node.prolog(1, path)
    assert mentioned == [frozenset({str(path)})]


def test_no_bind_of_the_cached_file_is_ever_writable_for_the_job(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forestage.system import mounts

    path = node.put("alice/image.sqsh")
    mount = mounts.mount
    flags = []

    def spying(source: str, target: str, how: int) -> None:
        mount(source, target, how)
        if target.startswith("/proc/self/fd/"):
            flags.append(os.statvfs(path).f_flag & os.ST_RDONLY)

    monkeypatch.setattr(mounts, "mount", spying)
    node.prolog(1, path)
    assert flags == [os.ST_RDONLY]


def test_a_redirect_that_another_hook_clears_half_made_shows_the_source(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a change of `cache:` both hold a lock. It must not be the empty file that is bound."""
    from forestage.system import mounts

    path = node.put("alice/image.sqsh")
    mount, umount = mounts.mount, mounts.umount
    spots: list[Path] = []

    def cleared(source: str, target: str, how: int) -> None:
        mount(source, target, how)
        if how & mounts.MS_REMOUNT:
            spots.append(Path(target))
            umount(target)

    monkeypatch.setattr(mounts, "mount", cleared)
    assert node.prolog(1, path).said == ("failed", "io")
    monkeypatch.undo()
    assert path.read_bytes() == content()
    assert str(path) not in Path("/proc/self/mountinfo").read_text()
    assert len(spots) == 1
    assert not spots[0].exists()
    assert node.prolog(2, path).outcome.redirect == "mounted"


def test_a_mount_that_covers_another_ones_is_not_mistaken_for_ours(node: Node) -> None:
    """An admin's own bind over an image is neither taken off nor listed."""
    path = node.put("alice/image.sqsh", content(1))
    special = node.nvme / "special.sqsh"
    special.write_bytes(content(5))
    special.chmod(0o644)
    subprocess.run(["mount", "--bind", special, path], check=True)
    assert node.binds() == {}
    ran = node.prolog(1, path)
    assert ran.outcome.result == "copied"
    node.epilog(1)
    assert path.read_bytes() == content(5)


def test_a_redirect_that_goes_while_the_next_job_looks_costs_that_job_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look has opened the copy, and then the mount table no longer tells that it is one."""
    path = node.put("alice/image.sqsh")
    node.prolog(1, path)
    real = image._ours

    def after_its_end(caches: Sequence[str]) -> list[mounts.Mount]:
        if node.binds():  # in the look's own process, which acts as the user just now
            user = os.geteuid()
            os.seteuid(0)
            mounts.umount(str(path))
            os.seteuid(user)
        return real(caches)

    monkeypatch.setattr(image, "_ours", after_its_end)
    ran = node.prolog(2, path)
    assert (*ran.said, ran.outcome.redirect) == ("hit", "", "mounted")
    assert node.shows_entry(path, ran.outcome.key)
