"""What a registry worker is told, and the lines of JSON that it answers.

    DigestResolved    the reference means this digest
    ImageReady        the image lies at this path
    ImportUnderWay    it is imported: on this host, by this worker or by another one
    ImportProgress    how far that is, for the user to read
    ImportRefused     there will be no image, and why

A worker runs as the user, who can make it say anything. So root decodes lines of bounded length
with bounded fields, and what a line claims is the user's own claim: a path is opened as the user, a
text is printed and nothing more, a reason that is not known becomes one that is.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

from forestage.units import make_printable

MAX_LINE_BYTES = (
    4096  # bytes of a line, its end included; a path of PATH_MAX does not fit, and is refused
)
LONGEST_TEXT = 900  # characters, of four bytes each: a line with other fields has room for them

DigestText: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(sha256:[0-9a-f]{64})?\Z")]
ImagePath: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^/[^\x00-\x1f\x7f]{1,3500}\Z")]
BoundedText: TypeAlias = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
ImageName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z][0-9A-Za-z_-]{0,199}\Z")]
ReasonWord: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z-]{0,39}\Z")]


class ImportOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do, as its one argument. Times are seconds, sizes bytes.

    `directory` is the base of the store, which must not lie on the file system of `cache`. `job` is
    "123" for all of a batch job, which has one digest on all nodes, or "123.4" for a step; "" for a
    user at a login node. Where `leads` is false, the word of the node that leads is waited for,
    `patience` long. Of a `container` that is there already, no image is wanted. `environ_fd` is
    open on the job's environment, NUL between its entries; -1 for the worker's own. `host` is this
    node's name for the other nodes. `by_tag` has a job's image imported by its tag, where the
    registry did not say a digest. `apart`: the worker and what it starts are alone in a PID
    namespace. `marks` is the directory of what this node knows of full stores (user_notes.py).
    """

    reference: str
    directory: str
    cache: str = ""
    job: str = ""
    leads: bool = True
    patience: float = 10.0
    offline: Literal["fail", "use-last"] = "fail"
    environ_fd: int = -1
    max_size: int | None = None
    host: str = ""
    container: str = ""
    by_tag: bool = False
    apart: bool = False
    marks: str = ""


class DigestResolved(msgspec.Struct, frozen=True, tag="resolved"):
    """`digest` is "" where the registry does not say it and the image is imported by its tag.

    `name` is the image's in the store.
    """

    digest: DigestText
    name: ImageName


class ImageReady(msgspec.Struct, frozen=True, tag="present"):
    path: ImagePath


class ImportUnderWay(msgspec.Struct, frozen=True, tag="importing"):
    """`here`: this worker does. Nodes of two clusters may have one name."""

    where: BoundedText
    here: bool = False


class ImportProgress(msgspec.Struct, frozen=True, tag="progress"):
    text: BoundedText


class ImportRefused(msgspec.Struct, frozen=True, tag="refused"):
    """`free`: bytes that a store has which is full."""

    reason: ReasonWord
    detail: BoundedText
    free: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


WorkerMessage: TypeAlias = (
    DigestResolved | ImageReady | ImportUnderWay | ImportProgress | ImportRefused
)


class WorkerProtocolError(ValueError):
    """A line that no worker of ours would write."""


def encode_order(order: ImportOrder) -> str:
    return msgspec.json.encode(order).decode()


def decode_order(text: str) -> ImportOrder:
    """Raises WorkerProtocolError."""
    try:
        return msgspec.json.decode(text, type=ImportOrder)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WorkerProtocolError(str(error)) from None


def encode_message(word: WorkerMessage) -> bytes:
    """Return the line of a word. Texts are cut and escaped.

    Raises WorkerProtocolError for what cannot be cut: a long path.
    """
    try:
        line = msgspec.json.encode(_escape_message(word)) + b"\n"
    except UnicodeError:
        raise WorkerProtocolError("the path is not UTF-8") from None
    # Decoded here too: the other side takes what does not fit for an attack.
    if len(line) > MAX_LINE_BYTES:
        raise WorkerProtocolError("the line is too long")
    decode_message(line)
    return line


def decode_message(line: bytes) -> WorkerMessage:
    """The word of a line. Raises WorkerProtocolError."""
    if len(line) > MAX_LINE_BYTES:
        raise WorkerProtocolError("the line is too long")
    try:
        word: WorkerMessage = msgspec.json.decode(line, type=WorkerMessage)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise WorkerProtocolError(make_printable(str(error))) from None
    return _escape_message(word)


def shorten_text(text: str) -> str:
    """Pure: a text as a line can bear it: printable, cut."""
    # Twice: what is escaped grows.
    return make_printable(make_printable(text)[:LONGEST_TEXT])[:LONGEST_TEXT]


def _escape_message(word: WorkerMessage) -> WorkerMessage:
    match word:
        case ImportUnderWay(where, here):
            return ImportUnderWay(shorten_text(where), here)
        case ImportProgress(text):
            return ImportProgress(shorten_text(text))
        case ImportRefused(reason, detail, free):
            from forestage.events.reasons import collect_reasons

            # It becomes a label of metrics.
            known = reason if reason in collect_reasons() else "registry-odd"
            return ImportRefused(known, shorten_text(detail), free)
    return word
