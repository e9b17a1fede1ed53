"""The fail-open boundary: what slurmd gets back whatever happens inside."""

from __future__ import annotations

import pytest

from forestage.hooks import boundary as hooks
from forestage.hooks.boundary import HookRun, _run_to_exit_status
from node import Node


@pytest.fixture
def slurmd(node: Node, monkeypatch: pytest.MonkeyPatch) -> Node:
    """`_run_to_exit_status` as slurmd starts it for job 7, but on the test's node."""
    for name, value in node.environ(7, node.put("alice/image.sqsh")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("forestage.paths.NodePaths", lambda: node.places)
    monkeypatch.setattr(hooks, "has_no_work", lambda *_: False)
    return node


def test_prolog_and_epilog_main_mount_and_unmount_a_redirect(slurmd: Node) -> None:
    assert _run_to_exit_status("prolog") == 0
    assert len(slurmd.binds()) == 1
    assert _run_to_exit_status("epilog") == 0
    assert slurmd.binds() == {}


@pytest.mark.parametrize("name", ["prolog", "epilog"])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("two\nlines"), MemoryError(), OSError(5, "I/O"), ImportError("no yaml"),
     UnicodeEncodeError("utf-8", "\udcff", 0, 1, "no")],
)  # fmt: skip
def test_unexpected_exception_is_one_log_line_and_exit_0(
    slurmd: Node,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: object,
    error: Exception,
) -> None:
    def broken(*_: object) -> int:
        raise error

    monkeypatch.setattr(HookRun, "run", broken)
    assert _run_to_exit_status(name) == 0  # type: ignore[arg-type]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"result=failed reason={type(error).__name__} at={__file__}:" in err


def test_unexpected_exception_after_reading_the_configuration_exits_0(
    slurmd: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forestage.hooks import prolog

    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(prolog, "serve_prolog", broken)
    assert _run_to_exit_status("prolog") == 0


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_UID", "SLURM_JOB_GID"])
def test_hook_without_slurms_variables_exits_0_with_reason_joberror(
    slurmd: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.delenv(name)
    assert _run_to_exit_status("prolog") == 0
    assert "reason=JobError at=" in capfd.readouterr().err


def test_prolog_that_cannot_write_events_keeps_the_redirect(slurmd: Node) -> None:
    slurmd.places.events.parent.parent.mkdir(parents=True)
    slurmd.places.events.parent.touch()
    assert _run_to_exit_status("prolog") == 0
    assert len(slurmd.binds()) == 1
