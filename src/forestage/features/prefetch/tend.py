"""Prefetch as a part of the minute's work: one pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forestage.commands.tend import TendPart
from forestage.features.prefetch import prefetch_host

if TYPE_CHECKING:
    from forestage.config import Config
    from forestage.features.contexts import TendFacts
    from forestage.slurm.slurm_client import SlurmClient


def each_minute(facts: TendFacts) -> Iterator[TendPart]:
    """Yield a pass, which begins one copy at most and waits for none."""
    if facts.config is not None and facts.config.prefetch.host is not None:
        yield TendPart("prefetch", ("prefetch",), 30.0, is_idle=True)


def works_for_others(config: Config, slurm: SlurmClient) -> bool:
    """Return whether this is the host that reads Slurm's queue for all nodes."""
    host = prefetch_host.find_host(config)
    return host is not None and prefetch_host.is_prefetch_host(host.host, slurm)
