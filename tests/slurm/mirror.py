"""The Debian mirror that this machine's own apt uses, and the proxy that apt goes through.

debootstrap needs one mirror and reads neither apt's sources nor its proxy. A mirror that is not
Debian's own does no harm: debootstrap refuses what Debian's keys did not sign. Nor does one of
Ubuntu, which the environment names, as apt of a Debian machine knows none.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from urllib.parse import urlsplit

from host import ClusterError

SUITES = {"stable", "oldstable", "testing", "unstable", "bookworm", "trixie", "sid"}
UBUNTU = "FORESTAGE_TEST_UBUNTU"
SCHEMES = {"http", "https", "file"}  # of those that apt knows, what debootstrap can read


def mirror() -> str:
    """The first of apt's sources that has a release of Debian. Raises ClusterError without one."""
    shown = ["--no-release-info", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"]
    for line in _asked("apt-get", "indextargets", *shown, "Created-By: Packages").splitlines():
        uri, suite, component = line.split(" ")
        if urlsplit(uri).scheme in SCHEMES and suite in SUITES and component == "main":
            return uri.rstrip("/")
    raise ClusterError("no Debian mirror among apt's sources (apt-get indextargets)")


def ubuntu_mirror() -> str:
    """What FORESTAGE_TEST_UBUNTU names. Raises ClusterError without it."""
    if UBUNTU not in os.environ:
        raise ClusterError(f"no mirror of Ubuntu: {UBUNTU}=http://...")
    return os.environ[UBUNTU].rstrip("/")


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
    line = _asked("apt-config", "shell", "value", key)
    return "".join(shlex.split(line)).removeprefix("value=")


def _asked(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout
