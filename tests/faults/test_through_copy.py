"""A real copy and a real keeper: what a job reads through while its image is on its way."""

from __future__ import annotations

import msgspec
import pytest
from fault import Gate, Points, image, kill_stager

from forestage.clock import Clock
from forestage.config import Config
from forestage.slurm.hints import Hints
from forestage.slurm.job import Job
from forestage.stage import stager
from forestage.stage.stager import Channel, Message
from forestage.stage.task import Task
from forestage.units import Amount
from node import ALICE, Node, until
from through import MIB, SIZE, Shown, Through, read_fresh, reading

DATA = image(7, SIZE)


def start(node: Node, through: Through, **keys: object) -> Channel:
    """Starts a stager as a hook does."""
    room = {"sources": (str(node.shared),), "max_size": Amount(share=1.0), "min_free": Amount()}
    config = msgspec.structs.replace(Config(**room), chunk_size=MIB, **keys)
    job = Job(7, ALICE, "n1", "batch", "/", requests=(), saves=None, hints=Hints())
    here = msgspec.structs.replace(through.node, config=config, clock=Clock())
    channel = stager.start(Task(here, job, through.opened))
    assert channel.recv(60) == Message("started")
    return channel


def end(channel: Channel) -> str:
    message = channel.recv(120)
    assert message is not None
    return message.state


@pytest.mark.parametrize("keys", [{}, {"bandwidth": 4 * MIB}, {"digest": False}])
def test_bytes_are_right_before_during_and_after_the_copy(
    node: Node, shown: Shown, keys: dict[str, object]
) -> None:
    path = node.put("alice/image.sqsh", DATA)
    through = shown(path)
    with reading(path, DATA, 4), start(node, through, **keys) as channel:
        assert read_fresh(path) == DATA
        assert end(channel) == "published"
        assert read_fresh(path) == DATA
    assert not {file.name for file in through.spot.iterdir()} & {"pieces", "wanted"}


def test_job_reads_what_the_copy_has_and_the_rest_of_the_source(
    node: Node, shown: Shown, points: Points, gate: Gate
) -> None:
    path = node.put("alice/image.sqsh", DATA)
    points.at("chunk", gate, nth=3)
    through = shown(path)
    with start(node, through, threads=1) as channel:
        until(lambda: points.count("chunk") == 3, "three chunks")
        assert read_fresh(path) == DATA
        gate.open()
        assert end(channel) == "published"


def test_stager_killed_and_begun_anew_shows_no_wrong_byte(
    node: Node, shown: Shown, points: Points
) -> None:
    path = node.put("alice/image.sqsh", DATA)
    points.at("chunk", kill_stager, nth=4)
    through = shown(path)
    with reading(path, DATA, 4):
        with start(node, through) as channel, pytest.raises(EOFError):
            end(channel)
        assert read_fresh(path) == DATA
        points.calm()
        with start(node, through) as channel:
            assert end(channel) == "published"
        assert read_fresh(path) == DATA
