"""One request from top to bottom: its lease, what is done for it or not, each error's outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from forestage.cache import redirect
from forestage.cache.image import Image
from forestage.cache.layout import Entry
from forestage.cache.lease import Lease, Use
from forestage.cache.node import Node
from forestage.cache.redirect import Bind
from forestage.clock import Deadline
from forestage.errors import Declined, Failed
from forestage.events import Outcome
from forestage.hooks import image
from forestage.hooks.image import Answer, Wait
from forestage.slurm.job import Job, Request
from forestage.stage import source, wait
from forestage.stage.source import OpenImage
from forestage.system import as_user, lock
from forestage.system.mounts import Mount

Patch = pytest.MonkeyPatch
Handle = Callable[..., Outcome]
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
def here(file: Path, look: Callable[[Path], OpenImage], publish: Callable[[Image], Entry]) -> None:
    """The image is in the cache already."""
    opened = look(file)
    publish(opened.image)
    opened.close()


@pytest.fixture
def node(staging_node: Node) -> Node:
    """Paths are left alone here; that they are redirected is in tests/hooks."""
    config = msgspec.structs.replace(staging_node.config, redirect="none", require_mount=False)
    return msgspec.structs.replace(staging_node, config=config)


def waiting(node: Node, in_vain: str = "release", copy: float = 600.0) -> Wait:
    end, limit = Deadline.after(600.0, node.clock), Deadline.after(copy, node.clock)
    return Wait(end, limit, in_vain)  # type: ignore[arg-type]


@pytest.fixture
def handle(node: Node, asking: Job, file: Path) -> Handle:
    def handling(
        path: str = "",
        in_vain: str = "release",
        refusal: Declined | None = None,
        job: Job = asking,
        config: dict[str, object] | None = None,
    ) -> Outcome:
        changed = msgspec.structs.replace(node.config, **(config or {}))
        here = msgspec.structs.replace(node, config=changed)
        request = Request(path or str(file), "option")
        return image.handle(here, job, request, waiting(node, in_vain), refusal).outcome

    return handling


def said(outcome: Outcome) -> tuple[str, str]:
    return outcome.result, outcome.reason


def held(node: Node) -> tuple[Use, ...]:
    lease = node.leases.read(7)
    return lease.uses if lease else ()


def test_cold_image_is_copied_and_leased_and_a_warm_one_is_a_hit(
    node: Node, handle: Handle, file: Path, key: str
) -> None:
    cold, warm = handle(), handle()
    assert (said(cold), cold.bytes, cold.redirect) == (("copied", ""), 5, "none")
    assert (said(warm), warm.bytes) == (("hit", ""), 0)
    for outcome in (cold, warm):
        assert (outcome.request, outcome.image, outcome.key, outcome.size) == (
            str(file),
            str(file),
            key,
            5,
        )
    assert held(node) == (Use(key),)
    assert abs(node.cache.stored_entries()[0].used - node.clock.wall()) < 3600


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Declined("no-room", "full"), ("declined", "no-room")),
        (Failed("copy", "killed"), ("failed", "copy")),
        (as_user.TooSlow("no answer"), ("declined", "source-hangs")),
        (lock.Busy("space.lock is held"), ("failed", "busy")),
        (OSError(5, "I/O error"), ("failed", "io")),
    ],
)
@pytest.mark.parametrize("in_vain", ["release", "keep"])
def test_error_is_an_outcome_and_the_lease_goes_unless_a_step_may_need_it(
    node: Node,
    handle: Handle,
    key: str,
    monkeypatch: Patch,
    error: Exception,
    expected: tuple[str, str],
    in_vain: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(wait, "obtain", fail)
    outcome = handle(in_vain=in_vain)
    assert said(outcome) == expected
    assert outcome.detail
    assert held(node) == ((Use(key),) if in_vain == "keep" else ())


def test_error_leaves_the_lease_of_an_earlier_request_for_the_same_image(
    node: Node, handle: Handle, here: None, key: str, monkeypatch: Patch
) -> None:
    handle()

    def fail(*_: object) -> None:
        raise Declined("no-room", "full")

    monkeypatch.setattr(wait, "obtain", fail)
    handle()
    assert held(node) == (Use(key),)


@pytest.mark.parametrize(
    ("in_vain", "on_deadline", "expected", "aborted", "leased"),
    [
        ("release", "continue", ("declined", "deadline"), False, False),
        ("release", "abort", ("declined", "deadline"), True, False),
        ("keep", "continue", ("declined", "deadline"), False, True),
        # The job's steps wait for it.
        ("hand-over", "abort", ("started", ""), False, True),
    ],
)
def test_wait_in_vain_leaves_what_the_hook_wants(
    node: Node,
    handle: Handle,
    monkeypatch: Patch,
    in_vain: str,
    on_deadline: str,
    expected: tuple[str, str],
    aborted: bool,
    leased: bool,
) -> None:
    def late(*_: object) -> None:
        raise Declined("deadline", "half of it is here")

    stopped: list[object] = []
    monkeypatch.setattr(wait, "obtain", late)
    monkeypatch.setattr(wait, "abort", lambda *_: stopped.append(1))
    outcome = handle(in_vain=in_vain, config={"on_deadline": on_deadline})
    assert said(outcome) == expected
    assert (bool(stopped), bool(held(node))) == (aborted, leased)


def test_job_that_holds_too_many_images_gets_no_more(
    node: Node, asking: Job, handle: Handle, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(image, "MAX_USES", 1)
    node.leases.write(Lease(7, asking.user, 0.0, str(node.cache.root), (Use("0a"),)))
    assert said(handle()) == ("declined", "too-many")


@pytest.fixture
def looks(monkeypatch: Patch) -> list[str]:
    """The paths that were opened as the user."""
    opened: list[str] = []
    real = source.open_as_user

    def noting(path: str, *rest: object) -> object:
        opened.append(path)
        return real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(source, "open_as_user", noting)
    return opened


@pytest.fixture
def elsewhere(monkeypatch: Patch) -> None:
    """The node has a redirect of another image."""
    bind = Bind(Mount(9, 1, "0:1", "/entries/0a/image", "/lustre/other"), "0a")
    monkeypatch.setattr(redirect, "binds", lambda cache: [bind])


def test_refused_request_is_not_looked_at_where_nothing_is_redirected(
    handle: Handle, looks: list[str]
) -> None:
    assert said(handle(refusal=REFUSAL)) == ("declined", "disabled")
    assert looks == []


def test_refused_request_is_looked_at_where_a_redirect_may_be_stale(
    key: str, node: Node, handle: Handle, looks: list[str], elsewhere: None, file: Path
) -> None:
    outcome = handle(refusal=REFUSAL)
    assert (said(outcome), outcome.key) == (("declined", "disabled"), key)
    assert looks == [str(file)]
    assert held(node) == ()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        # What is wrong with the path is no news to who is refused anyway ...
        (Declined("missing", "does not exist"), ("declined", "disabled")),
        (OSError(5, "I/O error"), ("declined", "disabled")),
        # ... but a stale redirect that stays is.
        (redirect.StillMounted(["/lustre/a"], 0), ("failed", "redirect")),
    ],
)
def test_refused_request_fails_only_where_an_outdated_file_stays(
    handle: Handle, elsewhere: None, monkeypatch: Patch, error: Exception, expected: tuple[str, str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(source, "open_as", fail)
    assert said(handle(refusal=REFUSAL)) == expected


def test_job_that_says_off_is_not_staged(
    node: Node, asking: Job, handle: Handle, here: None
) -> None:
    off = msgspec.structs.replace(asking.hints, off=True)
    assert said(handle(job=msgspec.structs.replace(asking, hints=off))) == ("declined", "off")
    assert held(node) == ()


def test_broken_cache_fails_a_file_and_declines_a_registry_image(
    node: Node, handle: Handle
) -> None:
    """With `on_error: drain` each job with a registry image would drain the node."""
    node.cache.root.chmod(0o777)
    assert said(handle()) == ("failed", "cache-not-ours")
    assert said(handle("docker://ubuntu")) == ("declined", "registry")


def test_path_with_control_characters_is_not_answered_to_the_companion(
    node: Node, handle: Handle, file: Path
) -> None:
    odd = file.rename(file.with_name("a\tuse"))
    (file.parent / "link").symlink_to(odd)
    path = str(file.parent / "link")
    assert said(handle(path, config={"redirect": "spank"})) == ("declined", "bad-path")
    assert said(handle(path)) == ("copied", "")


def test_answer_of_a_served_request_has_its_image(node: Node, asking: Job, file: Path) -> None:
    answer = image.handle(node, asking, Request(str(file), "option"), waiting(node))
    assert isinstance(answer, Answer)
    assert answer.image is not None
    assert answer.image.path == str(file)
    assert answer.outcome.wait > 0
