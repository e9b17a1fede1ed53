"""What does `forestage sweep` print?"""

from forestage.cli.exits import Exit
from forestage.sweep import Released, Swept
from forestage.system.terminal import Line, Piece, count, short


def pieces(done: Swept) -> list[Piece]:
    """Pure: what was done, or would be, and what could not be."""
    would = "would be " if done.dry_run else ""
    told = [_released(one, would) for one in done.released]
    told += [f"{path}: redirect {would}taken off, no lease asks for it" for path in done.redirects]
    told += [f"part {short(key)}: {would}deleted" for key in done.parts]
    told += [f"{short(key)}: {would}evicted, to make room" for key in done.evicted]
    told += [f"{short(key)}: would be read, as an earlier boot wrote it" for key in done.unproven]
    for one in done.verified:
        if one.result == "bad":
            end = f"stays: {one.stays}" if one.stays else "evicted"
            told.append(f"{short(one.key)}: bad ({one.detail or 'its chunks have changed'}), {end}")
    right = sum(1 for one in done.verified if one.result == "ok")
    if right:
        told.append(f"{count(right, 'entry', 'entries')} of an earlier boot read, and right")
    if done.doubt:
        told.append(f"No lease was released, as Slurm cannot tell: {done.doubt}")
    told += [f"Problem: {problem}" for problem in done.problems]
    told.append(f"{count(len(done.released), 'lease')} {would}released, {done.kept} kept.")
    return [Line(text) for text in told]


def exit_code(done: Swept) -> Exit:
    """Pure: bad bytes before all else, then what the node could not do, then Slurm's silence."""
    if done.bad:
        return Exit.BAD
    if done.problems:
        return Exit.FAILED
    return Exit.SLURM if done.doubt else Exit.OK


def _released(one: Released, would: str) -> str:
    redirects = f", {count(one.redirects, 'redirect')} taken off" if one.redirects else ""
    who = f" of {one.user}" if one.user else ""
    return f"job {one.job}{who}: lease {would}released ({one.why}){redirects}"
