"""How long a hook may take: what slurm.conf and the companion allow.

Hooks may run no Slurm command, but slurm.conf is a file and slurmd names it in $SLURM_CONF.
"""

import msgspec

from forestage.slurm.slurm_conf import SlurmConf
from forestage.units import is_number

SAFE = 15.0
"""Seconds; below the 20 s after which a job may be lost with Slurm's defaults."""

STEP_WAIT = 480.0
"""Seconds that a step waits for a copy unless somebody says how long: srun ends a step that has not
begun after 600 s (slurm_step_launch_wait_start())."""

LAST_WORDS = 5.0
"""Seconds that a step's helper keeps for its answer."""

_DEFAULTS = {"messagetimeout": 10.0, "batchstarttimeout": 10.0}  # slurm.conf(5), seconds
_LAUNCH = 10.0  # seconds that slurmctld adds to BatchStartTimeout at most: DEFAULT_MSG_TIMEOUT
_CRED_EXPIRE = 120.0  # slurm.conf(5), AuthInfo: a job's credential is good for so long


class HookTimeLimits(msgspec.Struct, frozen=True):
    """Seconds; None: Slurm sets no such limit.

    Beyond `node_drained_after` Slurm kills the Prolog and drains the node, and beyond
    `epilog_killed_after` the Epilog; beyond `job_lost_after`, which is never above
    `node_drained_after`, it may lose the job.
    """

    node_drained_after: float | None
    job_lost_after: float
    epilog_killed_after: float | None = None


UNKNOWN = HookTimeLimits(node_drained_after=None, job_lost_after=SAFE)


def compute_limits(conf: dict[str, str]) -> HookTimeLimits:
    """Pure: what the settings of slurm.conf (names in lower case) mean for a Prolog.

    slurm.conf(5): PrologEpilogTimeout (since 25.05 PrologTimeout and EpilogTimeout),
    BatchStartTimeout, MessageTimeout, AuthInfo.

    A batch job that has run for longer than BatchStartTimeout + min(10 s, MessageTimeout) and has
    no slurmstepd on its first node, as its Prolog still runs there, is lost when that node
    registers: every 33 min by default, at `scontrol reconfigure`, when slurmd starts. slurmctld
    then ends it with NODE_FAIL or requeues it (job_mgr.c, _purge_missing_jobs; 22.05, 24.11 and
    26.05 alike), whatever PrologFlags says. Without Alloc and DeferBatch sruns die somewhat later,
    after BatchStartTimeout + MessageTimeout.
    """
    both = _setting_seconds(conf, "prologepilogtimeout")
    timeouts = [_setting_seconds(conf, name) or both for name in ("prologtimeout", "epilogtimeout")]
    drains, epilog = (_with_safety_margin(timeout) if timeout else None for timeout in timeouts)
    start, message = (
        _setting_seconds(conf, name) or 0.0 for name in ("batchstarttimeout", "messagetimeout")
    )
    hurts = _with_safety_margin(min(_credential_seconds(conf), start + min(_LAUNCH, message)))
    return HookTimeLimits(drains, hurts if drains is None else min(hurts, drains), epilog)


def prolog_budget(limit: HookTimeLimits, wish: float | None) -> float:
    """Pure: seconds a Prolog may take. Whoever wishes, a job must not be lost for it; None wishes
    for all there is."""
    return limit.job_lost_after if wish is None else min(wish, limit.job_lost_after)


def step_budget(wish: float, timeout: str) -> float:
    """Pure: seconds a step may take: less than the companion's own limit, `timeout` seconds as
    text, so that it hears an answer and need not kill us; "" where nobody names one."""
    limit = float(timeout) if is_number(timeout) else 0.0
    return min(wish, limit - min(LAST_WORDS, limit / 2)) if limit else wish


def read_limits(conf: SlurmConf) -> HookTimeLimits:
    """The limits that the file of $SLURM_CONF sets; UNKNOWN if none is named, or unreadable."""
    try:
        named = conf.values if conf.named else {}
    except (OSError, ValueError):
        return UNKNOWN
    return compute_limits(named) if named else UNKNOWN


def _setting_seconds(conf: dict[str, str], name: str) -> float | None:
    """A setting in seconds; 0 and nonsense are as unset, and unset ones have Slurm's default."""
    value = conf.get(name, "")
    number = float(value) if is_number(value) else 0.0
    # 65534 is Slurm's NO_VAL16, printed by `scontrol show config` for "never".
    return number if 0 < number < 65534 else _DEFAULTS.get(name)


def _credential_seconds(conf: dict[str, str]) -> float:
    for part in conf.get("authinfo", "").split(","):
        name, _, value = part.strip().partition("=")
        if name.lower() == "cred_expire" and is_number(value) and int(value):
            return float(value)
    return _CRED_EXPIRE


def _with_safety_margin(limit: float) -> float:
    """Safely below a limit: a quarter of it, and 3 s at least, stay for the rest of the hook."""
    return max(0.0, limit - max(3.0, limit / 4))
