"""The step hook: its answer to the companion, its limits, and what the user reads."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from forestage.cache.node import Node
from forestage.hooks import step, user_messages
from forestage.hooks.step import with_notes
from forestage.slurm.job import Job

Configured = Callable[..., Node]


@pytest.fixture
def configured(staging_node: Node) -> Configured:
    def configuring(**keys: object) -> Node:
        config = msgspec.structs.replace(staging_node.config, **keys)
        return msgspec.structs.replace(staging_node, config=config)

    return configuring


def run(
    node: Node, job: Job, say: user_messages.Say = pytest.fail, timeout: str = "60"
) -> step.StepAnswer:
    """What boundary does."""
    job, refusal = with_notes(node, job, None)
    done = step.step(node, job, step.limit_of(node, job, timeout, say, refusal), refusal)
    user_messages.tell(node, job, done.outcomes, say)
    return done


def test_step_without_an_image_has_no_event(configured: Configured, asking: Job) -> None:
    done = run(configured(), asking)
    assert (done.outcomes, done.answer) == ([], ("leave", "no-image"))
