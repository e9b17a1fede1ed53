"""The health check of docs/operations.md, as slurmd runs it: a comment of the node, no drain."""

from __future__ import annotations

import re
import textwrap

import pytest
from host import wait_until
from jobs import Site, hooked
from spec import REPO, ClusterSpec

PROGRAM = "/etc/slurm/forestage-health"


@pytest.fixture(scope="module")
def cluster_spec() -> ClusterSpec:
    return hooked(HealthCheckProgram=PROGRAM, HealthCheckInterval="1", HealthCheckNodeState="ANY")


def script() -> str:
    text = (REPO / "docs/operations.md").read_text()
    (found,) = re.findall(
        r"^    #!/bin/sh\n    # /etc/slurm/forestage-health.*?exit 0\n", text, re.M | re.S
    )
    return textwrap.dedent(found)


def test_unusable_cache_is_the_nodes_comment_until_it_is_usable(site: Site) -> None:
    site.cluster.write(PROGRAM, script())
    site.root(["chmod", "0755", PROGRAM], "n1")

    def node() -> str:
        return site.root(["scontrol", "--oneliner", "show", "node", "n1"], "n1")

    site.srun(site.image("a"))
    site.root(["chmod", "0777", "/mnt/nvme/forestage"], "n1")
    wait_until(lambda: "Comment=forestage state=unusable" in node(), 60, node)
    site.root(["chmod", "0700", "/mnt/nvme/forestage"], "n1")
    wait_until(lambda: "Comment=" not in node(), 60, node)
    assert "State=IDLE" in node()
