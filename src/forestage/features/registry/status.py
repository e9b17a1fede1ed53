"""What `forestage status` says of images of registries: the steps that wait for one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forestage.features.contexts import StatusPart
from forestage.features.registry import step_files
from forestage.features.registry.step_files import StepImport
from forestage.system.terminal import OutputBlock, TextLine, TextTable, format_age, format_count

if TYPE_CHECKING:
    from forestage.features.contexts import StatusFacts


def read_status(facts: "StatusFacts") -> StatusPart:
    """Return the steps that wait for an image. Raises OSError."""
    found = step_files.list_imports(facts.node.places)
    return StatusPart({"imports": found}, after="starts", tables=format_imports(found, facts.now))


def format_imports(found: Sequence[StepImport], now: float) -> tuple[OutputBlock, ...]:
    """Return what is printed of them. Pure."""
    if not found:
        return ()
    rows = tuple(
        (
            f"{one.job}.{one.step}",
            one.user,
            format_age(now - one.since),
            one.where or "-",
            one.reference,
        )
        for one in found
    )
    columns = ("step", "user", "waits", "imported by", "image")
    number = format_count(len(found), "import")
    return (
        TextLine(f"{number} under way:", heading=True),
        TextTable(columns, rows, indent=2),
        *(TextLine(f"{one.job}.{one.step}: {one.said}") for one in found if one.said),
    )
