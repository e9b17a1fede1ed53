"""Sizes, durations and shares: parsed from what people write, and formatted for them. Pure.

The parsers take a value as it comes out of YAML or off a command line. Whatever it is, they return
a number, or raise ValueError with what was expected and what was found.
"""

import re

import msgspec

MAX_SIZE = 2**63 - 1  # bytes; the largest offset a file can have
MAX_DURATION = 3650 * 86400.0  # seconds; ten years is a typing error, not a deadline

MAX_TEXT = 1000  # characters of a user's text in a log line or an event

_PREFIXES = "KMGTP"
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

# Texts, which re compiles when they are needed: most hooks read no size.
# re.ASCII: \d would take every script's digits, and K the Kelvin sign. The counts keep
# a megabyte of digits away from int(), which is quadratic and has a limit of its own.
_DECIMALS = 9
_NUMBER = rf"\d{{1,19}}(?:\.\d{{1,{_DECIMALS}}})?"
_SIZE = rf"({_NUMBER}) ?(?:([{_PREFIXES}])(?:I?B)?|B)?"
_DURATION = "".join(rf"(?:({_NUMBER}){unit})?" for unit in _SECONDS)
# Four decimals, because that is what Amount prints: what is read is what is shown.
_SHARE = r"(\d{1,3}(?:\.\d{1,4})?)%"

_A_SIZE = "a size such as 23GiB or 500M"
_A_DURATION = "a duration such as 90s or 10m"
_A_SHARE = "a share such as 80%"


class SizeOrShare(msgspec.Struct, frozen=True):
    """Bytes, or a share (0 to 1) of a total that is known only later; one of the two is set."""

    size: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, value: object) -> "SizeOrShare":
        """Reads "80%", or a size as `parse_size` takes it."""
        try:
            if isinstance(value, str) and value.endswith("%"):
                return cls(share=parse_share(value))
            return cls(size=parse_size(value))
        except ValueError:
            raise _unexpected_value_error(f"{_A_SIZE}, or {_A_SHARE}", value) from None

    def resolve_bytes(self, total: int) -> int:
        """Returns the bytes meant of `total` bytes; a size is itself, even above `total`."""
        if self.share is None:
            return self.size or 0
        # Rounded, not cut: 29% of 100 is 28.999999999999996 in floating point.
        return min(total, round(total * self.share))

    def __str__(self) -> str:
        if self.share is None:
            return format_exact_size(self.size or 0)
        return f"{self.share * 100:.4f}".rstrip("0").rstrip(".") + "%"


def _match_whole(
    pattern: str, value: object, flags: re.RegexFlag = re.ASCII
) -> "re.Match[str] | None":
    return re.fullmatch(pattern, value, flags) if isinstance(value, str) else None


def is_number(text: str) -> bool:
    """Whether a text is nothing but digits, as few as int() takes in any case.

    Other scripts' digits are none: str.isdigit() knows "²" as one, of which int() can make nothing.
    """
    return text.isascii() and text.isdigit() and len(text) <= 20


def parse_size(value: object) -> int:
    """Returns bytes from "23GiB", "23G", "1.5T", "500 MB", "0" or an int.

    K, M, G, T, P are binary (1024) with or without B or iB and in either case: disks are
    sold in powers of ten, but an admin who writes 500G has df -h in mind. A fraction needs
    a unit and is cut to whole bytes.
    """
    size = -1
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif match := _match_whole(_SIZE, value, re.ASCII | re.IGNORECASE):
        whole, _, decimals = match[1].partition(".")
        if match[2] or not decimals:
            unit = 1 << 10 * (_PREFIXES.index(match[2].upper()) + 1) if match[2] else 1
            # Integers all the way: a float is off by bytes above 8 PiB.
            size = int(whole) * unit + int(decimals or "0") * unit // int(10 ** len(decimals))
    if not 0 <= size <= MAX_SIZE:
        raise _unexpected_value_error(_A_SIZE, value)
    return size


