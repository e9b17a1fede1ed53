"""Makes HTML and SVG from text that users wrote: what is no Markup is escaped, everywhere. Pure."""

from html import escape

from forestage.units import MAX_TOLD, printable


class Markup(str):
    """Text that a browser may read; only `tag`, `join` and constants of ours make it."""

    __slots__ = ()


def tag(name: str, *inside: str, **attributes: str | int | float) -> Markup:
    """An element. `class_` is `class`, `aria_label` is `aria-label`; empty ones are left out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(printable(str(value)))}"'
        for key, value in attributes.items()
        if value != ""
    )
    return Markup(f"<{name}{told}>{join(*inside)}</{name}>")


def join(*parts: str) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else text(part) for part in parts))


def text(words: str) -> Markup:
    """Control characters, and what turns the direction of writing, are shown as what they are."""
    pieces = (words[at : at + MAX_TOLD] for at in range(0, len(words), MAX_TOLD))
    return Markup(escape("".join(map(printable, pieces))))
