"""A job as a hook's environment describes it: user, images, hints. Pure.

The variables are those slurmd gives its Prolog and Epilog (prolog_epilog.html; the same in 22.05,
24.11 and 26.05). Values of SPANK options and of the comment are the user's: any bytes but NUL.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from forestage.errors import JobError
from forestage.system.as_user import User
from forestage.units import parse_duration, printable, quote

# Slurm renames each character of `pyxis` and `container-image` that is not alphanumeric to `_`.
_OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_"
IMAGE_OPTION = _OPTION + "image"
SAVE_OPTION = _OPTION + "save"
HOME_OPTION = _OPTION + "mount_home"
NO_HOME_OPTION = _OPTION.removesuffix("container_") + "no_container_mount_home"

MAX_HINTED = 16
"""Paths read from one comment; more are reported. A comment may be long, a hook's time is not."""

MAX_PROBLEMS = 8
"""Problems reported for one comment."""

Via = Literal["option", "hint"]


class Request(msgspec.Struct, frozen=True):
    """One image as the user wrote it, and where: pyxis' option or a `stage=` hint."""

    path: str
    via: Via


class Hints(msgspec.Struct, frozen=True):
    """What the comment says to us. `wait` is in seconds; `problems` are sentences for the user."""

    paths: tuple[str, ...] = ()
    off: bool = False
    wait: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def for_steps(self) -> bool:
        """Whether the job's steps have to know of it: they see no comment."""
        return self.off or self.wait is not None


class Job(msgspec.Struct, frozen=True):
    """A job on this node, as its Prolog or Epilog sees it, or one of its steps does.

    `nodelist` is what Slurm wrote for the Prolog, n[1-4,7]; `step_nodelist` that of the step, a
    user's word. `mounts_home` is whether its container is to have the user's home directory, `home`
    what a step calls so; None and "" where nobody says it.
    """

    id: int
    user: User
    node: str
    partition: str
    work_dir: str
    requests: tuple[Request, ...]
    saves: str | None
    hints: Hints
    step: int | None = None
    nodelist: str = ""
    step_nodelist: str = ""
    mounts_home: bool | None = None
    home: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Job":
        """Reads slurmd's variables, or the SPANK companion's, which have the same names.

        Raises JobError when one that is always set is not there.
        """
        hints = read_hints(environ.get("SLURM_JOB_COMMENT", ""))
        image = environ.get(IMAGE_OPTION, "")
        from_option = (Request(image, "option"),) if image else ()
        hinted = tuple(Request(path, "hint") for path in hints.paths if path != image)
        return cls(
            id=_number(environ, "SLURM_JOB_ID"),
            user=User(
                name=environ.get("SLURM_JOB_USER", ""),
                uid=_number(environ, "SLURM_JOB_UID"),
                gid=_number(environ, "SLURM_JOB_GID"),
            ),
            node=environ.get("SLURMD_NODENAME", ""),
            partition=environ.get("SLURM_JOB_PARTITION", ""),
            work_dir=environ.get("SLURM_JOB_WORK_DIR", ""),
            requests=from_option + hinted,
            saves=environ.get(SAVE_OPTION) or None,
            hints=hints,
            step=_number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else None,
            # The second is what releases before 23.02.6 have.
            nodelist=environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", ""),
            step_nodelist=environ.get("SLURM_STEP_NODELIST", ""),
            # pyxis refuses both together.
            mounts_home=True
            if HOME_OPTION in environ
            else False
            if NO_HOME_OPTION in environ
            else None,
            home=environ.get("FORESTAGE_HOME", ""),
        )


def read_hints(comment: str) -> Hints:
    """Reads our tokens out of a job's comment; everything else in it is the user's own business."""
    paths: list[str] = []
    problems: list[str] = []
    off = False
    wait: float | None = None
    for token in comment.replace(";", " ").split():
        name, equals, value = token.partition("=")
        if not equals or not (name == "stage" or name.startswith("stage-")):
            continue
        if name == "stage" and value == "off":
            off = True
        elif name == "stage":
            paths += _hinted_paths(value, problems)
        elif name == "stage-wait":
            try:
                wait = parse_duration(value)
            except ValueError as error:
                problems.append(f"stage-wait: {error}")
        else:
            problems.append(f"unknown hint {name}= (known: stage=, stage-wait=)")
    if len(paths) > MAX_HINTED:
        problems.append(f"stage= names {len(paths)} images, the first {MAX_HINTED} are read")
    unique = tuple(dict.fromkeys(paths))[:MAX_HINTED]
    shown = tuple(printable(problem) for problem in problems[:MAX_PROBLEMS])
    return Hints(paths=unique, off=off, wait=wait, problems=shown)


def _hinted_paths(value: str, problems: list[str]) -> list[str]:
    """Splits at commas first, then decodes: `%2C` is how a path may hold a comma."""
    found = [_decoded(part) for part in value.split(",") if part]
    if not found:
        problems.append("stage= names no image (write stage=/path/to/image, or stage=off)")
    return found


def _decoded(part: str) -> str:
    if "%" not in part:
        return part
    from urllib.parse import unquote  # its import costs a hook 3 ms; few paths need it

    return unquote(part, errors="surrogateescape")


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    # Python takes no more than 4300 digits for a number, the kernel and Slurm far less.
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise JobError(f"{name} is {quote(value)}, expected a number", "is this run by slurmd?")
    return int(value)
