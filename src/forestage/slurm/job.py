"""A job as a hook's environment describes it: user, images, hints. Pure.

The variables are those slurmd gives its Prolog and Epilog (prolog_epilog.html; the same in 22.05,
24.11 and 26.05). Values of SPANK options and of the comment are the user's: any bytes but NUL.
"""

from collections.abc import Mapping

import msgspec

from forestage.errors import JobError
from forestage.slurm import step_protocol
from forestage.slurm.hints import UNKNOWN_NODE_INDEX, JobHints, NodeIndex, Request, parse_hints
from forestage.system.as_user import User
from forestage.system.tree import PATH
from forestage.units import is_number, make_printable, quote_value

# Slurm renames each character of `pyxis` and `container-image` that is not alphanumeric to `_`.
_OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_"
IMAGE_OPTION = _OPTION + "image"
# Slurm's name for a uid that the node does not know, and the uids that may really have it.
_UNKNOWN, _NOBODIES = "nobody", (65534, 99)
# What the companion has of --stage and its kin: Slurm puts SPANK_ before the name for a Prolog.
STAGE_VARIABLE = "FORESTAGE_STAGE"
STAGE_OPTION_VARIABLE = f"SPANK_{STAGE_VARIABLE}"
SAVE_OPTION = _OPTION + "save"
HOME_OPTION = _OPTION + "mount_home"
NO_HOME_OPTION = _OPTION.removesuffix("container_") + "no_container_mount_home"


class Job(msgspec.Struct, frozen=True):
    """A job on this node, as its Prolog or Epilog sees it, or one of its steps does.

    `nodelist` is what Slurm wrote for the Prolog, n[1-4,7]; `step_nodelist` that of the step, a
    user's word. `mounts_home` is whether its container is to have the user's home directory, `home`
    what a step calls so; None and "" where nobody says it. `restart` counts how often it was
    requeued, and `start` is when this run of it began, in seconds since the epoch; 0 in a step, and
    a start with a Slurm before 23.02. `waited` are the seconds that its Prolog noted for a step's
    user, `manager` is the pid of the step's manager; 0 in a Prolog.
    `expected` and `keys_to_keep` are of no job, but stand for those that wait for a node, and may
    never come: since when they are expected, in seconds since the epoch, and keys that stay.
    `variables` are the step's environment, None where nobody says it; `path` is on which PATH
    programs are looked for that Slurm starts.
    """

    id: int
    user: User
    node: str
    partition: str
    work_dir: str
    requests: tuple[Request, ...]
    saves: str | None
    hints: JobHints
    step: int | None = None
    nodelist: str = ""
    step_nodelist: str = ""
    mounts_home: bool | None = None
    home: str = ""
    restart: int = 0
    start: int = 0
    waited: float = 0.0
    manager: int = 0
    variables: Mapping[str, str] | None = None
    path: str = PATH
    expected: float = 0.0
    keys_to_keep: frozenset[str] = frozenset()

    @property
    def node_index(self) -> NodeIndex:
        """Which of the job's nodes this is; as Slurm named them to the Prolog."""
        return _find_node_index(self.nodelist, self.node)

    @property
    def reference(self) -> Request | None:
        """The image of a registry that is asked for; pyxis' option alone names one."""
        named = (one for one in self.requests if one.via == "option")
        return next((one for one in named if not one.path.startswith(("/", "."))), None)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Job":
        """Reads slurmd's variables, or the SPANK companion's, which have the same names.

        Raises JobError when one that is always set is not there.
        """
        comment = environ.get("SLURM_JOB_COMMENT", "")
        node = environ.get("SLURMD_NODENAME", "")
        # The second is what releases before 23.02.6 have.
        listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
        option = environ.get(STAGE_OPTION_VARIABLE, "")
        rank = (
            _find_node_index(listed, node)
            if "{" in comment or "{" in option
            else UNKNOWN_NODE_INDEX
        )
        hints = parse_hints(comment, rank, option)
        image = environ.get(IMAGE_OPTION, "")
        from_option = (Request(image, "option"),) if image else ()
        hinted = tuple(one for one in hints.requests if not one.is_data and one.path != image)
        return cls(
            id=_parse_number(environ, "SLURM_JOB_ID"),
            user=_parse_user(environ),
            node=node,
            # A step's is the user's, and goes into events as it is.
            partition=make_printable(environ.get("SLURM_JOB_PARTITION", "")),
            work_dir=environ.get("SLURM_JOB_WORK_DIR", ""),
            requests=from_option + hinted,
            saves=environ.get(SAVE_OPTION) or None,
            hints=hints,
            step=_parse_number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else None,
            nodelist=listed,
            step_nodelist=environ.get("SLURM_STEP_NODELIST", ""),
            # pyxis refuses both together.
            mounts_home=True
            if HOME_OPTION in environ
            else False
            if NO_HOME_OPTION in environ
            else None,
            home=environ.get(step_protocol.STEP_HOME_VARIABLE, ""),
            path=environ.get(step_protocol.STEP_PATH_VARIABLE) or PATH,
            # Not in a step, whose environment is the user's.
            restart=_parse_number(environ, "SLURM_RESTART_COUNT")
            if "SLURM_RESTART_COUNT" in environ and "SLURM_STEP_ID" not in environ
            else 0,
            start=_parse_start(environ),
            manager=_parse_number(environ, step_protocol.STEP_MANAGER_VARIABLE)
            if step_protocol.STEP_MANAGER_VARIABLE in environ
            else 0,
        )


def _parse_user(environ: Mapping[str, str]) -> User:
    """The job's owner; of a step with the groups that Slurm gave it, if the companion says them."""
    uid, gid = _parse_number(environ, "SLURM_JOB_UID"), _parse_number(environ, "SLURM_JOB_GID")
    name = environ.get("SLURM_JOB_USER", "")
    if name == _UNKNOWN and uid not in _NOBODIES:
        name = ""
    listed = environ.get(step_protocol.STEP_GROUPS_VARIABLE, "").split(",")
    # Not of a Prolog: only the companion's environment has nothing of the user's under this name.
    if "SLURM_STEP_ID" in environ and all(map(is_number, listed)):
        return User(name, uid, gid, tuple(dict.fromkeys((gid, *map(int, listed)))), of_step=True)
    return User(name, uid, gid)


def _parse_start(environ: Mapping[str, str]) -> int:
    value = environ.get("SLURM_JOB_START_TIME", "")
    # A step's environment is the user's word.
    return int(value) if is_number(value) and "SLURM_STEP_ID" not in environ else 0


def _find_node_index(listed: str, own: str) -> NodeIndex:
    """Which of the listed nodes this one is."""
    from forestage.slurm import nodelist  # few comments need it

    nodes = nodelist.expand_nodelist(listed)
    return NodeIndex(nodes.index(own) if own in nodes else None, len(nodes))


def _parse_number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not is_number(value):
        raise JobError(
            f"{name} is {quote_value(value)}, expected a number", "is this run by slurmd?"
        )
    return int(value)
