"""Why did a peer not give a chunk?"""

from typing import Literal

Why = Literal["absent", "refused", "silent", "wrong", "slow"]


class Failed(Exception):
    """A chunk that did not come; `why` is what the engine learns from it.

    absent: the peer runs, and has it not, or not yet · refused: not reached, or turned away ·
    silent: no byte for a while · wrong: bytes or seal are not right · slow: it took too long, or
    the engine wanted it no more.
    """

    def __init__(self, why: Why, detail: str = "") -> None:
        super().__init__(f"{why}: {detail}" if detail else why)
        self.why: Why = why
