"""`forestage off` and `on`: switch staging off on this node at once, and on again."""

import msgspec

from forestage.clock import Clock
from forestage.config import load_settings, switch
from forestage.errors import ConfigError
from forestage.paths import Places
from forestage.system.terminal import Line, Piece, count

BY_HAND = "forestage off"  # the reason of who gives none


class Switched(msgspec.Struct, frozen=True):
    """Whether staging is off now, and by what; `files` are those written, or removed.

    `why` is what switches it off, "" while it is on; `kept`: that outlives a reboot.
    """

    off: bool
    files: tuple[str, ...]
    why: str = ""
    kept: bool = False


def off(places: Places, clock: Clock, reason: str, seconds: float | None) -> Switched:
    """Switches staging off, for so many seconds or until `on`; as root. Raises OSError."""
    now = clock.wall()
    file = switch.turn_off(places, reason, None if seconds is None else now + seconds)
    why = switch.by_file(places, now)
    return Switched(True, (str(file),), why, file == places.kept_off)


def on(places: Places, clock: Clock) -> Switched:
    """Removes what switches staging off, an upgrade's own file too; as root. Raises OSError."""
    removed = switch.turn_on(places)
    why = switch.by_file(places, clock.wall()) or _by_configuration(places)
    return Switched(bool(why), tuple(map(str, removed)), why, bool(why))


def _by_configuration(places: Places) -> str:
    """What the configuration switches off: all jobs, those of some partitions, or nothing."""
    try:
        settings = load_settings(places.etc)
    except ConfigError as error:
        return f"the configuration cannot be used: {error.one_line}"
    off = [name for name, config in settings.everywhere() if not config.enabled]
    named = [name for name in off if name is not None]
    if None in off:
        on = len(off) < len(settings.everywhere())
        return f"`enabled: false` in {places.etc}{' (not for all partitions)' if on else ''}"
    return f"`enabled: false` for {count(len(named), 'partition')}: {', '.join(named)}" * bool(
        named
    )


def pieces(done: Switched, turned: str) -> list[Piece]:
    """Pure: what `forestage off` and `on` print; `turned` is which of the two it was."""
    if turned == "on":
        lines = [f"{file} removed." for file in done.files]
        state = f"Staging stays switched off: {done.why}" if done.off else "Staging is on."
        return [Line(line) for line in [*lines, state]]
    until = "`forestage on`" if done.kept else "the next reboot, as /etc cannot be written"
    return [
        Line(f"Staging is switched off on this node. {done.why}"),
        Line(f"From the next Prolog and step on, jobs read the original path, until {until}."),
        Line("Running jobs keep what they have; `forestage unredirect` takes it from them, too."),
    ]
