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

from forestage_estimate.accounting import (
    JobRecords,
    build_sacct_command,
    has_unrecorded_image,
    read_job_records,
)
from forestage_estimate.html_report import format_page
from forestage_estimate.savings import GIB, ScriptSample, estimate_savings, read_image_files
from forestage_estimate.text_report import format_text

SCRIPT_TIMEOUT_S = 60  # for one script
UNIT_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40, "P": 1 << 50}


def parse_size(text: str) -> int:
    """A size as `500G` or `1.5TiB`; units are binary."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,3})?) ?([KMGTP]?)(?:I?B)?", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"expected a size such as 500G, got {text!r}")
    return int(float(match[1]) * UNIT_BYTES[match[2]])


def parse_size_range(text: str) -> tuple[int, ...]:
    """A size, or two: `5G-30G`."""
    return tuple(parse_size(part) for part in text.split("-", 1))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forestage-estimate",
        description="What staging container images would have saved, by Slurm's accounting.",
        epilog="It reads sacct and the sizes of images, as its user, and writes no file."
        " Slurm shows a user the jobs of others only if PrivateData allows it.",
    )
    add = parser.add_argument
    add("--since", default="now-90days", help="as sacct's --starttime (%(default)s)")
    add("--until", default="now", help="as sacct's --endtime (%(default)s)")
    add(
        "--cache",
        type=parse_size,
        default=parse_size("500G"),
        metavar="SIZE",
        help="of a node (500G)",
    )
    add(
        "--size",
        type=parse_size_range,
        default=(),
        metavar="SIZE[-SIZE]",
        help="of images not seen here",
    )
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


def run_estimate(argv: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(argv)
    sacct_command = build_sacct_command(options.since, options.until)
    if options.print_command:
        print("SLURM_TIME_FORMAT=%s", *map(_quote_for_bash, sacct_command))
        return
    try:
        accounting = _read_file(options.file) if options.file else _run_sacct(sacct_command)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"forestage-estimate: {error} (run it where sacct works, or see --print-command)")
    if not accounting.jobs:
        sys.exit("forestage-estimate: no job has started then, or you may not see it (--since)")
    starts = (start for job in accounting.jobs.values() for start in job.starts)
    paths = {start.image for start in starts if start.is_path}
    sample = None if options.file else _sample_scripts(accounting, options.sample)
    files = read_image_files(sorted(paths), options.size)
    figures = estimate_savings(
        accounting, files, options.cache, sample, options.cold_seconds_per_gib
    )
    if options.json:
        print(json.dumps(_simplify_ranges(asdict(figures)), indent=1))
    else:
        sys.stdout.write(format_page(figures) if options.html else format_text(figures))


def _quote_for_bash(word: str) -> str:
    """A word for bash, in which $'\\x1f' is the separator."""
    return word if re.fullmatch(r"[\w/=,.:-]+", word) else "$" + ascii(word)


def _simplify_ranges(value: Any) -> Any:
    """A range that is none, as a number."""
    if isinstance(value, dict):
        if value.keys() == {"low", "high"} and value["low"] == value["high"]:
            return value["low"]
        return {key: _simplify_ranges(one) for key, one in value.items()}
    return [_simplify_ranges(one) for one in value] if isinstance(value, (list, tuple)) else value


def _read_file(name: str) -> JobRecords:
    if name == "-":
        return read_job_records(sys.stdin.buffer)
    with Path(name).open("rb") as file:
        return read_job_records(file)


def _run_sacct(command: Sequence[str]) -> JobRecords:
    environ = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as process:
        lines: Iterable[bytes] = process.stdout or ()
        records = read_job_records(lines)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "sacct")
    return records


def _sample_scripts(accounting: JobRecords, max_scripts: int) -> ScriptSample | None:
    """Reads scripts of batch jobs whose rows name no image; None if Slurm keeps none."""
    jobs = [job for job in accounting.jobs.values() if job.is_batch and not job.starts]
    scripts = nodes = with_image = 0
    for job in random.Random(0).sample(jobs, min(max_scripts, len(jobs))):  # the same each time
        script = _read_script(job.job_id)
        if script is None:
            continue
        scripts += 1
        nodes += len(job.nodes)
        with_image += len(job.nodes) * has_unrecorded_image(script)
    return ScriptSample(scripts, nodes, with_image) if scripts else None


def _read_script(job_id: str) -> str | None:
    """One job's, as the accounting has it with AccountingStoreFlags=job_script."""
    argv = ["sacct", "--batch-script", "--jobs", job_id]
    try:
        result = subprocess.run(argv, stdout=subprocess.PIPE, timeout=SCRIPT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    script = result.stdout.decode("utf-8", "replace")
    return script if "\n#!" in script else None
