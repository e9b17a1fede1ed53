"""What one start saved: what reading the image from its source takes, less what staging took. Pure.

The one definition, for `explain`, `stage-tell=yes`, the report and the metrics; docs/operations.md
says how it is measured (`What it saved`).
"""

import msgspec

from forestage.events.event_log import WHOLE_RESULTS, Outcome, RequestOutcome
from forestage.units import format_rough_duration

LOCAL_REDIRECTS = ("mounted", "kept", "spank")  # redirects by which the start reads the copy
MAX_JOBS = 10_000  # jobs whose first step repeats their Prolog's start; a node has some hundreds


class StartTracker(msgspec.Struct):
    """Which requests of a node are starts from a copy, in the order of its log.

    With `redirect: bind` a job's first step repeats its Prolog's start: `counted` are the keys of
    those, by job, that no step has repeated yet.
    """

    counted: dict[int, list[str]] = {}

    def is_new_start(self, hook: str, job: int, outcome: Outcome) -> bool:
        """Whether something began to read a copy, and no earlier event reported it."""
        if not isinstance(outcome, RequestOutcome):
            if hook in ("epilog", "sweep"):
                self.counted.pop(job, None)
            return False
        if not (outcome.result in WHOLE_RESULTS and outcome.redirect in LOCAL_REDIRECTS):
            return False
        if hook == "prolog":
            if outcome.redirect == "spank":  # nobody has seen it yet
                return False
            remember_key(self.counted, job, outcome.key)
            return True
        if outcome.key in self.counted.get(job, ()):
            self.counted[job].remove(outcome.key)
            return False
        return True


def remember_key(keys: dict[int, list[str]], job: int, key: str) -> None:
    """Adds a key to those of a job, which is the latest now; the oldest ones are forgotten."""
    # A requeued job begins anew, and its Epilog may not have run.
    before = keys.pop(job, [])
    keys[job] = before if key in before else [*before, key]
    while len(keys) > MAX_JOBS:
        del keys[next(iter(keys))]


def find_saved_seconds(outcome: RequestOutcome) -> float | None:
    """Seconds that a start saved, negative if it would have been faster; None: not known.

    Of a step that reads through, or from the source while the copy goes on, nobody knows it.
    """
    is_local = outcome.result in WHOLE_RESULTS and outcome.redirect in LOCAL_REDIRECTS
    return outcome.baseline - outcome.wait if is_local and outcome.baseline else None


def format_saving(outcome: RequestOutcome) -> str:
    """What a start saved, as a clause for people."""
    found = find_saved_seconds(outcome)
    if found is None:
        return "what that saves is not known"
    word = "saves" if found >= 0 else "costs"
    about = format_rough_duration(float(f"{abs(found):.2g}"))
    return f"which {word} about {about}" if about else "as fast as from its source"
