"""A node whose slurmd may open few files: jobs read the right bytes, and no hook fails."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import pytest

from forestage.events import RequestOutcome
from node import Node, content

FEW = 16  # that suffice for a copy; slurmd has 1024 or more


def run_with_few(limit: int, work: Callable[[], int]) -> int:
    """What a process returns that may open so few files, with none from before, as of slurmd's."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.closerange(3, 4096)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("limit", [10, FEW, 64, 256])
def test_prolog_with_a_low_open_file_limit_copies_or_fails_with_too_many_open_files(
    node: Node, limit: int
) -> None:
    node.configure(cold="wait", threads=8)
    data = content(1, 12 << 20)
    path = node.put("alice/image.sqsh", data)
    assert run_with_few(limit, lambda: node.prolog(1, path).code) == (1 if limit < FEW else 0)
    (outcome,) = node.outcomes("prolog", 1)
    assert isinstance(outcome, RequestOutcome)
    if limit < FEW:
        assert (outcome.result, outcome.redirect) == ("failed", "")
        assert "Too many open files" in outcome.detail
    else:
        assert (outcome.result, outcome.redirect) == ("copied", "mounted")
    assert path.read_bytes() == data
    assert run_with_few(max(limit, FEW), lambda: node.epilog(1).code) == 0
    assert (node.binds(), node.lease(1)) == ({}, None)
