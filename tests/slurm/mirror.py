"""The Debian mirror that this machine's own apt uses, and the proxy that apt goes through.

debootstrap needs one mirror and reads neither apt's sources nor its proxy. A mirror that is not
Debian's own does no harm: debootstrap refuses what Debian's keys did not sign.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from host import ClusterError

APT = Path("/etc/apt")
SUITES = {"stable", "oldstable", "testing", "unstable", "bookworm", "trixie", "sid"}
SCHEMES = {"http", "https", "file"}  # of those that apt knows, what debootstrap can read
OFF = {"no", "false", "without", "off", "disable"}  # apt's words for it


class Archive(NamedTuple):
    """One place to get packages from."""

    uri: str
    suite: str
    components: list[str]


def mirror(apt: Path = APT) -> str:
    """The first of apt's sources that has a release of Debian. Raises ClusterError without one."""
    for archive in _archives(apt):
        usable = urlsplit(archive.uri).scheme in SCHEMES
        if usable and archive.suite in SUITES and "main" in archive.components:
            return archive.uri
    raise ClusterError(f"no Debian mirror in {apt}/sources.list and {apt}/sources.list.d")


def proxy(uri: str) -> dict[str, str]:
    """The environment in which wget, which debootstrap runs, takes the way that apt would take.

    Empty where apt has no proxy: then whatever the environment says of one stays as it is.
    """
    where = urlsplit(uri)
    # As apt looks it up: https falls back to the proxy for http, a host's own comes first.
    keys = [f"Acquire::{scheme}::Proxy" for scheme in dict.fromkeys((where.scheme, "http"))]
    for key in keys:
        for name in (f"{key}::{where.hostname}", key):
            found = _configured(name)
            if found == "DIRECT":
                return {"no_proxy": where.hostname or ""}
            if found:
                return {f"{where.scheme}_proxy": found}
    return {}


def _configured(key: str) -> str:
    """A value of apt's configuration, empty where it has none."""
    asked = ["apt-config", "shell", "value", key]
    line = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    return "".join(shlex.split(line)).removeprefix("value=")


def _archives(apt: Path) -> Iterator[Archive]:
    """In the order in which apt reads its files (sources.list(5))."""
    folder = apt / "sources.list.d"
    for file in [apt / "sources.list", *sorted(folder.glob("*.list"))]:
        if file.exists():
            yield from _of_lines(file.read_text())
    for file in sorted(folder.glob("*.sources")):
        yield from _of_stanzas(file.read_text())


def _of_lines(text: str) -> Iterator[Archive]:
    for line in text.splitlines():
        # deb [ option=value … ] uri suite component …
        found = re.match(r"\s*deb\s+(?:\[[^]]*\]\s*)?([^\s#]+)\s+([^\s#]+)([^#]*)", line)
        if found:
            yield Archive(found[1], found[2], found[3].split())


def _of_stanzas(text: str) -> Iterator[Archive]:
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    for stanza in re.split(r"\n\s*\n", text):
        # A line that begins with a space belongs to the field above it.
        fields = re.findall(r"^([\w-]+):(.*(?:\n[ \t].*)*)", stanza, re.MULTILINE)
        words = {name.lower(): value.split() for name, value in fields}
        if "deb" not in words.get("types", ()) or OFF & set(words.get("enabled", ())):
            continue
        for uri in words.get("uris", ()):
            for suite in words.get("suites", ()):
                yield Archive(uri, suite, words.get("components", []))
