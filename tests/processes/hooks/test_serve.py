"""One request from top to bottom: its lease, what is done for it or not, each error's outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import squashfs
from forestage.bind import redirect, unmount
from forestage.bind.redirect import RedirectBind
from forestage.cache import lease as leases
from forestage.cache.layout import Cache, Entry
from forestage.cache.lease import EntryUse, Lease
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.clock import Deadline
from forestage.errors import Declined, Failed
from forestage.hooks import serve
from forestage.hooks.hook_deadlines import SHORT_WAIT, SMALL_IMAGE_BYTES, HookDeadlines
from forestage.hooks.request_results import RequestResult
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.sources import opening
from forestage.sources.source import OpenImage
from forestage.stage import copy_wait
from forestage.system import as_user, lock
from forestage.system.mounts import MountInfo
from forestage.views.through import keeper

Patch = pytest.MonkeyPatch
Handle = Callable[..., RequestResult]
REFUSAL = Declined("disabled", "`enabled: false`")


@pytest.fixture
def file(shared: Path) -> Path:
    (shared / "image.sqsh").write_bytes(b"12345")
    return shared / "image.sqsh"


@pytest.fixture
def key(file: Path, look: Callable[[Path], OpenImage]) -> Iterator[str]:
    opened = look(file)
    yield opened.image.key
    opened.close()


@pytest.fixture
def entry_in_cache(
    file: Path, look: Callable[[Path], OpenImage], publish: Callable[[SourceImage], Entry]
) -> None:
    """The image is in the cache already."""
    opened = look(file)
    publish(opened.image)
    opened.close()


@pytest.fixture
def node(staging_node: Node) -> Node:
    """Paths are left alone here; that they are redirected is in tests/hooks."""
    return staging_node.with_config(redirect="none", require_mount=False)


WAITS: float = 600.0


@pytest.fixture
def handle(node: Node, asking: Job, file: Path) -> Handle:
    def handling(
        path: str = "",
        copy: float | None = WAITS,
        refusal: Declined | None = None,
        job: Job = asking,
        config: dict[str, object] | None = None,
    ) -> RequestResult:
        here = node.with_config(**(config or {}))
        request = Request(path or str(file), "option")
        limit = HookDeadlines.from_seconds(node.clock, 600.0, copy, small=False)
        (answer,) = serve.serve_requests(here, job, [request], limit, refusal)
        return answer

    return handling


def said(answer: RequestResult) -> tuple[str, str]:
    return answer.outcome.result, answer.outcome.reason


def held(node: Node) -> tuple[EntryUse, ...]:
    lease = node.leases.find_lease(7)
    return lease.uses if lease else ()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Declined("no-room", "full"), ("declined", "no-room")),
        (Failed("copy", "killed"), ("failed", "copy")),
        (as_user.ChildTimeout("no answer"), ("declined", "source-hangs")),
        (lock.LockTimeout("space.lock is held"), ("failed", "busy")),
        (OSError(5, "I/O error"), ("failed", "io")),
    ],
)
@pytest.mark.parametrize("step", [None, 0])
def test_error_becomes_an_outcome_and_drops_the_lease_in_a_prolog_but_not_in_a_step(
    node: Node,
    handle: Handle,
    key: str,
    monkeypatch: Patch,
    asking: Job,
    error: Exception,
    expected: tuple[str, str],
    step: int | None,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(copy_wait, "wait_for_copy", fail)
    answer = handle(job=msgspec.structs.replace(asking, step=step))
    assert said(answer) == expected
    assert answer.outcome.detail
    assert held(node) == (() if step is None else (EntryUse(key),))


def test_error_keeps_the_lease_of_an_earlier_request_for_the_same_image(
    node: Node, handle: Handle, entry_in_cache: None, key: str, monkeypatch: Patch
) -> None:
    handle()

    def fail(*_: object) -> None:
        raise Declined("no-room", "full")

    monkeypatch.setattr(copy_wait, "wait_for_copy", fail)
    handle()
    assert held(node) == (EntryUse(key),)


# --- cold


@pytest.fixture
def slow(file: Path, monkeypatch: Patch) -> list[str]:
    """Copies are begun, in this order, and never end. The file is a squashfs image."""
    file.write_bytes(squashfs.beginning(bytes(64)))
    begun: list[str] = []

    @contextlib.contextmanager
    def begin(node: Node, job: Job, opened: OpenImage) -> Iterator[object]:
        begun.append(opened.image.path)
        yield object()

    def obtain(*given: object) -> None:
        deadline = given[4]
        assert isinstance(deadline, Deadline)
        begun.append("waited" if deadline.seconds_left() > 1 else "did not wait")
        raise Declined("deadline", "half of it is here")

    monkeypatch.setattr(copy_wait, "ensure_copy_started", begin)
    monkeypatch.setattr(copy_wait, "wait_for_copy", obtain)
    return begun


@pytest.fixture
def kept(monkeypatch: Patch) -> None:
    """Each image has a keeper."""
    monkeypatch.setattr(keeper, "start_keeper", lambda *_, wait: Path("/run/k/sock"))


def test_all_copies_of_a_job_are_started_before_the_first_wait(
    node: Node, asking: Job, shared: Path, slow: list[str]
) -> None:
    paths = [str(shared / name) for name in ("a", "missing", "b")]
    for path in (paths[0], paths[2]):
        Path(path).write_bytes(b"1")
    requests = [Request(path, "hint") for path in paths]
    answers = serve.serve_requests(
        node, asking, requests, HookDeadlines.from_seconds(node.clock, 60.0, 60.0)
    )
    assert slow == [paths[0], paths[2], "waited", "waited"]
    assert [said(answer) for answer in answers] == [
        ("declined", "deadline"), ("declined", "missing"), ("declined", "deadline")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("redirect", "step", "result", "shown", "noted"),
    [
        ("spank", None, "started", "spank", False),
        ("spank", 0, "through", "spank", False),
        ("bind", None, "started", "later", True),
        ("bind", 0, "started", "later", True),
        ("none", None, "started", "none", False),
        ("none", 0, "started", "none", False),
    ],
)
def test_cold_job_starts_without_its_copy_and_keeps_the_lease(
    node: Node, handle: Handle, asking: Job, file: Path, slow: list[str],
    kept: None, redirect: str, step: int | None, result: str, shown: str, noted: bool,
) -> None:  # fmt: skip
    job = msgspec.structs.replace(asking, step=step)
    answer = handle(copy=None, job=job, config={"redirect": redirect})
    assert slow[1:] == ["did not wait"]
    assert (answer.outcome.result, answer.outcome.redirect) == (result, shown)
    assert answer.socket == (Path("/run/k/sock") if shown == "spank" else None)
    assert [use.path for use in held(node)] == [str(file) if noted else ""]


@pytest.mark.parametrize("copy", [None, 5.0])
def test_save_path_of_a_job_is_neither_redirected_later_nor_read_through(
    node: Node, handle: Handle, asking: Job, file: Path, slow: list[str], kept: None,
    copy: float | None,
) -> None:  # fmt: skip
    job = msgspec.structs.replace(asking, saves=str(file), step=0)
    for way in ("bind", "spank"):
        answer = handle(copy=copy, job=job, config={"redirect": way})
        assert said(answer) == (("started", "") if copy is None else ("declined", "deadline"))
        assert answer.outcome.redirect == ("none" if copy is None else "")
        assert answer.socket is None
    assert [use.path for use in held(node)] == [""]


def test_step_that_saves_to_a_path_cancels_the_later_redirect_of_an_earlier_step(
    node: Node, handle: Handle, asking: Job, file: Path, slow: list[str]
) -> None:
    config: dict[str, object] = {"redirect": "bind"}
    handle(copy=None, config=config)
    assert [use.path for use in held(node)] == [str(file)]
    handle(copy=None, job=msgspec.structs.replace(asking, saves=str(file), step=0), config=config)
    assert [use.path for use in held(node)] == [""]


def test_job_that_waited_until_the_deadline_is_declined_and_gets_the_redirect_later(
    node: Node, handle: Handle, file: Path, slow: list[str]
) -> None:
    answer = handle(copy=5.0, config={"redirect": "bind"})
    assert said(answer) == ("declined", "deadline")
    assert [use.path for use in held(node)] == [str(file)]


def test_copy_that_ends_while_a_later_redirect_is_recorded_is_redirected_at_once(
    node: Node, handle: Handle, file: Path, slow: list[str], monkeypatch: Patch
) -> None:
    """The stager may have looked who asks before this job did."""
    monkeypatch.setattr(Cache, "find_entry", lambda *_: object())
    monkeypatch.setattr(redirect, "mount_redirect", lambda *_: "mounted")
    answer = handle(copy=None, config={"redirect": "bind"})
    assert (answer.outcome.result, answer.outcome.redirect) == ("joined", "mounted")


@pytest.mark.parametrize(
    ("copy", "small", "size", "left"),
    [
        (None, True, SMALL_IMAGE_BYTES, SHORT_WAIT),
        (None, True, SMALL_IMAGE_BYTES + 1, 0.0),
        (None, False, 1, 0.0),
        (9.0, False, 1, 9.0),
        (9.0, True, SMALL_IMAGE_BYTES + 1, 9.0),
    ],
)
def test_only_a_small_image_is_waited_for_if_the_job_does_not_ask_to_wait(
    node: Node, copy: float | None, small: bool, size: int, left: float
) -> None:
    limit = HookDeadlines.from_seconds(node.clock, 60.0, copy, small)
    assert limit.copy_deadline(size).seconds_left() == pytest.approx(left, abs=0.5)


def test_request_is_declined_if_the_jobs_lease_has_too_many_images(
    node: Node, asking: Job, handle: Handle, monkeypatch: Patch
) -> None:
    held = Lease(7, asking.user, 0.0, str(node.cache.root), (EntryUse("0a"),))
    node.leases.write_lease(held)
    monkeypatch.setattr(leases, "MAX_BYTES", node.leases.lease_file(7).stat().st_size)
    assert said(handle()) == ("declined", "too-many")
    assert node.leases.find_lease(7) == held


@pytest.fixture
def looks(monkeypatch: Patch) -> list[str]:
    """The paths that were opened as the user."""
    opened: list[str] = []
    real = opening.open_as_user

    def noting(path: str, *rest: object) -> object:
        opened.append(path)
        return real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(opening, "open_as_user", noting)
    return opened


@pytest.fixture
def elsewhere(monkeypatch: Patch) -> None:
    """The node has a redirect of another image."""
    bind = RedirectBind(MountInfo(9, 1, "0:1", "/entries/0a/image", "/lustre/other"), "0a")
    monkeypatch.setattr(redirect, "list_binds", lambda cache: [bind])


def test_path_of_a_refused_request_is_not_opened_if_the_node_has_no_redirect(
    handle: Handle, looks: list[str]
) -> None:
    assert said(handle(refusal=REFUSAL)) == ("declined", "disabled")
    assert looks == []


def test_path_of_a_refused_request_is_opened_if_the_node_has_a_redirect(
    key: str, node: Node, handle: Handle, looks: list[str], elsewhere: None, file: Path
) -> None:
    answer = handle(refusal=REFUSAL)
    assert (said(answer), answer.outcome.key) == (("declined", "disabled"), key)
    assert looks == [str(file)]
    assert held(node) == ()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        # What is wrong with the path is no news to who is refused anyway ...
        (Declined("missing", "does not exist"), ("declined", "disabled")),
        (OSError(5, "I/O error"), ("declined", "disabled")),
        # ... but a stale redirect that stays is.
        (unmount.UnmountError(["/lustre/a"], 0), ("failed", "redirect")),
    ],
)
def test_refused_request_fails_only_if_an_outdated_redirect_cannot_be_unmounted(
    handle: Handle, elsewhere: None, monkeypatch: Patch, error: Exception, expected: tuple[str, str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(opening, "open_image_for_hook", fail)
    assert said(handle(refusal=REFUSAL)) == expected


def test_unsafe_cache_fails_a_file_request_but_only_declines_a_registry_image(
    node: Node, handle: Handle
) -> None:
    """The node is not at fault for an image of a registry, which it would not serve anyway."""
    node.cache.root.chmod(0o777)
    assert said(handle()) == ("failed", "cache-not-ours")
    assert said(handle("docker://ubuntu")) == ("declined", "registry")
