"""How long a hook may make a job wait: what slurm.conf allows, the admin decides, the user hints.

Hooks may run no Slurm command, but slurm.conf is a file and slurmd names it in $SLURM_CONF.
"""

from pathlib import Path

import msgspec

from forestage.slurm.slurm_conf import settings

SAFE = 15.0
"""Seconds; below the 20 s after which Slurm's defaults lose the first srun of a batch job."""

LAST_WORDS = 5.0
"""Seconds that a step's helper keeps for its answer."""

_DEFAULTS = {"messagetimeout": 10.0, "batchstarttimeout": 10.0}  # slurm.conf(5), seconds
# Each sets Alloc as well: slurm.conf(5); `scontrol show config` of 22.05 shows it for two of them.
_ALLOCATING = {"contain", "x11", "nohold", "runinjob"}
_CRED_EXPIRE = 120.0  # slurm.conf(5), AuthInfo: a job's credential is good for so long


class Limits(msgspec.Struct, frozen=True):
    """Seconds. Beyond `drains` Slurm kills the Prolog and drains the node, and beyond `epilog` the
    Epilog; beyond `hurts` it may lose a step of the job. None: Slurm sets no such limit."""

    drains: float | None
    hurts: float
    epilog: float | None = None
    known: bool = True


UNKNOWN = Limits(drains=None, hurts=SAFE, known=False)


def limits(conf: dict[str, str]) -> Limits:
    """Pure: what the settings of slurm.conf (names in lower case) mean for a Prolog.

    slurm.conf(5): PrologEpilogTimeout (since 25.05 PrologTimeout and EpilogTimeout), PrologFlags,
    MessageTimeout, BatchStartTimeout, AuthInfo. A Prolog that outlasts the defaults of the last
    three was seen to kill sruns at 20 s, unless PrologFlags has both Alloc and DeferBatch.
    """
    both = _seconds(conf, "prologepilogtimeout")
    timeouts = [_seconds(conf, name) or both for name in ("prologtimeout", "epilogtimeout")]
    drains, epilog = (_below(timeout) if timeout else None for timeout in timeouts)
    launch = _cred_expire(conf)
    if not {"alloc", "deferbatch"} <= prolog_flags(conf):
        launch = min(launch, sum(_seconds(conf, name) or 0.0 for name in _DEFAULTS))
    hurts = _below(launch)
    return Limits(drains, hurts if drains is None else min(hurts, drains), epilog)


def prolog_flags(conf: dict[str, str]) -> set[str]:
    """Pure: PrologFlags in lower case, those included that others imply."""
    flags = {flag.strip().lower() for flag in conf.get("prologflags", "").split(",")}
    return flags | {"alloc"} if flags & _ALLOCATING else flags


def patience(
    limit: Limits, configured: float | None, hinted: float | None, max_hinted: float
) -> float:
    """Pure: seconds a hook may wait. The user's hint goes before the admin's deadline, under the
    admin's cap; nothing goes beyond what would drain the node."""
    wish = limit.hurts if configured is None else configured
    if hinted is not None:
        # Where nobody knows what would drain the node, a user may wish for less time, not for more.
        wish = min(hinted, max_hinted if limit.known else wish)
    return wish if limit.drains is None else min(wish, limit.drains)


def step_patience(configured: float, timeout: str) -> float:
    """Pure: seconds a step may wait: less than the companion's own limit, `timeout` seconds as
    text, so that it hears an answer and need not kill us; "" where nobody names one."""
    limit = float(timeout) if timeout.isascii() and timeout.isdigit() else 0.0
    return min(configured, limit - min(LAST_WORDS, limit / 2)) if limit else configured


def read(conf: str) -> Limits:
    """The limits that the file `conf` (slurmd's $SLURM_CONF) sets; UNKNOWN if it is unreadable."""
    try:
        found = settings(conf, lambda path: Path(path).read_bytes().decode())
        named = {one.name: one.value for one in found}
    except (OSError, ValueError):
        return UNKNOWN
    return limits(named) if named else UNKNOWN


def _seconds(conf: dict[str, str], name: str) -> float | None:
    """A setting in seconds; 0 and nonsense are as unset, and unset ones have Slurm's default."""
    value = conf.get(name, "")
    number = float(value) if value.isascii() and value.isdigit() else 0.0
    # 65534 is Slurm's NO_VAL16, printed by `scontrol show config` for "never".
    return number if 0 < number < 65534 else _DEFAULTS.get(name)


def _cred_expire(conf: dict[str, str]) -> float:
    for part in conf.get("authinfo", "").split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() == "cred_expire" and value.isascii() and value.isdigit() and int(value):
            return float(value)
    return _CRED_EXPIRE


def _below(limit: float) -> float:
    """Safely below a limit: a quarter of it, and 3 s at least, stay for the rest of the hook."""
    return max(0.0, limit - max(3.0, limit / 4))
