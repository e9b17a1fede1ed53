"""Findings about images of registries: whether pyxis asks for them, and what an import needs."""

import stat
from collections.abc import Iterator

from forestage.admin.site import Plugin
from forestage.check.finding import Finding
from forestage.config import Config
from forestage.slurm.companion import is_importer
from forestage.system.tree import Files

IMPORTER = "/usr/lib/forestage/bin/forestage-importer"
SINCE = b"importer="  # in pyxis from 0.21 on
SHARED = 0o1777  # who may make a directory there, and who may take away another's


def findings(files: Files, pyxis: Plugin, config: Config, origin: str) -> Iterator[Finding]:
    """`origin` is the file that sets `registry:`. Nothing where the admin uses another importer."""
    program = pyxis.line.argument("importer")
    store = config.registry.store
    if not config.registry.enabled or (program and not is_importer(program)):
        return
    if not program:
        if store is not None:
            yield _not_asked(files, pyxis)
        return
    if not (files.mode(program) or 0) & 0o111:
        yield Finding(
            "importer-missing",
            "critical",
            f"{pyxis.line.where}: {program} is not there, or not executable",
            "Each step with an image of a registry fails",
            f"install forestage's package, or {pyxis.line.where}: importer={IMPORTER}",
        )
    if not files.program("enroot"):
        yield Finding(
            "enroot-missing",
            "critical",
            "enroot is not installed",
            "No image of a registry can be imported, and no container starts",
            "install enroot on every node",
        )
    if config.redirect != "spank":
        yield Finding(
            "registry-no-spank",
            "warning",
            f"importer= is forestage's, and redirect is {config.redirect}",
            "Images of registries are imported once, and read from the store by each node",
            "`redirect: spank`, with the companion in plugstack.conf before pyxis",
        )
    if store is not None:
        yield from _store(files, store, origin)


def _not_asked(files: Files, pyxis: Plugin) -> Finding:
    words = " ".join(("required", pyxis.line.path, *pyxis.line.arguments))
    if SINCE not in (files.data(pyxis.path) or b""):
        change = "install pyxis 0.21 or later"
    else:
        change = f"{pyxis.line.where}: {words} importer={IMPORTER}"
    return Finding(
        "registry-not-asked",
        "warning",
        f"registry.store is set, but {pyxis.line.where} has no importer=",
        "Each step on each node imports its image anew, 15 minutes for 30 GiB",
        change,
    )


def _store(files: Files, store: str, origin: str) -> Iterator[Finding]:
    mode = files.mode(store)
    if mode is None:
        yield Finding(
            "store-missing",
            "critical",
            f"the store {store} is not there",
            "Each node imports images for itself, once for each step",
            f"mount its file system, or mkdir -m 1777 {store}, or {origin}: registry.store",
        )
    elif stat.S_IMODE(mode) & SHARED != SHARED:
        yield Finding(
            "store-mode",
            "warning",
            f"the store {store} has mode {stat.S_IMODE(mode):04o}",
            "Users can make no directory of their own in it, or take away those of others",
            f"chmod 1777 {store}",
        )