def parse_duration(value: object) -> float:
    """Returns seconds from "10m", "90s", "1h30m", "250ms", "1d", "15" or a number of seconds.

    Units go from large to small, each at most once. What is finer than a nanosecond is rounded.
    """
    seconds = -1.0
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = value
    elif isinstance(value, str) and _match_whole(_NUMBER, value):
        seconds = float(value)
    elif match := _match_whole(_DURATION, value) if value else None:
        counts = zip(match.groups(), _SECONDS.values(), strict=True)
        seconds = sum(float(count) * unit for count, unit in counts if count)
    # Written this way round, because nan compares false with everything.
    if not 0 <= seconds <= MAX_DURATION:
        raise _unexpected_value_error(_A_DURATION, value)
    # 71 * 0.001 is 0.07100000000000001, which nobody wrote and no text of nine decimals means.
    return round(float(seconds), _DECIMALS)


def parse_share(value: object) -> float:
    """Returns 0 to 1 from "80%". A bare 80 or 0.8 is refused: it could mean either."""
    match = _match_whole(_SHARE, value)
    if match is None or float(match[1]) > 100:
        raise _unexpected_value_error(_A_SHARE, value)
    return float(match[1]) / 100


def format_exact_size(size: int) -> str:
    """Returns `size` bytes as `parse_size` reads them: "23GiB", "1000"; nothing is rounded."""
    power = 0
    while size and size % 1024 == 0 and power < len(_PREFIXES):
        size //= 1024
        power += 1
    return f"{size}{_PREFIXES[power - 1]}iB" if power else str(size)


def format_size(size: float) -> str:
    """Returns `size` bytes for people, rounded: "512 B", "1.5 GiB"."""
    power = 0
    # Just below 1024, or 1023.99 MiB would print as 1024 MiB.
    while size >= 1023.95 and power < len(_PREFIXES):
        size /= 1024
        power += 1
    number = f"{size:.1f}".removesuffix(".0")
    return f"{number} {_PREFIXES[power - 1]}iB" if power else f"{number} B"


def format_duration(seconds: float) -> str:
    """Returns `seconds` for people, rounded: "0.12s", "1m30s", "2h"; below 0.1 ms "0s"."""
    if seconds < 0.0001:
        return "0s"
    if seconds < 59.95:
        return f"{seconds:.3g}s"
    rest = round(seconds)
    text = ""
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(rest, int(_SECONDS[unit]))
        text += f"{count}{unit}" if count else ""
    return text


def format_rough_duration(seconds: float) -> str:
    """Returns `seconds` for users, who gain nothing from more: "0.3s", "12s", "1m30s"; below 0.1 s
    ""."""
    tenths = round(seconds, 1)
    return format_duration(tenths if seconds < 10 else round(seconds)) if tenths else ""


def format_exact_duration(seconds: float) -> str:
    """Returns `seconds` as `parse_duration` reads them: "2h", "0.071s"; nothing is rounded."""
    text = format_duration(seconds)
    if parse_duration(text) == seconds:
        return text
    # Never 1e-05s: the parser takes no exponent.
    return f"{seconds:.{_DECIMALS}f}".rstrip("0").rstrip(".") + "s"


def format_rate(size: float, seconds: float) -> str:
    """Returns the rate for people: "2.1 GiB/s"; "-" if no time has passed."""
    return f"{format_size(size / seconds)}/s" if seconds > 0 else "-"


def is_utf8(text: str) -> bool:
    """Return whether a text that may hold undecodable bytes of a name holds none. Pure."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten_middle(text: str, most: int = MAX_TEXT) -> str:
    """Return `text` with at most so many characters: a long text loses its middle. Pure.

    Messages begin with a path, which may be long, and end with what is wrong with it.
    """
    if len(text) <= most:
        return text
    tail = most // 2
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def make_printable(text: str) -> str:
    """Returns a user's text as one short line: control characters and undecodable bytes escaped."""
    short = shorten_middle(text)
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in short
    )


def quote_value(value: object) -> str:
    """Returns `value` for an error message: short and on one line, whatever it is."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else f"{value[:59]}…")
    if isinstance(value, int) and abs(value) > MAX_SIZE:
        return "a huge number"  # Python refuses to print integers of 4300 digits
    if isinstance(value, (int, float)):
        return repr(value)
    # A list or mapping is never printed: YAML aliases can make it grow without end.
    return "a mapping" if isinstance(value, dict) else f"a {type(value).__name__}"


def _unexpected_value_error(expected: str, value: object) -> ValueError:
    return ValueError(f"expected {expected}, got {quote_value(value)}")
