"""What next, and from whom? The state of one copy whose node has others to ask.

Pure: no threads, no I/O, and the time (monotonic seconds) is an argument. The engine calls it
under its lock; bench/peers-model drives the same code with simulated links.

Own chunks come from the source. All others come from whoever around has them: each answer of a
peer says what it has. Where nobody is known to have any, a worker waits with one that is nearer to
the chunk's reader. What a peer should have read that is out, or for whom the source fails, the next
in the order reads. Who begins late finds that others have read its share meanwhile. When nothing
arrives any more, everybody reads, each somewhere else.
"""

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from forestage.asks import Ask, Policy, Why
from forestage.shares import SOURCE, Shares
from forestage.standing import Standing, Usual, bits, lowest, sum_of


class Supply:
    """Which chunks are missing, asked for, in. Sets of chunks are numbers: bit 5 is chunk 5."""

    def __init__(
        self,
        key: str,
        nodes: Sequence[str],
        me: str,
        missing: Iterable[int],
        chunk_bytes: int,
        policy: Policy | None = None,
    ) -> None:
        self.shares = Shares(key, nodes)
        self.me = me
        self.policy = policy or Policy()
        self.asks: dict[Ask, float] = {}  # under way, since when
        self.by_source = self.by_peers = 0
        self.missing = sum_of(missing)
        self._count = self.missing.bit_length()
        self._open = self.missing  # of these, nobody is asked for
        place, around = self.shares.place[me], self.shares.around(me)
        self._share = self.missing & sum_of(range(place, self._count, len(self.shares.ring)))
        self._from: Counter[str] = Counter()  # chunks by whom they should come from
        for number in bits(self.missing & ~self._share):
            self._from[self.shares.nearer(number, me)[0]] |= 1 << number
        self._peers = Standing(around)
        self._each = max(1, self.policy.busy // max(1, len(around)))  # asked of one peer at once
        self._sure: set[Ask] = set()  # asks of peers that said they have it
        self._glances: set[Ask] = set()  # asks that only want to know what there is
        self._turn = place * 7919  # where to look first, so that not all take the same
        self._first_guess = self.policy.patience + chunk_bytes / self.policy.slowest
        self._usual = Usual()  # of a chunk, wherever it comes from
        self._to_read = Usual()  # of one that this node reads
        self._begun: float | None = None
        self._fresh = 0.0  # when the last chunk came in
        self._probe_until = 0.0
        self._alone = 0  # chunks to read at once because nothing comes; 0: it does
        self.blind = False  # the source fails here

    @property
    def done(self) -> bool:
        return not self.missing

    def next_of_source(self, now: float) -> Ask | None:
        """What a worker is to read; None: nothing now."""
        begun = self._begin(now)
        if self.blind or self._probing(now):
            return None
        number = self._of_share(now)
        if number is None and (self._peers.alone or now - begun >= self.policy.grace):
            for choose in (self._stand_in, self._overdue, self._in_need):
                number = choose(now)
                if number is not None:
                    break
        return None if number is None else self._ask(number, SOURCE, now)

    def next_of_peers(self, now: float) -> Ask | None:
        """What a worker is to ask for, and of whom; None: nothing now."""
        begun = self._begin(now)
        return self._known(now, begun) or self._hoped(now) or self._second(now)

    def give_up(self, ask: Ask) -> float:
        """Seconds after which a worker must abandon this ask."""
        return min(self.policy.longest, self._patience())

    def wait(self, ask: Ask) -> float:
        """Seconds that the peer may wait for the chunk, if it does not have it."""
        return 0.0 if ask in self._glances else self.policy.wait

    def knows(self, peer: str, has: int, now: float, blind: bool = False) -> None:
        """A peer that has the copy, or a part of it, said what; `blind`: its source fails."""
        if not self._peers.any_heard:
            self._alone = 0
        self._peers.knows(peer, has, now, blind)

    def got(self, ask: Ask, now: float) -> None:
        """The chunk is in, and right."""
        sure = ask in self._sure
        took = now - self._end(ask)
        if sure and took > self.policy.tardy * self._usual.seconds > 0:
            self._peers.tardy(ask.peer, now + self.policy.patience)
        if self.obsolete(ask):
            return
        self.missing &= ~(1 << ask.number)
        self._open &= self.missing
        self._fresh = now
        self._usual.took(took)
        if ask.peer == SOURCE:
            self._to_read.took(took)
            self.by_source += 1
            self._alone = min(2 * self._alone, self._count)
        else:
            self.by_peers += 1
            self._alone = 0
            self._peers.gave(ask.peer)

    def failed(self, ask: Ask, why: Why, now: float) -> None:
        """The chunk did not come; `source`: the shared file system gave an error."""
        self._end(ask)
        has = self._peers.has.get(ask.peer)
        if why == "slow" and self.obsolete(ask):
            return  # it was stopped
        if why in ("refused", "silent", "wrong"):
            self._peers.unreached(ask.peer)
        elif why == "absent":
            self._peers.answered(ask.peer)
        if why == "source":
            self.blind = True
        elif why == "wrong":
            self._peers.drop(ask.peer)
        elif why == "silent":
            self._peers.hung(ask.peer, self.policy.hung, now)
        elif why == "refused":
            self._peers.rest(ask.peer, self.policy.refused, now)
        elif why == "slow":
            self._peers.rest(ask.peer, self.policy.patience, now)
        elif has is None or has >> ask.number & 1:  # else it has the copy, but not this chunk yet
            self._peers.rest(ask.peer, self.policy.absent, now)

    def obsolete(self, ask: Ask) -> bool:
        """The chunk came in by another ask: stop the transfer."""
        return not self.missing >> ask.number & 1

    def twice(self, ask: Ask) -> bool:
        """Whether the chunk is on its way already, by another ask."""
        return any(other.number == ask.number and other != ask for other in self.asks)

    def hopeless(self, now: float) -> bool:
        """The source fails here, and no peer has given anything for long."""
        return self.blind and now - self._fresh > self.policy.longest / 2

    def _begin(self, now: float) -> float:
        if self._begun is None:
            self._begun = self._fresh = now
            self._probe_until = now + self.policy.probe if self._peers.around else now
        return self._begun

    def _ask(self, number: int, peer: str, now: float) -> Ask:
        ask = Ask(number, peer)
        self.asks[ask] = now
        self._peers.load[peer] += 1
        if self._peers.has.get(peer, 0) >> number & 1:
            self._sure.add(ask)
        self._open &= ~(1 << number)
        return ask

    def _end(self, ask: Ask) -> float:
        since = self.asks.pop(ask)
        self._peers.load[ask.peer] -= 1
        self._glances.discard(ask)
        self._sure.discard(ask)
        if not self.twice(ask):
            self._open |= self.missing & 1 << ask.number
        return since

    def _patience(self) -> float:
        usual = self._usual.seconds
        return max(self.policy.patience, 4 * usual) if usual else self._first_guess

    # From the source

    def _probing(self, now: float) -> bool:
        """Whether it is too early to read: others may turn out to have read it all."""
        return now < self._probe_until and self._peers.met() < min(4, len(self._peers.around))

    def _of_share(self, now: float) -> int | None:
        """The first of our share that nobody has read for us because we had not begun."""
        if self._peers.reading() >= self.policy.at_once:
            return None
        left = self._open & self._share
        left = left and left & ~self._peers.offered(now)
        return lowest(left) if left else None

    def _stand_in(self, now: float) -> int | None:
        """A chunk that nobody has and whose reader, and all in the order before us, are out.

        Where there is nothing else to be had any more, being tardy is as bad as being out.
        """
        offered = self._peers.offered(now)
        ended = not self._open & offered
        out = self._peers.out(now, ended)
        left = self._open & ~offered
        chunks = (self._first_of(peer, left, out) for peer in out)
        # One of each in turn, so that each has something to spread soon.
        return min((number for number in chunks if number is not None), default=None)

    def _first_of(self, peer: str, left: int, out: Container[str]) -> int | None:
        """The first chunk of a peer's share that is for us, as the first who is not out."""
        for number in range(self.shares.place[peer], self._count, len(self.shares.ring)):
            order = self.shares.order(number) if left >> number & 1 else ()
            if next((node for node in order if node not in out), "") == self.me:
                return number
        return None

    def _overdue(self, now: float) -> int | None:
        """At the end: what takes its reader long, if this node is the next in the order."""
        if self._open:
            return None
        # Reading takes a peer as long as us. Who waits for it asks anew twice a second.
        limit = 3 * max(self._usual.seconds, self._to_read.seconds)
        stuck = now - self._fresh > limit > 0
        for ask in self.asks if stuck else self._slow(limit, now):
            mine = self.me in self.shares.order(ask.number, 2) and not self.obsolete(ask)
            if mine and Ask(ask.number, SOURCE) not in self.asks:
                return ask.number
        return None

    def _in_need(self, now: float) -> int | None:
        """Nothing has come for long: some chunk that is missing, on each node another one."""
        reading = self._peers.reading()
        silence = max(self._first_guess, self._patience(), 4 * self._to_read.seconds)
        if not self._alone:
            if self._peers.alone or self._peers.nobody(now):
                self._alone = self._count
            elif not reading and now - self._fresh > silence:
                self._alone = 1
        if reading >= self._alone:
            return None
        left = [number for number in bits(self.missing) if Ask(number, SOURCE) not in self.asks]
        if not left:
            return None
        return left[self.shares.place[self.me] * len(left) // len(self.shares.ring)]

    # From peers

    def _known(self, now: float, begun: float) -> Ask | None:
        """A chunk that a peer has; first of those that should come from it: so all send alike."""
        if not self._open:
            return None
        self._turn += 1
        spare: tuple[int, str] | None = None
        around = self._peers.around
        for step in range(len(around)):
            peer = around[(self._turn + step) % len(around)]
            if self._peers.load[peer] >= self._each or self._peers.resting(peer, now):
                continue
            has = self._peers.has.get(peer, 0) & self._open
            due = 0 if self._peers.is_tardy(peer, now) else self._from[peer] & self._open
            if has & self._share:  # read in our stead, and it is for us to spread
                return self._ask(lowest(has & self._share), peer, now)
            if has & due:
                return self._ask(self._some(has & due), peer, now)
            # Those that are to give us something are looked at often, all others now and then.
            if self._peers.quiet(peer, now, begun) > self.policy.news * (1 if due else 2):
                ask = self._ask(lowest(due or self._open), peer, now)
                self._glances.add(ask)
                return ask
            if has:
                spare = spare or (self._some(has), peer)
        return spare and self._ask(*spare, now)

    def _some(self, chunks: int) -> int:
        """One of these chunks: another one on each node, so that they have something to swap."""
        self._turn += 1
        low = self._turn * 40503 % self._count
        above = chunks >> low
        return low + lowest(above) if above else lowest(chunks)

    def _hoped(self, now: float) -> Ask | None:
        """A chunk that nobody is known to have: waits with one that should have it before us."""
        best: tuple[int, str] | None = None
        for peer in self._peers.seeing() if self._open else ():
            due = self._open & (self._from[peer] | (self._share if self.blind else 0))
            if due and not self._peers.load[peer] and not self._peers.resting(peer, now):
                found = lowest(due), peer
                best = found if best is None else min(best, found)
        return best and self._ask(*best, now)

    def _second(self, now: float) -> Ask | None:
        """Nothing is unasked: one that takes long is asked for a second time, of somebody else."""
        for ask in self._slow(1.5 * self._usual.seconds, now):
            if not self.twice(ask):
                for peer in self._peers.others_with(ask.number, ask.peer, now):
                    return self._ask(ask.number, peer, now)
        return None

    def _slow(self, limit: float, now: float) -> list[Ask]:
        """What is under way for so many seconds, and is still wanted."""
        late = [ask for ask, since in self.asks.items() if now - since > limit > 0]
        return [ask for ask in late if not self.obsolete(ask)]
