"""The lines between a worker and root's side."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.features.registry import worker_messages
from forestage.features.registry.worker_messages import (
    MAX_LINE_BYTES,
    DigestResolved,
    ImageReady,
    ImportOrder,
    ImportProgress,
    ImportRefused,
    ImportUnderWay,
    WorkerProtocolError,
)

DIGEST = "sha256:" + "0f" * 32
NAME = "0f" * 32 + "-x86_64-0123456789abcdef"


@pytest.mark.parametrize(
    "word",
    [
        DigestResolved(DIGEST, NAME),
        DigestResolved("", "job-0123456789abcdef"),
        ImageReady("/lustre/images/1000/" + NAME + ".sqsh"),
        ImportUnderWay("n1"),
        ImportUnderWay("n1", here=True),
        ImportProgress("3 of 20 layers, 1.5 GiB"),
        ImportRefused("registry-denied", "nvcr.io refuses: 403"),
    ],
)
def test_worker_message_round_trips_through_one_line(word: worker_messages.WorkerMessage) -> None:
    line = worker_messages.encode_message(word)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert worker_messages.decode_message(line) == word


def test_import_order_round_trips_through_its_argument() -> None:
    order = ImportOrder(reference="a#b:c", directory="/store", job="12", leads=False, host="n1")
    assert worker_messages.decode_order(worker_messages.encode_order(order)) == order


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, '{"reference": 1}', "nonsense"])
def test_invalid_import_order_raises_protocol_error(text: str) -> None:
    with pytest.raises(WorkerProtocolError):
        worker_messages.decode_order(text)


@given(st.text(max_size=8000), st.sampled_from([ImportUnderWay, ImportProgress]))
def test_worker_message_with_any_text_decodes_to_printable_text(
    text: str, kind: type[ImportProgress]
) -> None:
    word = worker_messages.decode_message(worker_messages.encode_message(kind(text)))
    assert isinstance(word, (ImportUnderWay, ImportProgress))
    shown = word.text if isinstance(word, ImportProgress) else word.where
    assert shown.isprintable()


@pytest.mark.parametrize("text", ["\x1b" * 5000, "\U0010ffff" * 5000, "😀" * 5000, '"\\' * 5000])
def test_worker_message_with_a_very_long_text_fits_the_longest_line(text: str) -> None:
    assert (
        len(worker_messages.encode_message(ImportRefused("import-failed", text))) <= MAX_LINE_BYTES
    )


@pytest.mark.parametrize("raw", ["\x1b[31mred", "two\nlines", "\u202eright to left"])
def test_control_characters_in_a_worker_message_are_escaped(raw: str) -> None:
    line = json.dumps({"type": "progress", "text": raw}).encode()
    word = worker_messages.decode_message(line)
    assert isinstance(word, ImportProgress)
    assert word.text.isprintable()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"null",
        b"\xff\xfe",
        b"[" * 4000,
        b'{"type":"root","text":"x"}',
        b'{"type":"present","path":"relative"}',
        b'{"type":"present","path":"/with\\nnewline"}',
        b'{"type":"present","path":"/nul\\u0000"}',
        b'{"type":"resolved","digest":"sha256:00","name":"x"}',
        b'{"type":"resolved","digest":"","name":"../x"}',
        b'{"type":"resolved","digest":"","name":".x"}',
        b'{"type":"resolved","digest":"","name":"a/b"}',
        b'{"type":"resolved","digest":"","name":"x\\n"}',
        b'{"type":"refused","reason":"No Reason","detail":""}',
        b'{"type":"progress","text":"' + b"x" * 5000 + b'"}',
    ],
)
def test_malformed_worker_message_raises_protocol_error(line: bytes) -> None:
    with pytest.raises(WorkerProtocolError):
        worker_messages.decode_message(line)


@pytest.mark.parametrize("path", ["/" + "x" * 4000, "/not \udcff text", "/two\nlines"])
def test_worker_message_with_an_unencodable_path_raises_protocol_error(path: str) -> None:
    with pytest.raises(WorkerProtocolError):
        worker_messages.encode_message(ImageReady(path))
