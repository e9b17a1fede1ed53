"""What a sweep does for peers: wrong entries go, and the list of nodes is renewed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forestage.cache import evict
from forestage.features.peers import node_list, wrong_data_notices
from forestage.system import lock

if TYPE_CHECKING:
    from forestage.features.contexts import SweepFacts


def with_cache(facts: SweepFacts) -> Mapping[str, tuple[object, ...]]:
    """Evict entries of which another node has found chunks wrong; return the keys.

    What jobs hold stays until the next sweep, and so does its notice. Raises Failed, OSError.
    """
    node, me = facts.node, facts.slurm.node
    keys = [*wrong_data_notices.list_keys_with_notices(node.places)]
    found = [
        key for key in keys if wrong_data_notices.has_wrong_chunks(node.places, node.cache, key, me)
    ]
    if facts.dry_run:
        return {"evicted": tuple(found)}
    evicted = evict.evict_keys(node.cache, node.leases, found) if found else ()
    for key in keys:
        # A copy under way heeds it yet.
        if (key in evicted or key not in found) and lock.is_free(node.cache.key_lock(key)):
            (node.places.wrong_bytes_notes / key).unlink(missing_ok=True)
    return {"evicted": evicted}


def ask_slurm(facts: SweepFacts) -> Mapping[str, tuple[object, ...]]:
    """Renew the list of nodes if it is due. Raises SlurmError, OSError."""
    if not facts.dry_run:
        node_list.renew_if_due(facts.node, facts.slurm)
    return {}
