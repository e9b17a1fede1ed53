"""Where a node is: `host`, `host:port`, `::1` or `[::1]:port`. Pure."""

import msgspec


class Address(msgspec.Struct, frozen=True):
    """`host` is a name or an address, IPv6 ones without brackets."""

    host: str
    port: int


def parse(text: str, port: int) -> Address:
    """`port` is that of an address that names none. Raises ValueError."""
    host, after = text, ""
    if text.startswith("["):
        host, bracket, after = text[1:].partition("]")
        if not bracket or after[:1] not in ("", ":"):
            raise ValueError(f"expected an address such as [::1]:7717, got {text!r}")
    elif text.count(":") == 1:
        host, _, after = text.partition(":")
        after = f":{after}"
    if after:
        digits = after[1:]
        if not (digits.isascii() and digits.isdigit() and 0 < int(digits) < 65536):
            raise ValueError(f"expected a port from 1 to 65535, got {digits!r}")
        port = int(digits)
    if not host:
        raise ValueError(f"expected a host's name or address, got {text!r}")
    return Address(host, port)
