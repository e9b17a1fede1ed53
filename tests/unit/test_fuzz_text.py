"""Texts and file names of users: read as they were meant, and one line of the log."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from forestage import config, events
from forestage.cache import source_image
from forestage.cache.node import Node
from forestage.cache.part import PartRecord
from forestage.cache.source_image import SourceImage
from forestage.errors import ConfigError, Declined
from forestage.events import RequestOutcome
from forestage.hooks import request_results
from forestage.slurm import step_protocol
from forestage.slurm.job import IMAGE_OPTION, SAVE_OPTION, STAGE_OPTION_VARIABLE, Job
from forestage.sources.source import OpenImage
from forestage.stage import pipeline
from forestage.stage.task import CopyTask
from forestage.system.as_user import User
from properties import MORE, TEXT


@given(TEXT, TEXT, TEXT, TEXT, TEXT)
@example("", "./a", "", "/b\nc", "stage=/\udcff\n")
@hypothesis_settings(max_examples=100 * MORE)
def test_any_users_text_becomes_one_log_line_with_one_result_per_request(
    comment: str, option: str, saves: str, work_dir: str, words: str
) -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": "1",
        "SLURM_JOB_GID": "1",
        "SLURM_JOB_USER": "alice",
        "SLURM_JOB_COMMENT": comment,
        "SLURM_JOB_WORK_DIR": work_dir,
        IMAGE_OPTION: option,
        SAVE_OPTION: saves,
        STAGE_OPTION_VARIABLE: words,
    }
    job = Job.from_environ(environ)
    outcomes = []
    for asked in job.requests:
        try:
            path = source_image.resolve_requested_path(asked, job.work_dir)
        except Declined as declined:
            outcomes.append(request_results.make_error_outcome(asked, declined))
        else:
            assert path.startswith("/")
            assert not step_protocol.has_control_characters(path)
            assert len(os.fsencode(path)) < source_image.PATH_MAX
            outcomes.append(RequestOutcome("hit", request=asked.path, image=path))
    line = events.format_summary(job, outcomes, 1.0)
    assert line.isprintable()
    # Nobody forges a field: there are as many results as there are requests.
    assert _fields(line).count("result") == len(outcomes)
    msgspec.json.encode(outcomes)


def _fields(line: str) -> list[str]:
    """The names of a logfmt line's fields."""
    names, rest = [], line
    while rest:
        name, _, rest = rest.partition("=")
        names.append(name)
        if rest.startswith('"'):
            end = rest.index('"', 1) + 1
            assert rest[end : end + 1] in ("", " ")
            rest = rest[end + 1 :]
        else:
            rest = rest.partition(" ")[2]
    return names


@pytest.mark.parametrize("name", ["a\nprolog job=1 result=hit", 'a" copied=1', "\x1b[2J"])
def test_progress_line_of_a_stager_is_one_line_whatever_the_file_name(
    staging_node: Node, asking: Job, make_image: Callable[..., SourceImage], me: User, name: str
) -> None:
    wanted = make_image(path=f"/lustre/{name}")
    staging_node.cache.part(wanted.key).directory.mkdir()
    owner = PartRecord(1, "boot", wanted, 1 << 20, "chunks", 7, 0.0)
    line = pipeline.format_progress(
        CopyTask(staging_node, asking, OpenImage(wanted, me, -1)), owner
    )
    assert line.isprintable()
    assert _fields(line) == ["image", "key", "copied", "of", "rate"]


VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.dates()
    | st.binary(max_size=5)
    | TEXT
    | st.from_regex(r"[0-9]{1,25}(\.[0-9]+)? ?([KMGT]i?B|[dhms]|ms|%)?", fullmatch=True)
    | st.sampled_from(
        ["/a", "/a/../b", "//", "auto", "null", "on", "bind", "{node}:7", "[::1]:7", "[::1", "n:"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(config.KEYS)), VALUE)
@example("deadline", float("nan"))
@example("chunk_size", 10**5000)
@example("deadline", "71ms")
@example("max_stage_wait", "70.9h")
@example("deadline", 1e-05)
@example("cache", "/a: b")
@example("cache", "/a #b")
@example("sources", ["/a,b", "/c]", "/d: e"])
@hypothesis_settings(max_examples=150 * MORE)
def test_any_configuration_value_is_refused_or_shown_in_a_form_that_reads_back(
    name: str, raw: object
) -> None:
    key = config.KEYS[name]
    try:
        value = key.parse_value(raw)
    except ValueError as error:
        said = str(error)
    else:
        shown = key.format_value(value)
        assert shown.isprintable()
        assert key.parse_value(yaml.safe_load(shown)) == value
        return
    assert len(said) < 3000


LINES = st.lists(
    st.builds(
        "{}{}: {}".format,
        st.sampled_from(["", "  ", "    ", "- ", "? ", "&a ", "!!str "]),
        st.sampled_from([*config.KEYS, "partitions", "gpu", "<<", "1", "no", "~", "="]),
        st.one_of(
            st.sampled_from(["", "80%", "5G", "10m", "[/a, b]", "{a: 1}", "*a", "|", "'", "0b_"]),
            st.text(max_size=8),
        ),
    ),
    max_size=6,
).map("\n".join)


@given(st.one_of(LINES, st.text(), st.binary()))
@hypothesis_settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    max_examples=150 * MORE,
)
def test_any_configuration_file_loads_or_raises_config_error(
    tmp_path: Path, text: str | bytes
) -> None:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    (tmp_path / "forestage.yaml").write_bytes(raw)
    try:
        found = config.load_config(tmp_path)
    except ConfigError as error:
        said = error.one_line
    else:
        assert len(found.list_rows()) >= len(config.KEYS)
        return
    assert said.isprintable()
