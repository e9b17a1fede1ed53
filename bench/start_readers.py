"""The whole image read through its server against the same from the entry, for bench/start.

A step that started while the image was cold keeps the server until its end, as squashfuse does; one
that starts later has the entry itself. Both run on one node and read in turn, without any of it in
the page cache.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

MIB = 1 << 20
READERS = (1, 16)
ROUNDS = 5

Ask = Callable[[int], float]  # so many readers; bytes that all together have read in a second


def format_table(served: Ask, entry: Ask, forget: Callable[[], None]) -> Iterator[str]:
    yield "| readers | served MB/s | entry MB/s | x |"
    yield "|--:" * 4 + "|"
    for readers in READERS:
        pairs = []
        for _ in range(ROUNDS):
            forget()
            through = served(readers)
            forget()
            pairs.append((through, entry(readers)))
        ours, theirs = (statistics.median(column) / 1e6 for column in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        yield f"| {readers} | {ours:.0f} | {theirs:.0f} | {ratio:.2f} |"


def build_command(path: str) -> list[str]:
    """What such a step runs."""
    return [sys.executable, "-B", __file__, path]


@contextlib.contextmanager
def start_conversation(step: subprocess.Popen[str]) -> Iterator[Ask]:
    """How to ask a step that runs `build_command`; it ends with the block."""

    def ask(readers: int) -> float:
        assert step.stdin
        assert step.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the missing answer shows
            print(readers, file=step.stdin, flush=True)
        answer = step.stdout.readline()
        if not answer:
            _, said = step.communicate(timeout=60)
            raise SystemExit(f"a step that reads the image ended with {step.returncode}: {said}")
        return float(answer)

    try:
        ask(1)  # it has started
        yield ask
    finally:
        if step.poll() is None:
            step.communicate(timeout=60)


def read_with_readers(path: str, readers: int) -> float:
    """In the step. Each reader begins elsewhere, and reads all of it."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    blocks = -(-os.fstat(file).st_size // MIB)
    start = time.perf_counter()
    children = []
    for reader in range(readers):
        if (child := os.fork()) == 0:
            first = reader * blocks // readers
            for block in (*range(first, blocks), *range(first)):
                os.pread(file, MIB, block * MIB)
            os._exit(0)
        children.append(child)
    failed = sum(os.waitpid(child, 0)[1] for child in children)
    seconds = time.perf_counter() - start
    os.close(file)
    if failed:
        raise SystemExit("a reader failed")
    return readers * blocks * MIB / seconds


def main(arguments: Sequence[str]) -> None:
    for line in sys.stdin:
        print(read_with_readers(arguments[0], int(line)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
