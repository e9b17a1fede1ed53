"""How the report's figures are made, and what was left out: said on the page itself. Pure."""

from forestage import report_words as say
from forestage.report import ENOUGH, Report
from forestage.report_markup import Markup, tag

START = (
    "An image that a job on one node began with, or a further step of it that reads it again. A job"
    " on eight nodes is eight starts. The first step of a job whose Prolog was seen is no further"
    " start."
)
RATIO = (
    "Hits, divided by all starts for which staging was tried: hits; joined, which waited for the"
    " copy of another job; cold ones, for which the image was copied; and those that had to use the"
    " original path. It is cut, not rounded."
)
MEDIANS = "They are at most 2 % above the true ones, so that logs of any length can be read."


def warnings(found: Report) -> list[Markup]:
    """What a reader must know before he believes the numbers; nothing where all is well."""
    left, logs = found.left, found.logs
    facts = (
        (logs.damaged, f"{say.plural(logs.damaged, 'line')} could not be read."),
        (left.unsound, f"{say.plural(left.unsound, 'event')} had figures that cannot be."),
        (
            left.undated,
            f"{say.plural(left.undated, 'event')} bore a time before 2020 or in the future.",
        ),
        (logs.twice, f"{say.plural(logs.twice, 'log')} had been given already."),
    )
    told = [text for number, text in facts if number]
    pieces: list[Markup] = []
    if told:
        told.append("None of that is counted, so the figures may be off by as much.")
        pieces.append(tag("p", " ".join(told), class_="told"))
    if left.went_back:
        text = (
            f"Clocks went back by more than an hour {say.plural(left.went_back, 'time')}: what was"
            " then is counted, but may stand in a wrong place over time."
        )
        pieces.append(tag("p", text, class_="told"))
    return pieces


def method(found: Report) -> Markup:
    items = (
        ("Start", START),
        ("Hit ratio", RATIO),
        ("Kept off the shared file system", _kept_off(found)),
        ("Start-up time saved", _estimate(found)),
        ("Medians", MEDIANS),
    )
    pieces = [piece for name, text in items for piece in (tag("dt", name), tag("dd", text))]
    return tag(
        "section",
        tag("h2", "How these figures are made"),
        tag("p", "All are from the nodes' event logs; nothing else was asked.", class_="note"),
        tag("dl", *pieces, class_="how"),
    )


def _kept_off(found: Report) -> str:
    by = {name: say.size(number) for name, number in found.kept_off.items()}
    return (
        f"The whole size of each image that a start found on its node ({by['hit']}) or in another"
        f" job's copy ({by['joined']}), and what copies got from other nodes ({by['peers']}). A job"
        " that would have read only a part of its image has spared less; events do not tell how"
        " much of an image is read."
    )


def _estimate(found: Report) -> str:
    if found.saved is None:
        return (
            "It is estimated from the pace of copies, of which these events have none that ran from"
            " beginning to end."
        )
    one = found.saved
    return (
        "An estimate. It is compared with copying the image at every start, as an rsync in the job"
        " script does. For each start that kept an image off the shared file system, that copy is"
        f" taken to run as fast as the copies here did: {say.rate(one.rate)}, the median of"
        f" {say.plural(one.copies, 'copy', 'copies')}, or the image's own median where it was"
        f" copied {ENOUGH} times and more. That makes {say.node_time(one.gross)}. From it is taken"
        f" all that was measured of waiting: {say.node_time(found.waited)}, in every Prolog and"
        " step, for cold starts and in vain too, though copying at every start would have cost"
        " them as much. Nodes are added up: eight nodes that start a minute earlier are eight"
        " minutes. How fast the container itself starts from the node's disk is not in it."
    )


def footer(found: Report) -> Markup:
    window = [
        f"{name} {say.minute(when, found)}"
        for name, when in (("since", found.window.since), ("until", found.window.until))
        if when is not None
    ]
    outside = f", {say.number(found.left.outside)} more outside of the time asked for"
    asked = f" ({' '.join(window)}{outside if found.left.outside else ''})" if window else ""
    text = (
        f"{say.plural(found.events, 'event')} of {say.plural(found.nodes, 'node')} in"
        f" {say.plural(found.logs.logs, 'log')}{asked}. Made by forestage on"
        f" {say.minute(found.made, found)} ({say.zone(found.offset)})."
    )
    return tag("footer", tag("p", text))
