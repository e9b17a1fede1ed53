"""What may befall a hook or a stager in the middle of its work: death, a halt, an error, change."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from doomed import Beside, Doom, Role, Stagers, kill, kill_group, pause
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from model import Seen
from played import Ended
from promises import After, Work

from forestage.system import lock
from machine import Machine, names, numbers, several
from node import Later

MIB = 1 << 20
SOON = "300ms"  # how long a hook waits that may meet something stopped

kinds = st.sampled_from(("prolog", "prolog", "prolog", "step", "epilog", "epilog", "sweep"))
killed = st.sampled_from((("hook", kill), ("hook", kill_group), ("stager", kill), ("look", kill)))
nths = st.integers(1, 90)


class Processes(Machine):
    """One hook may be stopped at a time, and with it or without any number of stagers."""

    sizes = st.sampled_from((200_000, 0, 4095, MIB + 1, 2 * MIB + MIB // 2))
    rooms = ("8M", "3M", "16M")
    folder: Path
    doom: Doom | None = None
    changing: tuple[str, Seen, str] | None = None  # source, its next version, its key before
    waiting: tuple[Beside, After] | None = None

    def __init__(self) -> None:
        super().__init__()
        # A little late: a stager waits for the tick in which a source was changed to be over.
        self.clock = Later(0.0)
        self.stagers = Stagers(self.node.cache, self.bystanders)

    def bystanders(self) -> set[int]:
        """The test's children that are no stagers."""
        return {self.waiting[0].pid} if self.waiting else set()

    def run(self, work: Work, after: After) -> Ended:
        doom, self.doom = self.doom, None
        hook = Beside(self.folder, work, doom)
        ended = hook.ended()
        if ended is None and not self.is_free():
            hook.go_on()  # everybody else would have to wait for it
            ended = hook.ended()
        if ended is None:
            self.waiting = hook, after
            self.untidy = True
            ended = Ended(paused=True)
        self.stagers.settle()
        if self.stagers.stopped and not self.is_free():
            self.stagers.go_on()
        self.notice()
        return ended

    def is_free(self) -> bool:
        path = self.node.cache.space_lock
        return lock.is_free(path)

    def calm(self) -> bool:
        # One killed stager is made good for by the next, within the same hook.
        harmless = self.doom is None or (self.doom.role, self.doom.deed) == ("stager", kill)
        return super().calm() and harmless and not (self.waiting or self.stagers.stopped)

    def stands_still(self) -> bool:
        """Whether a hook that runs now may wait for what has stopped."""
        stops = self.doom is not None and self.doom.deed == pause
        return bool(self.waiting or self.stagers.stopped or stops)

    def prolog(self, number: int, wanted: list[str]) -> None:
        deadline = SOON if self.stands_still() else None
        if self.lab.config_keys.get("deadline") != deadline:
            self.lab.configure(deadline=deadline)
        super().prolog(number, wanted)

    def step_timeout(self) -> str:
        return "1" if self.stands_still() else "540"

    def act(self, kind: str, number: int, wanted: list[str], doom: Doom | None) -> None:
        self.doom = doom
        if kind == "prolog":
            self.prolog(number, wanted)
        elif kind == "step":
            self.step(number, wanted[0])
        elif kind == "epilog":
            self.epilog(number)
        else:
            self.sweep(dry_run=False)
        self.doom = None

    @rule(kind=kinds, number=numbers, wanted=several)
    def hook_runs(self, kind: str, number: int, wanted: list[str]) -> None:
        self.act(kind, number, wanted, None)

    @rule(kind=kinds, number=numbers, wanted=several, victim=killed, nth=nths)
    def something_is_killed(
        self,
        kind: str,
        number: int,
        wanted: list[str],
        victim: tuple[Role, Callable[[], None]],
        nth: int,
    ) -> None:
        self.act(kind, number, wanted, Doom(victim[0], nth, victim[1]))

    @rule(
        kind=kinds,
        number=numbers,
        wanted=several,
        role=st.sampled_from(("hook", "stager")),
        nth=nths,
        code=st.sampled_from((errno.EIO, errno.ENOSPC, errno.EROFS)),
    )
    def something_fails(
        self, kind: str, number: int, wanted: list[str], role: Role, nth: int, code: int
    ) -> None:
        def fail() -> None:
            raise OSError(code, os.strerror(code))

        self.act(kind, number, wanted, Doom(role, nth, fail))

    @precondition(lambda self: not self.waiting)
    @rule(
        kind=kinds,
        number=numbers,
        wanted=several,
        role=st.sampled_from(("hook", "stager")),
        nth=nths,
    )
    def something_is_stopped(
        self, kind: str, number: int, wanted: list[str], role: Role, nth: int
    ) -> None:
        self.act(kind, number, wanted, Doom(role, nth, pause))

    @precondition(lambda self: self.waiting)
    @rule(dies=st.booleans())
    def stopped_hook_goes_on(self, dies: bool) -> None:
        self.stopped_hook_ends(dies)

    def stopped_hook_ends(self, dies: bool) -> None:
        assert self.waiting is not None
        hook, after = self.waiting
        self.waiting = None
        hook.kill() if dies else hook.go_on()
        ended = hook.ended()
        assert ended is not None
        self.stagers.settle()
        after(ended)

    @precondition(lambda self: self.stagers.stopped)
    @rule(dies=st.booleans())
    def stopped_stagers_go_on(self, dies: bool) -> None:
        self.stagers.kill() if dies else self.stagers.go_on()

    @rule(
        data=st.data(),
        number=numbers,
        name=names,
        role=st.sampled_from(("hook", "stager")),
        nth=nths,
        in_place=st.booleans(),
    )
    def source_changes_meanwhile(
        self,
        data: st.DataObject,
        number: int,
        name: str,
        role: Role,
        nth: int,
        in_place: bool,
    ) -> None:
        to = self.next_of(data, name)
        self.changing = name, to, self.lab.key(self.lab.sources[name])
        write = self.lab.write
        source = self.lab.sources[name]
        if in_place and role == "hook":
            self.halfway.add(str(source.path))
        self.act("prolog", number, [name], Doom(role, nth, lambda: write(source, to, in_place)))

    def notice(self) -> None:
        """Whether the change came off, or the hook had ended before."""
        if self.changing is not None:
            name, to, before = self.changing
            self.changing = None
            if self.lab.key(self.lab.sources[name]) != before:
                self.lab.sources[name].versions.append(to)
                self.learn(name)

    def reboot(self, loses: str, which: int) -> None:
        self.end_processes()
        super().reboot(loses, which)

    def lose_cache(self) -> None:
        self.end_processes()
        super().lose_cache()

    def end_processes(self) -> None:
        if self.waiting:
            self.stopped_hook_ends(dies=True)
        self.stagers.settle()
        self.stagers.kill()

    def teardown(self) -> None:
        self.end_processes()
        super().teardown()
