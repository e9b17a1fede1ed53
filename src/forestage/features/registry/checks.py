"""Findings about images of registries: whether pyxis asks for them, and what an import needs."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from forestage import events
from forestage.check import config_findings as of_settings
from forestage.check.finding import CheckFinding
from forestage.check.slurm_site import StackPlugin
from forestage.config import Config
from forestage.errors import Declined, Failed
from forestage.events import RequestOutcome
from forestage.features.contexts import CheckFacts
from forestage.features.registry import environment, reference
from forestage.features.registry.reference import TAG_DIGEST
from forestage.paths import NodePaths
from forestage.slurm.companion import is_own_importer
from forestage.system import as_user, run
from forestage.system.as_user import User
from forestage.system.terminal import format_local_time
from forestage.system.tree import RootedTree

IMPORTER = "/usr/lib/forestage/bin/forestage-importer"
IMPORTER_OPTION = b"importer="  # in pyxis from 0.21 on
SHARED_MODE = 0o1777  # who may make a directory there, and who may take away another's
NOBODY = User("", run.NOBODY, run.NOBODY)
TIMEOUT = 10.0  # seconds for a store, a registry, or enroot to answer
RECENT = 86400.0  # seconds since a registry was silent
MAX_REGISTRIES = 3  # registries that are connected to
HTTPS = 443
SILENT = "registry-silent"


def findings(facts: CheckFacts) -> Iterator[CheckFinding | str]:
    """Make and remove a directory in the store, and connect to registries: both as nobody."""
    pyxis = None if facts.site is None else facts.site.stack.pyxis
    if pyxis is None:
        return
    yield "the store of images"
    config, target = facts.settings.config, facts.target
    origin = of_settings.locate_config_file(facts.settings, target.places, "registry.store")
    yield from _find_importer_problems(facts.files, pyxis, config, origin)
    if config.registry.enabled:
        yield from _find_registry_problems(target.places, target.clock.wall())


def _find_importer_problems(
    files: RootedTree, pyxis: StackPlugin, config: Config, origin: str
) -> Iterator[CheckFinding]:
    """`origin` is the file that sets `registry:`. Nothing where the admin uses another importer."""
    program = pyxis.line.find_argument("importer")
    store = config.registry.store
    if not config.registry.enabled or (program and not is_own_importer(program)):
        return
    if not program:
        if store is not None:
            yield _make_not_asked_finding(files, pyxis)
        return
    if not files.is_executable(program):
        yield CheckFinding(
            "importer-missing",
            "critical",
            f"{pyxis.line.where}: {program} is not there, or not executable",
            "Each step with an image of a registry fails",
            f"install forestage's package, or {pyxis.line.where}: importer={IMPORTER}",
        )
    if not files.find_program("enroot"):
        yield CheckFinding(
            "enroot-missing",
            "critical",
            "enroot is not installed",
            "No image of a registry can be imported, and no container starts",
            "install enroot on every node",
        )
    else:
        yield from _find_enroot_problems(files)
    if config.redirect != "spank":
        yield CheckFinding(
            "registry-no-spank",
            "warning",
            f"importer= is forestage's, and redirect is {config.redirect}",
            "Images of registries are imported once, and read from the store by each node",
            "`redirect: spank`, with the companion in plugstack.conf before pyxis",
        )
    if store is None:
        yield _make_no_store_finding(files, config, origin)
    else:
        yield from _find_store_problems(files, store, config.cache, origin)


def _make_not_asked_finding(files: RootedTree, pyxis: StackPlugin) -> CheckFinding:
    words = " ".join(("required", pyxis.line.path, *pyxis.line.arguments))
    if IMPORTER_OPTION not in (files.read_bytes_or_none(pyxis.path) or b""):
        change = "install pyxis 0.21 or later"
    else:
        change = f"{pyxis.line.where}: {words} importer={IMPORTER}"
    return CheckFinding(
        "registry-not-asked",
        "warning",
        f"registry.store is set, but {pyxis.line.where} has no importer=",
        "Each step on each node imports its image anew, 15 minutes for 30 GiB",
        change,
    )


def _make_no_store_finding(files: RootedTree, config: Config, origin: str) -> CheckFinding:
    shared = [
        source
        for source in map(files.resolve_path, config.sources)
        if not _is_on_cache_disk(files, source, config.cache)
        and not _is_on_cache_disk(files, source, "/")
    ]
    if shared:
        place = f"{shared[0]}/forestage"
        change = f"mkdir -m 1777 {place}; {origin}: registry: {{store: {place}}}"
    else:
        change = f"{origin}: registry.store, a directory of mode 1777 that all nodes share"
    return CheckFinding(
        "no-store",
        "warning",
        "importer= is forestage's, and there is no store for what it imports",
        "Each step on each node imports its image anew, as without forestage",
        change,
    )


def _is_on_cache_disk(files: RootedTree, path: str, cache: str) -> bool:
    """Whether a path lies, or would lie, on the cache's file system."""
    here, there = (files.find_mount(files.resolve_path(one)) for one in (path, cache))
    return here is not None and there is not None and here.device == there.device


