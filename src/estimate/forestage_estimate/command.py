"""The options of forestage-estimate, and whom it asks: sacct and stat(2). It writes no file."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forestage_estimate.accounting import Accounting, names_an_image, read, sacct
from forestage_estimate.figures import GIB, Sample, estimate, look
from forestage_estimate.page import page
from forestage_estimate.text import text

SECONDS = 60  # for one script
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40, "P": 1 << 50}


def bytes_of(written: str) -> int:
    """A size as `500G` or `1.5TiB`; units are binary."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?) ?([KMGTP]?)(?:I?B)?", written.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size such as 500G, got {written!r}")
    return int(float(match[1]) * UNITS[match[2]])


def range_of(written: str) -> tuple[int, ...]:
    """A size, or two: `5G-30G`."""
    return tuple(bytes_of(part) for part in written.split("-", 1))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forestage-estimate",
        description="What staging container images would have saved, by Slurm's accounting.",
        epilog="It reads sacct and the sizes of images, as its user, and writes no file."
        " Slurm shows a user the jobs of others only if PrivateData allows it.",
    )
    add = parser.add_argument
    add("--since", default="now-90days", help="as sacct's --starttime (%(default)s)")
    add("--until", default="now", help="as sacct's --endtime (%(default)s)")
    add("--cache", type=bytes_of, default=bytes_of("500G"), metavar="SIZE", help="of a node (500G)")
    add("--size", type=range_of, default=(), metavar="SIZE[-SIZE]", help="of images not seen here")
    add("--sample", type=int, default=300, metavar="N", help="scripts to read (%(default)s)")
    add(
        "--cold-seconds-per-gib",
        type=float,
        metavar="S",
        help="of a cold start, for node hours",
    )
    add("--from", dest="file", metavar="FILE", help="what --print-command has printed; - for stdin")
    add("--print-command", action="store_true", help="the sacct to run elsewhere, for --from")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all figures")
    form.add_argument("--html", action="store_true", help="a page with two plots, on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    given = options().parse_args(argv)
    command = sacct(given.since, given.until)
    if given.print_command:
        print("SLURM_TIME_FORMAT=%s", *map(_quoted, command))
        return
    try:
        accounting = _from_file(given.file) if given.file else _ask(command)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"forestage-estimate: {error} (run it where sacct works, or see --print-command)")
    if not accounting.jobs:
        sys.exit("forestage-estimate: no job has started then, or you may not see it (--since)")
    every = (start for job in accounting.jobs.values() for start in job.starts)
    paths = {start.image for start in every if start.is_path}
    sample = None if given.file else _sample(accounting, given.sample)
    files = look(sorted(paths), given.size)
    figures = estimate(accounting, files, given.cache, sample, given.cold_seconds_per_gib)
    if given.json:
        print(json.dumps(_plain(asdict(figures)), indent=1))
    else:
        sys.stdout.write(page(figures) if given.html else text(figures))


def _quoted(word: str) -> str:
    """A word for bash, in which $'\\x1f' is the separator."""
    return word if re.fullmatch(r"[\w/=,.:-]+", word) else "$" + ascii(word)


def _plain(value: Any) -> Any:
    """A range that is none, as a number."""
    if isinstance(value, dict):
        if value.keys() == {"low", "high"} and value["low"] == value["high"]:
            return value["low"]
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _from_file(name: str) -> Accounting:
    if name == "-":
        return read(sys.stdin.buffer)
    with Path(name).open("rb") as file:
        return read(file)


def _ask(command: Sequence[str]) -> Accounting:
    environ = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:
        lines: Iterable[bytes] = process.stdout or ()
        found = read(lines)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "sacct")
    return found


def _sample(accounting: Accounting, wanted: int) -> Sample | None:
    """Reads scripts of batch jobs whose rows name no image; None if Slurm keeps none."""
    jobs = [job for job in accounting.jobs.values() if job.is_batch and not job.starts]
    scripts = nodes = with_image = 0
    for job in random.Random(0).sample(jobs, min(wanted, len(jobs))):  # the same each time
        script = _script(job.number)
        if script is None:
            continue
        scripts += 1
        nodes += len(job.nodes)
        with_image += len(job.nodes) * names_an_image(script)
    return Sample(scripts, nodes, with_image) if scripts else None


def _script(number: str) -> str | None:
    """One job's, as the accounting has it with AccountingStoreFlags=job_script."""
    argv = ["sacct", "--batch-script", "--jobs", number]
    try:
        asked = subprocess.run(argv, stdout=subprocess.PIPE, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    found = asked.stdout.decode("utf-8", "replace")
    return found if "\n#!" in found else None
