"""The tables and the plot behind bench/prefetch-policy: what is worth copying before a job starts.

Policies, replayed over queues recorded on a real slurmctld (bench/plans) and random ones:

    none         a job's own copy only
    popular      the images that started most often, on every node; blind to the queue
    everywhere   what waits, on every node at once
    queue        what waits, where it is likely enough, without a look at the plans
    plans        the same, and nodes that any of the job's plans has named are likelier
    oracle       what waits, on the nodes where it will start

cold: of all starts on nodes, those that did not find their image. copies, unused, needed: for each
start; unused copies are prefetches that no job used (a wrong guess, or too early), needed are cold
starts of what a prefetch had evicted. gain: saved cold starts, as a part of those that the oracle
saves. job, any: images read from the source, as a multiple of `none`, if a job's nodes help each
other, and if any node does that has the image. Mean over the seeds, and the range of gain.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import busy
from prefetch_model import QueueHistory, QueueShape, assign_images, read_recording, simulate_queue
from prefetch_replay import (
    POLICIES,
    PolicyReplay,
    PrefetchPolicy,
    ReplayResult,
    make_plan_policy,
    make_queue_policy,
)

from forestage.features.prefetch.policy import DEFAULT_RULES, PrefetchRules

REPO = Path(__file__).resolve().parents[1]
SMALL = QueueShape(nodes=16, minutes=400, queue=20, largest=6)
SHAPES = {
    "random": SMALL,
    "shared nodes": SMALL._replace(slots=4),
    "arrays, het jobs": SMALL._replace(arrays=0.25, het=0.15),
    "a reservation": SMALL._replace(reserved=0.25),
    "short queue": SMALL._replace(queue=5),
}
LARGE = QueueShape(nodes=2000, minutes=240, queue=150, largest=256, grain=15)
DISKS = ((20, 4), (40, 4), (200, 4), (40, 20), (200, 20), (40, 40), (200, 200))  # images, room
COLUMNS = "policy | cold % | copies | unused | needed | gain | range | job | any"
LEAST = (0.05, 0.1, 0.2, 0.3, 0.45, 0.7)  # of the curves; the default is among them
Runs = Mapping[str, Sequence[ReplayResult]]  # by policy, one for each seed


def replay_policies(
    histories: Sequence[QueueHistory],
    images: int,
    room: int,
    policies: Mapping[str, PrefetchPolicy],
) -> Runs:
    cases = [assign_images(history, images, seed) for seed, history in enumerate(histories)]
    return {
        name: [PolicyReplay(history, room, policy).run() for history in cases]
        for name, policy in policies.items()
    }


def list_gains(runs: Runs, name: str) -> list[float]:
    """Of the cold starts that the oracle saves, the part that this policy does; by seed."""
    of_all = zip(runs["none"], runs[name], runs["oracle"], strict=True)
    return [
        (none.cold - found.cold) / max(1, none.cold - best.cold) for none, found, best in of_all
    ]


def count_per_start(runs: Runs, name: str, field: str) -> float:
    return statistics.mean(float(getattr(found, field)) / found.starts for found in runs[name])


def format_rows(runs: Runs) -> Iterator[str]:
    for name in runs:
        gain = list_gains(runs, name)
        copies, unused, needed = (
            count_per_start(runs, name, field) for field in ("copies", "unused", "needed")
        )
        job, every = (
            count_per_start(runs, name, field) / max(1e-9, count_per_start(runs, "none", field))
            for field in ("by_job", "by_any")
        )
        yield (
            f"| {name} | {100 * count_per_start(runs, name, 'cold'):.0f}"
            f" | {copies:.2f} | {unused:.2f}"
            f" | {needed:.2f} | {statistics.mean(gain):.2f} | {min(gain):.2f}-{max(gain):.2f}"
            f" | {job:.2f} | {every:.2f} |"
        )


def print_case(title: str, histories: Sequence[QueueHistory], images: int, room: int) -> Runs:
    runs = replay_policies(histories, images, room, POLICIES)
    print(f"\n{title}: {images} images, a disk holds {room}, {len(histories)} seeds\n")
    print(f"| {COLUMNS} |\n|---{'|--:' * COLUMNS.count('|')}|")
    print("\n".join(format_rows(runs)), flush=True)
    return runs


def make_curves(
    histories: Sequence[QueueHistory], images: int, room: int
) -> dict[str, list[list[float]]]:
    """Unused copies for each start, and the gain; of ours for several values of `least`."""
    policies = dict(POLICIES)
    lines = {name: [name] for name in ("popular", "everywhere")}
    for name, made in (("queue", make_queue_policy), ("plans", make_plan_policy)):
        points = {f"{name} {least}": made(PrefetchRules(least=least)) for least in LEAST}
        lines[name] = list(points)
        policies |= points
    runs = replay_policies(histories, images, room, policies)
    return {
        name: [
            [count_per_start(runs, p, "unused"), statistics.mean(list_gains(runs, p))]
            for p in points
        ]
        for name, points in lines.items()
    }


def draw_plot(panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]) -> str:
    """Gain against unused copies, a panel for each case, as SVG; readable on light and on dark."""
    colours = {
        "queue": "#3b82f6",
        "plans": "#f59e0b",
        "popular": "#ef4444",
        "everywhere": "#10b981",
    }
    text = 'font-family="sans-serif" font-size="12"'
    drawn = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 330">']
    for panel, (title, lines) in enumerate(panels.items()):
        left, most = 40 + 340 * panel, max(point[0] for line in lines.values() for point in line)
        drawn.append(f'<text x="{left}" y="14" {text} fill="#888">{title}</text>')
        for tenth in range(0, 11, 2):
            up = 260 - 23 * tenth
            drawn.append(f'<path d="M{left} {up}h280" stroke="#888" stroke-opacity="0.4"/>')
            drawn.append(
                f'<text x="{left - 24}" y="{up + 4}" {text} fill="#888">{tenth / 10}</text>'
            )
        drawn.append(f'<text x="{left}" y="278" {text} fill="#888">0 unused copies a start</text>')
        drawn.append(f'<text x="{left + 250}" y="278" {text} fill="#888">{most:.2f}</text>')
        for name, line in lines.items():
            at = [(left + 280 * x / most, 260 - 230 * y) for x, y in line]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            drawn.append(f'<polyline points="{points}" fill="none" stroke="{colours[name]}"/>')
            drawn += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[name]}"/>' for x, y in at
            ]
            if name == "queue":
                x, y = at[LEAST.index(DEFAULT_RULES.least)]
                ring = f'cx="{x:.1f}" cy="{y:.1f}" r="7" fill="none"'
                drawn.append(f'<circle {ring} stroke="{colours[name]}"/>')
    for place, (name, colour) in enumerate(colours.items()):
        drawn.append(f'<text x="{40 + 90 * place}" y="310" {text} fill="{colour}">{name}</text>')
    drawn.append(f'<text x="400" y="310" {text} fill="#888">gain; in the ring: the default</text>')
    return "\n".join([*drawn, "</svg>", ""])


def main() -> None:
    takes = "2 minutes, with --large 10; rewrites docs/prefetch-policy.svg"
    options = busy.BenchOptions("prefetch-policy", __doc__, takes)
    options.add_argument("--seeds", type=int, default=4, help="of each random queue")
    options.add_argument("--minutes", type=int, default=SMALL.minutes, help="of each random queue")
    options.add_argument("--large", action="store_true", help="2,000 nodes besides")
    chosen, load, start = options.begin(), busy.MachineLoad(), time.process_time()
    random = {
        name: [
            simulate_queue(shape._replace(minutes=chosen.minutes), seed)
            for seed in range(1, 1 + chosen.seeds)
        ]
        for name, shape in SHAPES.items()
    }
    real = [read_recording(path) for path in sorted((REPO / "bench/plans").glob("*.json"))]
    first, *_ = [print_case("random", random["random"], *disk) for disk in DISKS]
    for images, room in ((20, 4), (40, 20)):
        for name in list(SHAPES)[1:]:
            print_case(name, random[name], images, room)
        print_case("recorded", real * 2, images, room)
    if chosen.large:
        for disk in ((40, 4), (200, 20)):
            print_case("2,000 nodes", [simulate_queue(LARGE, 1)], *disk)
    if (chosen.seeds, chosen.minutes) == (4, SMALL.minutes):
        panels = {
            f"{images} images, a disk holds {room}": make_curves(random["random"], images, room)
            for images, room in ((20, 4), (40, 20))
        }
        (REPO / "docs/prefetch-policy.svg").write_text(draw_plot(panels))
    gain = statistics.mean(list_gains(first, "queue"))
    cold = count_per_start(first, "queue", "cold") / count_per_start(first, "popular", "cold")
    print(
        load.last(f"\ncpu={time.process_time() - start:.0f}s gain={gain:.2f} vs_popular={cold:.2f}")
    )


if __name__ == "__main__":
    main()
