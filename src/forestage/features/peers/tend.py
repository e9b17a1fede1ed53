"""The list of nodes as a part of the minute's work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forestage.commands.tend import SWEEP_INTERVAL, TendPart
from forestage.features.peers import node_list

if TYPE_CHECKING:
    from forestage.features.contexts import TendFacts


def each_minute(facts: TendFacts) -> Iterator[TendPart]:
    """Yield it where the list is due; again at each tenth run while Slurm does not answer.

    Raises OSError.
    """
    config = facts.config
    if config is None or facts.is_feature_host:
        return
    if node_list.should_renew(config, facts.places, facts.clock):
        yield TendPart(
            "nodes", ("sweep", "--quiet", "--only", "nodes"), every=SWEEP_INTERVAL, is_idle=True
        )
