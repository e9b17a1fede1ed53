"""What is wrong with the words of --stage and its kin: `forestage hints`, where a job is submitted.

The companion runs it in srun, sbatch and salloc, as the user (src/spank/stage_options.c). The same
words get the same answer on every host: nothing here looks at a file, at the configuration or at
Slurm. Nor is it what protects a node: the Prolog reads the words again.
"""

import sys
from collections.abc import Iterator, Sequence

from forestage.errors import Declined
from forestage.features.doors import SUBMITTED_MUST_BE_POSSIBLE, load_doors
from forestage.slurm.hints import OF_OPTION, REFUSED_EXIT_STATUS, NodeIndex, Request, parse_hints

SOME_NODE = NodeIndex(0, 1)  # {node} is not known yet, and means something on each


def list_refusals(words: Sequence[str]) -> tuple[str, ...]:
    """Pure: a sentence for each word that no node would serve; a word is `stage=/path`."""
    hints = parse_hints("", SOME_NODE, "\n".join(words))
    found = (f"--{problem.removeprefix(OF_OPTION)}" for problem in hints.problems)
    return (*found, *(said for one in hints.data for said in _list_impossible(one)))


def _list_impossible(request: Request) -> Iterator[str]:
    """Pure: why nobody could have it shown there, if that can be told by the names alone."""
    try:
        for must_be_possible in load_doors(SUBMITTED_MUST_BE_POSSIBLE):
            must_be_possible(request)
    except Declined as why:
        yield f"--stage={request.path}@{request.at}: {why}"


def main(words: Sequence[str]) -> int:
    """Prints what is refused, a line each; returns the exit status."""
    found = list_refusals(words)
    sys.stdout.write("".join(f"{line}\n" for line in found))
    sys.stdout.flush()
    return REFUSED_EXIT_STATUS if found else 0
