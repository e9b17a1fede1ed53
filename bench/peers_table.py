"""The table and the plot behind bench/peers-model: source bytes and times, more and more nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import busy
import copies_model
from peers_model import PeersCase, PeersResult, PeersSimulation

MIB = 1 << 20
LINK = 3.125e9  # bytes a second: 25 Gbit/s
SOURCE = 2 * LINK
IMAGE = 1472 * 16 * MIB  # 23 GiB
CHUNKS = {1: 1472, 4: 1472, 16: 1472, 64: 1472, 256: 512, 1024: 128}
"""Of more nodes fewer and larger chunks, or the model would take hours; it makes them slower."""

FEW = 32  # chunks of 16 MiB, the image of 10 000 nodes
TROUBLES = {
    "all well": {},
    "1 % dead": {"dead": 0.01},
    "5 % dead": {"dead": 0.05},
    "1 % slow": {"slow": 0.01},
    "5 % slow": {"slow": 0.05},
    "half 5 s late": {"late": 0.5, "late_by": 5.0},
    "half read errors": {"unreadable": 0.5},
}


class PeersTableRow(NamedTuple):
    """One case and what came of it; `bound` in seconds: the image through the narrowest link."""

    nodes: int
    trouble: str
    bound: float
    found: PeersResult


def make_case(nodes: int, trouble: str) -> PeersCase:
    count = CHUNKS.get(nodes, FEW)
    chunk = IMAGE // count if nodes in CHUNKS else 16 * MIB
    return PeersCase(nodes, count, chunk, LINK, SOURCE)._replace(**TROUBLES[trouble])


def run_case(nodes: int, trouble: str) -> PeersTableRow:
    made = make_case(nodes, trouble)
    bound = made.chunks * made.chunk / min(LINK, SOURCE)
    return PeersTableRow(nodes, trouble, bound, PeersSimulation(made).run())


def list_troubles(nodes: int) -> list[str]:
    """Those that are worth their time: a hundredth of 16 nodes is none, of 1024 takes long."""
    if nodes < 16 or nodes == 10_000:
        return ["all well"]
    return [name for name in TROUBLES if nodes in (64, 256) or not name.startswith("1 %")]


def format_row(row: PeersTableRow) -> str:
    found = row.found
    direct = max(row.bound, row.bound * LINK * row.nodes / SOURCE)
    return (
        f"| {row.nodes} | {row.trouble} | {found.read:.2f} | {row.bound:.2f} | {direct:.1f}"
        f" | {found.median:.2f} | {found.late:.2f} | {found.late / row.bound:.2f} |"
    )


def draw_plot(rows: list[PeersTableRow]) -> str:
    """Seconds over the bound for each number of nodes, as SVG; readable on light and on dark."""
    width, height, left, top = 640, 320, 60, 20
    sizes = sorted({row.nodes for row in rows})
    colours = ("#3b82f6", "#f59e0b", "#ef4444", "#10b981", "#a855f7", "#64748b", "#ec4899")
    highest = 8

    def x(nodes: int) -> float:
        return left + (width - left - 160) * sizes.index(nodes) / max(1, len(sizes) - 1)

    def y(ratio: float) -> float:
        return height - 40 - (height - 40 - top) * min(ratio, highest) / highest

    grey = 'stroke="#888" stroke-opacity="0.4"'
    text = 'font-family="sans-serif" font-size="12" fill="#888"'
    drawn = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">']
    for ratio in range(highest + 1):
        at = y(ratio)
        drawn.append(f'<path d="M{left} {at:.1f}H{width - 160}" {grey}/>')
        drawn.append(f'<text x="{left - 24}" y="{at + 4:.1f}" {text}>{ratio}</text>')
    drawn += [f'<text x="{x(n):.0f}" y="{height - 20}" {text}>{n}</text>' for n in sizes]
    drawn.append(f'<text x="{left}" y="{height - 4}" {text}>nodes</text>')
    drawn.append(f'<text x="4" y="14" {text}>slowest 0.1 % : bound</text>')
    for number, trouble in enumerate(TROUBLES):
        line = [(x(r.nodes), y(r.found.late / r.bound)) for r in rows if r.trouble == trouble]
        points = " ".join(f"{across:.1f},{up:.1f}" for across, up in line)
        colour = colours[number]
        drawn.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        name = f'<text x="{width - 145}" y="{top + 20 * number + 10}" {text}'
        drawn.append(f"{name.replace('#888', colour)}>{trouble}</text>")
    return "\n".join([*drawn, "</svg>", ""])


def format_warm_copies(most: int) -> Iterator[str]:
    """How many copies find a warm node of another job, of those that some node could serve."""
    yield "| nodes | what | copies | a node had it | found | questions | tried |"
    yield "|--:|---|--:|--:|--:|--:|--:|"
    worlds: dict[str, dict[str, Any]] = {
        "5 % dead, a liar": {},
        "… without memory": {"remembers": False},
        "jobs of 1": {"width": 1},
        "jobs of 16": {"width": 16, "jobs": 1000},
        "one job a minute": {"spacing": 60.0},
    }
    rows = [(nodes, "5 % dead, a liar") for nodes in (200, 10_000)]
    rows[1:1] = [(2000, name) for name in worlds]
    for nodes, name in rows:
        if nodes <= max(200, most):
            found = copies_model.CopiesSimulation(
                copies_model.CopiesCase(nodes=nodes)._replace(**worlds[name])
            ).run()
            yield (
                f"| {nodes} | {name} | {found.copies} | {found.oracle} | {found.gain:.1%}"
                f" | {found.questions:.1f} | {found.tries:.2f} |"
            )


def main() -> None:
    options = busy.BenchOptions("peers-model", __doc__, "5 minutes; rewrites docs/peers-model.svg")
    options.add_argument("nodes", nargs="?", type=int, default=10_000, help="at most")
    most, load = options.begin().nodes, busy.MachineLoad()
    start, rows = time.process_time(), []
    print("| nodes | trouble | read : image | bound s | direct s | half s | 99.9 % s | : bound |")
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    for nodes in [size for size in (*CHUNKS, 10_000) if size <= most]:
        for trouble in list_troubles(nodes):
            rows.append(run_case(nodes, trouble))
            print(format_row(rows[-1]), flush=True)
    for line in format_warm_copies(most):
        print(line, flush=True)
    if most >= 10_000:
        (Path(__file__).parent.parent / "docs/peers-model.svg").write_text(draw_plot(rows))
    worst = max(row.found.read for row in rows if row.trouble == "all well")
    print(load.last(f"cpu={time.process_time() - start:.0f}s worst_read={worst:.2f}"))
    if worst > 1.1:
        raise SystemExit("peers-model: more than 1.1 images out of the source")


if __name__ == "__main__":
    main()
