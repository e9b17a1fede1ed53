"""The page: what users named is text and nothing else, all can read it, nothing is fetched."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forestage import report as work
from forestage import report_html, report_markup, report_plots, report_style
from forestage import report_words as say
from forestage.events import Event, Hook, Outcome
from forestage.report import DAY, Report
from forestage.report_logs import Read
from forestage.report_sums import Left, Sums, Window

GIB = 1 << 30
NOW = 1_800_000_000.0
VOID = {"meta"}
HOSTILE = (
    '/lustre/<script>alert(1)</script>/"\' onload=alert(1) x=".sqsh',
    "/lustre/</title></style><img src=x onerror=alert(1)>",
    "/lustre/]]><!--&lt;b&gt;&#60;i>",
    "/lustre/\x00\x1b[31m\u202egnp.sqsh",
    "/lustre/\ud800broken",
)


class Parsed(HTMLParser):
    """Every element and attribute of a page; its elements must close in their order."""

    def __init__(self, page: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page.decode())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, name: str) -> list[str]:
        return [value for one, value in self.attributes if one == name]


def event(hook: Hook, number: int, outcome: Outcome) -> Event:
    time = NOW - (number % 20) * DAY
    return Event(time=time, hook=hook, job=number, outcome=outcome, node=f"n{number % 3}")


def reported(paths: tuple[str, ...] = ("/lustre/a.sqsh",), read: Read | None = None) -> Report:
    sums = Sums(Window(), NOW)
    for n in range(40):
        path = paths[n % len(paths)]
        found = Outcome(
            "hit", image=path, key=path, size=(n + 1) * GIB, redirect="mounted", wait=0.1
        )
        copy = Outcome("copied", image=path, key=path, size=GIB, bytes=GIB, copying=2.0)
        sums.add(event("stager", n, copy), "log")
        sums.add(event("prolog", n, found), "log")
    sums.add(event("prolog", 99, Outcome("declined", reason="deadline", key="k")), "log")
    sums.add(event("epilog", 99, Outcome("released", evicted=("a", "b"))), "log")
    return work.report(sums, read or Read(logs=1), 3600)


PLAIN = report_html.page(reported())


def test_what_users_named_is_text_and_nothing_else() -> None:
    hostile = Parsed(report_html.page(reported(HOSTILE)))
    assert set(hostile.names) <= set(Parsed(PLAIN).names)
    known = {name for name, _ in Parsed(PLAIN).attributes}
    assert {name for name, _ in hostile.attributes} <= known
    assert not any(name.startswith("on") for name in known)
    for path in HOSTILE[:3]:
        assert path.rpartition("/")[2] in hostile.text
    for odd in "\x00\x1b\u202e":
        assert odd not in hostile.text


@given(st.text(st.characters(), min_size=1, max_size=60))
@settings(max_examples=60)
def test_no_text_makes_an_element_or_leaves_an_attribute(words: str) -> None:
    made = report_markup.tag("b", words, title=words)
    parsed = Parsed(made.encode())
    assert parsed.names == ["b"]
    assert [name for name, _ in parsed.attributes] == ["title"]
    if words.isprintable():
        assert parsed.text == words
        assert parsed.of("title") == [words]


def test_nothing_is_fetched_and_nothing_is_run() -> None:
    parsed = Parsed(PLAIN)
    assert not {"script", "link", "img", "iframe", "object", "a", "use"} & set(parsed.names)
    assert not {"src", "href", "xlink:href", "srcset", "background"} & set(dict(parsed.attributes))
    assert b"url(" not in PLAIN
    assert b"@import" not in PLAIN
    assert b"://" not in PLAIN
    assert "default-src 'none'; style-src 'unsafe-inline'" in parsed.of("content")


def test_each_plot_has_a_name_and_a_description_of_its_own() -> None:
    parsed = Parsed(PLAIN)
    ids = parsed.of("id")
    assert len(ids) == len(set(ids))
    labels = parsed.of("aria-labelledby")
    assert len(labels) == parsed.names.count("svg") == 4
    assert {one for label in labels for one in label.split()} == set(ids)
    assert "99.0" not in parsed.text
    assert "97.5 %" in parsed.text, "40 of 41"


def bright(colour: str) -> float:
    """https://www.w3.org/TR/WCAG21/#dfn-relative-luminance"""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [report_style.LIGHT, report_style.DARK], ids=["light", "dark"])
def test_words_and_bars_stand_out_from_their_ground(colours: dict[str, str]) -> None:
    ground = bright(colours["ground"])
    for name, least in (
        ("ink", 7.0), ("quiet", 4.5), ("hit", 3.0), ("joined", 3.0), ("cold", 3.0),
        ("original", 3.0),
    ):  # fmt: skip
        dark, light = sorted((ground, bright(colours[name])))
        assert (light + 0.05) / (dark + 0.05) >= least, name


def test_damage_is_told_before_all_else() -> None:
    damaged = reported(read=Read(logs=1, damaged=3, twice=1))
    text = Parsed(report_html.page(damaged)).text
    assert "3 lines could not be read. 1 log had been given already." in text
    assert text.index("could not be read") < text.index("Over time")
    assert "could not be read" not in Parsed(PLAIN).text
    moved = msgspec.structs.replace(reported(), left=Left(went_back=2))
    assert "back by more than an hour 2 times" in Parsed(report_html.page(moved)).text


def test_a_report_of_nothing_is_a_page() -> None:
    found = work.report(Sums(Window(), NOW), Read(), 0)
    assert "no events" in Parsed(report_html.page(found)).text


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (say.share(0.99999), "99.9 %"),
        (say.share(1.0), "100.0 %"),
        (say.share(0.29), "29.0 %"),
        (say.share(None), "–"),
        (say.seconds(0.0204), "20 ms"),
        (say.seconds(34.4), "34 s"),
        (say.node_time(-47.0), "−47 s"),
        (say.node_time(27114.0), "7.5 h"),
        (say.node_time(3600 * 12345.6), "12,346 h"),
        (say.zone(-12600), "UTC−03:30"),
        (say.plural(1, "copy", "copies"), "1 copy"),
        (say.plural(1200, "copy", "copies"), "1,200 copies"),
    ],
)
def test_a_number_is_told_as_it_is(told: str, expected: str) -> None:
    assert told == expected


@given(st.integers(0, 10**15))
def test_a_scale_holds_its_bars(most: int) -> None:
    for top in (report_plots.count_top(most), report_plots.size_top(most)):
        assert top >= max(most, 1)
        assert top <= max(2, most * 5)


def test_bars_stay_inside_their_plot() -> None:
    boxes = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', PLAIN.decode())
    assert boxes
    assert all(float(y) >= 0 and float(y) + float(tall) <= 100.02 for y, tall in boxes)
