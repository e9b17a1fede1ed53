"""What a sweep cleans up of images of registries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forestage.features.registry import step_files, store_commands
from forestage.features.registry.store_collection import CollectionResult

if TYPE_CHECKING:
    from forestage.commands.sweep import SweepReport
    from forestage.features.contexts import SweepFacts


def without_cache(facts: SweepFacts) -> Mapping[str, tuple[object, ...]]:
    """Delete the files of steps whose jobs are over. Raises OSError."""
    if not facts.dry_run:
        node = facts.node
        for path in step_files.list_leftovers(
            node.places, facts.jobs_with_lease, node.clock.wall()
        ):
            path.unlink(missing_ok=True)
    return {}


def afterwards(facts: SweepFacts) -> Mapping[str, tuple[object, ...]]:
    """Collect in the store of images, if it is this node's turn.

    Raises as `collect_some_users` does.
    """
    node = facts.node
    if facts.dry_run:
        return {}
    return {
        "collected": (*store_commands.collect_some_users(node.config, node.places, node.clock),)
    }


def fields() -> Mapping[str, str]:
    """Return the report's field for what went of users' directories in the store. Pure."""
    return {"collected": "problems"}


def lines(report: SweepReport) -> list[str]:
    """Return a line for each user whose directory in the store changed. Pure."""
    done = [one for one in report.added.get("collected", ()) if isinstance(one, CollectionResult)]
    return [f"store of {text}" for text in store_commands.format_result_lines(done, report.dry_run)]
