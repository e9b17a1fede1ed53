"""What the configuration's files said, so that a hook need not import PyYAML to read them again.

    /run/forestage/config.json    documents, each by a hash of the text that it was read from

PyYAML's import is a tenth of what a hit costs a job. A text that has changed has another hash, so
that nothing here can be outdated; what is damaged, or cannot be written, is ignored.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from forestage.system import records
from forestage.system.sha256 import sha256


class YamlCache:
    """The documents of one reading of the configuration; without a file none is kept."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.stored: dict[str, object] = {}
        self.current: dict[str, object] = {}
        self.is_written = False  # by this reading
        if file is not None:
            with contextlib.suppress(OSError, records.DamagedRecord):
                self.stored = records.load(file, dict[str, object])

    def parse_cached(self, text: str, parse: Callable[[str], object]) -> object:
        """What `parse` returns for this text. Raises as it does."""
        if self.file is None:
            return parse(text)
        name = sha256(text.encode())
        self.current[name] = self.stored[name] if name in self.stored else parse(text)
        return self.current[name]

    def add_value(self, name: str, value: list[int | str]) -> None:
        """Has a change of this value count as a change of what was read."""
        if self.file is not None:
            self.current[name] = value

    def save_if_changed(self) -> bool:
        """Writes down what was read, if that is not what was there; returns whether it is not."""
        if self.file is None or self.current == self.stored:
            return False
        with contextlib.suppress(OSError, TypeError, ValueError, msgspec.MsgspecError):
            data = msgspec.json.encode(self.current)
            # YAML has dates, and numbers as names, for which JSON has only text.
            if msgspec.json.decode(data) == self.current:
                records.write(self.file, data)
                self.is_written = True
        return True
