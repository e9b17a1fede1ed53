"""Everything that may befall a node, in any order; what must hold meanwhile is in promises.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from lab import NAMES, Off, Why
from model import MISSING, Seen, Version, content
from promises import HOUR, Promises

from forestage.commands import evict, inventory
from forestage.commands.unredirect import unmount_redirects
from forestage.errors import Declined
from forestage.system.as_user import User
from node import ALICE, BOB, Later

names = st.sampled_from(NAMES)
numbers = st.integers(1, 5)  # of jobs
seeds = st.integers(0, 10**6)
modes = st.sampled_from((0o644, 0o644, 0o644, 0o444, 0o640, 0o600))
owners = st.sampled_from((ALICE, BOB))
switches: st.SearchStrategy[Off] = st.sampled_from(("", "", "", "file", "enabled"))
redirects = st.sampled_from(("bind", "bind", "spank", "spank", "none"))
colds = st.sampled_from(("wait", "shared", "auto"))
several = st.lists(names, min_size=1, max_size=2, unique=True)


class Machine(Promises):
    """How hooks run, and what happens in the middle of them, is the subclasses' part."""

    sizes: st.SearchStrategy[int]
    rooms: Sequence[str]

    def __init__(self) -> None:
        super().__init__()
        self.lab.configure(max_size=self.rooms[0])
        for seed, name in enumerate(NAMES):
            self.change_source(name, Version(content(seed, 100_000), ALICE, 0o644), False)

    # What admins do

    def here(self) -> inventory.CacheInventory:
        return inventory.read_inventory(self.lab.here(self.clock))

    @contextlib.contextmanager
    def admin(self) -> Iterator[None]:
        """A command may fail, and say so, where a disk is full."""
        try:
            yield
        except (OSError, Declined) as error:
            if self.calm() or (isinstance(error, Declined) and error.reason != "no-room"):
                raise

    @rule()
    def evict_all(self) -> None:
        with self.admin():
            self.evict_whatever_may_go()

    def evict_whatever_may_go(self) -> None:
        before = self.here().items
        done = evict.evict_named(self.lab.here(self.clock), before, dry_run=False)
        stay = {one.key for one in before if one.jobs or one.pinned}
        assert {one.key for one in done.verdicts if not one.evicted} == stay
        assert self.node.entries() >= stay

    @rule()
    def evict_to_watermark(self) -> None:
        with self.admin():
            evict.evict_to_watermark(self.lab.here(self.clock), dry_run=False)
            self.check_room()

    @rule(which=st.integers(0, 9), pinned=st.booleans())
    def pin(self, which: int, pinned: bool) -> None:
        with self.admin():
            items = sorted(self.here().items, key=lambda one: one.key)
            if items:
                evict.set_pin(self.node.cache, items[which % len(items)], pinned)

    @rule(dry_run=st.booleans())
    def timer(self, dry_run: bool) -> None:
        self.sweep(dry_run)

    @initialize(redirect=redirects, cold=colds)
    def begin(self, redirect: str, cold: str) -> None:
        self.set_redirect(redirect, cold)

    @rule(redirect=redirects, cold=colds)
    def set_redirect(self, redirect: str, cold: str) -> None:
        self.lab.configure(redirect=redirect, cold=cold)

    @rule(which=st.integers(0, 9))
    def set_room(self, which: int) -> None:
        self.lab.configure(max_size=self.rooms[which % len(self.rooms)])

    @rule(off=switches)
    def switch(self, off: Off) -> None:
        self.lab.switch(off)

    @rule()
    def unredirect_all(self) -> None:
        done = unmount_redirects(self.lab.here(self.clock))
        assert not done.problems
        assert self.node.binds() == {}

    @precondition(lambda self: self.calm() and (self.node.cache.root / "format").exists())
    @rule(
        data=st.data(),
        why=st.sampled_from(("file", "enabled", "config", "cache-format")),
        kind=st.sampled_from(("prolog", "prolog", "step", "epilog")),
        numbers=st.permutations(range(1, 6)),
        name=names,
    )
    def nobody_is_served_for_a_while(
        self, data: st.DataObject, why: Why, kind: str, numbers: list[int], name: str
    ) -> None:
        """Meanwhile the path may show a running job's redirect, of older bytes or of the same."""
        self.lab.switch("")
        self.lab.configure(redirect="bind")
        self.prolog(numbers[0], [name])
        self.lab.tally[f"{why} while redirected"] += str(self.lab.sources[name].path) in (
            self.node.binds()
        )
        if data.draw(st.integers(0, 3)):
            # In place: the kernel takes mounts off a file that is replaced or deleted.
            self.change_source(name, self.next_of(data, name), True)
        with self.lab.serving_nobody(why):
            if kind == "prolog":
                self.prolog(numbers[1], [name])
            elif kind == "step":
                self.step(numbers[1], name)
            else:
                self.epilog(numbers[0])

    # What befalls the machine and the file server

    def version(self, seed: int, size: int, owner: User, mode: int) -> Version:
        return Version(content(seed, size), owner, mode)

    def change_source(self, name: str, to: Seen, in_place: bool) -> None:
        self.lab.change(name, to, in_place)
        self.learn(name)

    def learn(self, name: str) -> None:
        """The key that the source has now."""
        source = self.lab.sources[name]
        if source.now is not None:
            self.known[self.lab.key(source)] = source.now

    @rule(data=st.data(), name=names, in_place=st.booleans())
    def change(self, data: st.DataObject, name: str, in_place: bool) -> None:
        self.change_source(name, self.next_of(data, name), in_place)

    def next_of(self, data: st.DataObject, name: str) -> Seen:
        """Anything; or, harder to notice, other bytes in a file that looks the same."""
        now = self.lab.sources[name].now
        if now is None or data.draw(st.booleans()):
            return data.draw(self.versions())
        return self.version(data.draw(seeds), len(now.data), now.owner, now.mode)

    def versions(self) -> st.SearchStrategy[Seen]:
        """What may come to lie at a path; now and then nothing."""
        some = st.builds(self.version, seeds, self.sizes, owners, modes)
        return st.integers(0, 7).flatmap(lambda n: st.just(MISSING) if n == 7 else some)

    @rule(name=names, owner=owners, mode=modes)
    def change_rights(self, name: str, owner: User, mode: int) -> None:
        now = self.lab.sources[name].now
        if now is not None:
            self.change_source(name, Version(now.data, owner, mode), True)

    @precondition(lambda self: not self.lab.filled())
    @rule(leave=st.sampled_from((0, 4096, 500_000, 3_000_000)), run=st.booleans())
    def fill_disk(self, leave: int, run: bool) -> None:
        self.lab.fill(self.node.places.root if run else self.node.nvme, leave)

    @precondition(lambda self: self.lab.filled())
    @rule()
    def unfill_disk(self) -> None:
        self.lab.unfill()

    @rule(hours=st.sampled_from((-24, -1, 1, 2, 24)))
    def set_clock(self, hours: int) -> None:
        # Never within a tick of a source's times: no machine here waits for that.
        self.clock = Later(hours * HOUR)

    @rule(loses=st.sampled_from(("nothing", "bytes", "bytes", "disk")), which=st.integers(0, 9))
    def reboot(self, loses: str, which: int) -> None:
        self.lab.reboot()
        if loses == "disk":
            self.lab.lose_cache()
        elif loses == "bytes":
            self.lab.tally["entries lost bytes"] += self.lab.disk.forgets(which)
        self.jobs.clear()
        self.starting.clear()
        self.leased.clear()
        self.untidy = False

    @rule()
    def lose_cache(self) -> None:
        """Somebody deletes it under running jobs."""
        self.lab.lose_cache()
        self.leased.clear()

    # The end

    def teardown(self) -> None:
        """All jobs end; then the node is as good as new, but for what the cache holds."""
        self.lab.unfill()
        self.lab.switch("")
        self.lab.configure(max_size="32M", redirect="bind")
        for number in sorted(self.jobs):
            self.epilog(number)
        self.sweep(dry_run=False)
        assert self.node.binds() == {}
        assert self.node.leases.list_leases() == []
        self.change_source("one", Version(content(1, 5000), ALICE, 0o644), False)
        self.prolog(99, ["one"])
        assert str(self.lab.sources["one"].path) in self.node.binds()
        self.epilog(99)
        assert self.node.binds() == {}
        for folder in (self.node.places.leases, self.node.places.redirects):
            assert list(folder.iterdir()) == []
        self.check_cache()

    def check_cache(self) -> None:
        """What is stored is whole, and counted by the blocks that it takes."""
        assert self.lab.walked() == self.lab.used()
        assert list(self.node.cache.evicted.iterdir()) == []
        self.check_entries()

    def check_entries(self) -> None:
        """Each holds what its key stands for."""
        self.lab.disk.check()
        for one in self.stored_entries():
            assert one.entry is not None, f"{one.key} is damaged"
            if one.key not in self.known and one.entry.identity.path in self.halfway:
                continue
            data = self.lab.disk.read(self.node.cache.image_path(one.key))
            assert data == self.known[one.key].data, f"{one.key} holds other bytes than its source"