def _find_enroot_problems(files: RootedTree) -> Iterator[CheckFinding]:
    """Whether it starts, and imports what is meant."""
    program = files.find_program("enroot")
    try:
        ran = run.run_program(
            [str(files.host_path(program)), "version"], timeout=TIMEOUT, variables={"HOME": "/"}
        )
    except (Failed, OSError) as error:
        wrong = str(error)
    else:
        wrong = ran.format_ending() if ran.code else ""
    if wrong:
        yield CheckFinding(
            "enroot-fails",
            "critical",
            f"`enroot version` fails: {wrong}",
            "No image of a registry can be imported, and no container starts",
            f"{program} version, as a user, says what is wrong",
        )
        return
    found = environment.parse_release(ran.out)
    if (0, 0, 0) < found < TAG_DIGEST:
        yield CheckFinding(
            "enroot-old",
            "warning",
            f"enroot is {'.'.join(map(str, found))}",
            "It imports by the tag: the registry is asked once more after each import, and an image"
            " that was pushed meanwhile is imported for each step",
            "install enroot 4 on every node",
        )


class StoreTrial(msgspec.Struct, frozen=True):
    """A store as a user finds it: its mode, and why they can make nothing there."""

    mode: int
    wrong: str = ""


def _find_store_problems(
    files: RootedTree, store: str, cache: str, origin: str
) -> Iterator[CheckFinding]:
    found: StoreTrial | None = None
    try:
        found = as_user.run_in_child(
            lambda: (_try_store(files.host_path(store)), []), StoreTrial, TIMEOUT
        )[0]
    except as_user.ChildTimeout:
        yield CheckFinding(
            "store-hangs",
            "critical",
            f"the store {store} does not answer",
            "A step that wants an image of a registry waits for three minutes, then imports it",
            f"its file system, or {origin}: registry.store",
        )
        return
    except PermissionError as error:
        found = StoreTrial(SHARED_MODE, str(error.strerror))
    except (OSError, Declined):
        pass  # it is not there
    if _is_on_cache_disk(files, store, cache):
        yield CheckFinding(
            "store-local",
            "critical",
            f"the store {store} lies on the disk of the cache",
            "It is not used, and enroot imports: users could fill that disk in it, and all entries"
            " would be evicted",
            f"{origin}: registry.store on a file system that the nodes share",
        )
    elif found is None:
        yield CheckFinding(
            "store-missing",
            "critical",
            f"the store {store} is not there",
            "Each step on each node imports its image for itself",
            f"mount its file system, or mkdir -m 1777 {store}, or {origin}: registry.store",
        )
    elif found.mode & SHARED_MODE != SHARED_MODE:
        yield CheckFinding(
            "store-mode",
            "warning",
            f"the store {store} has mode {found.mode:04o}",
            "Users can make no directory of their own in it, or take away those of others",
            f"chmod 1777 {store}",
        )
    elif found.wrong:
        yield CheckFinding(
            "store-unwritable",
            "critical",
            f"a user cannot make a file in the store {store}: {found.wrong}",
            "Each step imports its image for itself",
            f"the directories above {store} and its mount: users must reach it, and write there",
        )


def _try_store(place: Path) -> StoreTrial:
    """What nobody, who stands for any user, can do there. In a child; raises OSError."""
    _become_nobody()
    mode = stat.S_IMODE(place.stat().st_mode)
    own = place / f".check-{os.urandom(8).hex()}"
    try:
        own.mkdir(mode=0o700)
        try:
            (own / "file").write_bytes(b"x")
        finally:
            (own / "file").unlink(missing_ok=True)
            own.rmdir()
    except OSError as error:
        return StoreTrial(mode, str(error.strerror))
    return StoreTrial(mode)


def _become_nobody() -> None:
    if os.geteuid() == 0:
        as_user.set_effective_user(NOBODY)


def _list_silent_registries(places: NodePaths) -> dict[str, float]:
    """Return when registries were asked in vain that have not answered a step since."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for event in events.read_events(places.events):
            outcome = event.outcome
            if isinstance(outcome, RequestOutcome) and (outcome.digest or outcome.reason == SILENT):
                with contextlib.suppress(Declined):
                    registry = reference.parse_reference(outcome.request).registry
                    found.pop(registry, None)
                    found |= {registry: event.time} if outcome.reason == SILENT else {}
    return found


def _find_registry_problems(places: NodePaths, now: float) -> Iterator[CheckFinding]:
    """Registries that did not answer the last step which asked them, and do not answer now.

    No other registry is connected to.
    """
    silent = _list_silent_registries(places)
    recent = [(name, when) for name, when in silent.items() if now - when < RECENT]
    for name, when in islice(sorted(recent), MAX_REGISTRIES):
        wrong = _explain_unreachable(name)
        if wrong:
            yield CheckFinding(
                "registry-silent",
                "warning",
                f"the registry {name} did not answer a step at {format_local_time(when)}, nor does"
                f" it now: {wrong}",
                "Its images cannot be imported; what `registry.offline` says is done",
                f"the network from this node to {name}, or the proxy in enroot.conf",
            )


def _explain_unreachable(registry: str) -> str:
    """Why nobody can connect to it; "" where they can."""
    host, _, port = registry.rpartition(":") if registry[-1:] != "]" else (registry, "", "")
    if not port.isdigit():
        host, port = registry, str(HTTPS)

    def work() -> as_user.ChildResult[str]:
        _become_nobody()
        address = host.strip("[]"), int(port)
        try:
            with contextlib.closing(socket.create_connection(address, TIMEOUT / 2)):
                return "", []
        except OSError as error:
            return error.strerror or "no answer", []

    try:
        return as_user.run_in_child(work, str, TIMEOUT)[0]
    except as_user.ChildTimeout:
        return "no answer"
    except Declined as error:
        return str(error)
