"""What one start saved: what reading the image from its source takes, less what staging took. Pure.

docs/operations.md says how it is measured (`What it saved`).
"""

from forestage.events.log import Handled
from forestage.units import to_tenths

LOCAL = ("mounted", "kept", "spank")  # redirects by which the start reads the copy


def seconds(outcome: Handled) -> float | None:
    """Seconds that a start saved, negative if it would have been faster; None: not known.

    Of a step that reads through, or from the source while the copy goes on, nobody knows it.
    """
    whole = outcome.result in ("hit", "joined", "copied") and outcome.redirect in LOCAL
    return outcome.baseline - outcome.wait if whole and outcome.baseline else None


def phrase(outcome: Handled) -> str:
    """What a start saved, as a clause for people."""
    found = seconds(outcome)
    if found is None:
        return "what that saves is not known"
    word = "saves" if found >= 0 else "costs"
    about = to_tenths(float(f"{abs(found):.2g}"))
    return f"which {word} about {about}" if about else "as fast as from its source"
