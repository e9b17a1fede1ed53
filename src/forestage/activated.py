"""What do `forestage enable`, `disable` and `unredirect` print?"""

import msgspec

from forestage.activate import Plan
from forestage.system.terminal import Line, Piece

RECONFIGURE = "scontrol reconfigure"
RESTART = "systemctl restart slurmd"


class Changed(msgspec.Struct, frozen=True):
    """One file of the plan: its lines that go, its lines that come."""

    path: str
    removed: tuple[str, ...]
    added: tuple[str, ...]


class Told(msgspec.Struct, frozen=True):
    """A plan for tools; `done`: it was not only told. `refusals`: why nothing can be done."""

    done: bool
    files: tuple[Changed, ...]
    linked: tuple[str, ...]
    unlinked: tuple[str, ...]
    notes: tuple[str, ...]
    refusals: tuple[str, ...]


def document(plan: Plan, done: bool) -> Told:
    """Pure."""
    return Told(
        done=done,
        files=tuple(Changed(one.path, one.removed, one.added) for one in plan.edits),
        linked=tuple(one.path for one in plan.links),
        unlinked=tuple(one.path for one in plan.unlinks),
        notes=plan.notes,
        refusals=plan.refusals,
    )


def pieces(plan: Plan, done: bool, enabling: bool) -> list[Piece]:
    """Pure: the changes as a diff shows them, what there is to know, what comes next."""
    told: list[Piece] = []
    for edit in plan.edits:
        told.append(Line(edit.path, heading=True))
        told += [Line(f"- {line}", 2, whole=True) for line in edit.removed]
        told += [Line(f"+ {line}", 2, whole=True) for line in edit.added]
    told += [Line(f"+ {one.path} -> {one.target}", whole=True) for one in plan.links]
    told += [Line(f"- {one.path} -> {one.target}", whole=True) for one in plan.unlinks]
    told += [Line(note) for note in plan.notes]
    if plan.refusals:
        told += [Line(f"Refused: {why}") for why in plan.refusals]
        return [*told, Line("Nothing was done.")]
    if plan.empty:
        return [*told, Line("There is nothing to do.")]
    told += _beforehand(enabling)
    if not done:
        return [*told, Line("Nothing was done yet: add --yes.")]
    return [*told, Line(f"Done. Now: {_next(plan)}")]


def _beforehand(enabling: bool) -> list[Line]:
    if not enabling:
        return []
    return [
        Line("Every node that reads these files must have forestage: one without it will drain.")
    ]


def _next(plan: Plan) -> str:
    """Which command makes Slurm read it. slurmd reads prolog.d itself, at each job."""
    names = {one.path.rpartition("/")[2] for one in plan.edits}
    if any("plugstack" in name for name in names):
        return f"{RECONFIGURE}, and on each node {RESTART} (running jobs go on)"
    return RECONFIGURE if names else "nothing more, slurmd looks at each job"
