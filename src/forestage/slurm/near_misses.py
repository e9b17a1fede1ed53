"""Words of a comment that were meant to be a hint, most likely, and are none. Pure.

    Stage=/a  stages=/a  stage:/a  --stage=/a  stage_wait=1m    another name, or another sign
    stage /a    stage-tell                                      no sign at all
    stage=/a, /b                                                a space after the comma
    project=x,stage=/a                                          inside of another word
    stage-dir=10 GiB                                            a space before the unit

Comments belong to everybody: accounting, CI, other tools. So a word counts only if it cannot well
be theirs: what follows a name that is nearly `stage` has to look like a path.
"""

from collections.abc import Iterator, Sequence

KNOWN = ("stage", "stage-dir", "stage-list", "stage-tell", "stage-wait")

UNITS = frozenset(("b", "k", "m", "g", "t", "kib", "mib", "gib", "tib", "kb", "mb", "gb", "tb"))
_PATHS = ("/", "./", "~", "$", '"', "'")


def is_missed(comment: str) -> bool:
    """Whether a path of a comment follows what is a hint's name but for a letter."""
    return any(name(word.partition("=")[0]) for word in words(comment) if "=/" in word)


def words(comment: str) -> list[str]:
    """The words of a comment, as hints are separated."""
    return comment.replace(";", " ").split()


def name(written: str) -> str:
    """The hint that a name is, but for case, `_`, dashes before it, or one letter; "" for none."""
    plain = written.lower().replace("_", "-").lstrip("-")
    if plain in KNOWN:
        return plain
    return next((known for known in KNOWN if _is_one_letter_off(plain, known)), "")


def _is_one_letter_off(word: str, known: str) -> bool:
    """Whether one letter was added, left out, or is another one."""
    if abs(len(word) - len(known)) > 1 or word == known:
        return False
    same = 0
    while same < min(len(word), len(known)) and word[same] == known[same]:
        same += 1
    ends = {word[same:]: known[same + 1 :], word[same + 1 :]: known[same:]}
    return word[same + 1 :] == known[same + 1 :] or any(a == b for a, b in ends.items())


def misses(found: Sequence[str]) -> Iterator[str]:
    """A sentence for each word that is a near miss; `found` are all words of the comment."""
    for number, word in enumerate(found):
        after = found[number + 1] if number + 1 < len(found) else ""
        if said := _miss(word, after):
            yield said


def _miss(word: str, after: str) -> str:
    written, sign, value = word.partition("=")
    if sign and (written in KNOWN or written.startswith("stage-")):  # what is unknown is said
        return _cut_off(word, value, after)
    if not sign:
        written, sign, value = word.partition(":")
    meant = name(written)
    if meant == "stage":
        value = value or after
        return f"{word} is no hint: write stage={value}" * value.startswith(_PATHS)
    if meant and (sign or written == meant):
        example = value or {"stage-tell": "yes"}.get(meant, "…")
        return f"{word} is no hint: write {meant}={example}"
    inner = next((f",{known}=" for known in KNOWN if f",{known}=" in word), "")
    if inner:
        hint = inner[1:] + word.partition(inner)[2]
        return f"{hint} inside of {word} is not read: separate hints by a space or `;`"
    return ""


def _cut_off(word: str, value: str, after: str) -> str:
    """What a space after a hint that is right has cut off."""
    if value.endswith(",") and after.startswith(_PATHS):
        return f"{after} after a comma and a space is not read: write {word}{after}"
    if value.isdigit() and after.lower() in UNITS:
        return f"{after} after a space is not read: write {word}{after}"
    return ""
