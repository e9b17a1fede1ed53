"""The report's page: names stay text, nothing is run or fetched, and everyone can read it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.events import CopyOutcome, EventHook, EventRecord, Outcome, RequestOutcome
from forestage.features import report as reports
from forestage.features.report import figure_format as fmt
from forestage.features.report.figures import DAY
from forestage.features.report.page import round_up_count, round_up_size

GIB = 1 << 30
NOW = 1_800_000_000.0
VOID = {"meta"}
PLAIN = ("/lustre/a.sqsh",)
HOSTILE = (
    '/lustre/<script>alert(1)</script>/"\' onload=alert(1) x=".sqsh',
    "/lustre/</title></style><img src=x onerror=alert(1)>",
    "/lustre/]]><!--&lt;b&gt;&#60;i>",
    "/lustre/{{ report }}{% raw %}.sqsh",
    "/lustre/\x00\x1b[31m\u202egnp.sqsh",
)


class Page(HTMLParser):
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

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


def event(hook: EventHook, number: int, outcome: Outcome) -> EventRecord:
    time = NOW - (number % 20) * DAY
    return EventRecord(time=time, hook=hook, job=number, outcome=outcome, node=f"n{number % 3}")


def sample(paths: tuple[str, ...]) -> list[EventRecord]:
    """Copies and hits of these images, one missed deadline and one eviction."""
    events = []
    for n in range(40):
        path = paths[n % len(paths)]
        copy = CopyOutcome("copied", image=path, key=path, size=GIB, copying=2.0)
        hit = RequestOutcome(
            "hit", image=path, key=path, size=(n + 1) * GIB, redirect="mounted", wait=0.1
        )
        events += [event("stager", n, copy), event("prolog", n, hit)]
    missed = RequestOutcome("declined", reason="deadline", key="k")
    evicted = CopyOutcome("released", evicted=("a", "b"))
    return [*events, event("prolog", 99, missed), event("epilog", 99, evicted)]


def page(tmp_path: Path, events: list[EventRecord], *more: bytes) -> bytes:
    """From a log with these events, then `more` lines, to the page."""
    log = tmp_path / "log"
    log.write_bytes(b"\n".join([*map(msgspec.json.encode, events), *more]))
    report = reports.make_report_from_logs([str(log)], reports.TimeWindow(), NOW, 3600)
    return reports.format_page(report)


@pytest.fixture
def plain(tmp_path: Path) -> bytes:
    return page(tmp_path, sample(PLAIN))


def test_report_page_escapes_hostile_image_names(tmp_path: Path, plain: bytes) -> None:
    hostile = Page(page(tmp_path, sample(HOSTILE)))
    known = {name for name, _ in Page(plain).attributes}
    assert set(hostile.names) <= set(Page(plain).names)
    assert {name for name, _ in hostile.attributes} <= known
    assert not any(name.startswith("on") for name in known)
    for path in HOSTILE[:4]:
        assert path.rpartition("/")[2] in hostile.text
    for odd in "\x00\x1b\u202e":
        assert odd not in hostile.text
    assert "\\x00\\x1b[31m\\u202egnp.sqsh" in hostile.text


def test_report_page_has_no_scripts_and_no_external_resources(plain: bytes) -> None:
    parsed = Page(plain)
    assert not {"script", "link", "img", "iframe", "object", "a", "use"} & set(parsed.names)
    assert not {"src", "href", "xlink:href", "srcset", "background"} & set(dict(parsed.attributes))
    assert b"url(" not in plain
    assert b"@import" not in plain
    assert b"://" not in plain
    assert "default-src 'none'; style-src 'unsafe-inline'" in parsed.values("content")


def test_report_plots_have_unique_labels_and_bars_within_their_frame(plain: bytes) -> None:
    parsed = Page(plain)
    ids, labels = parsed.values("id"), parsed.values("aria-labelledby")
    assert len(ids) == len(set(ids))
    assert len(labels) == parsed.names.count("svg") == 4
    assert {one for label in labels for one in label.split()} == set(ids)
    assert "97.5 %" in parsed.text, "40 of 41"
    boxes = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', plain.decode())
    assert boxes
    assert all(float(y) >= 0 and float(y) + float(tall) <= 100.02 for y, tall in boxes)


def test_report_page_mentions_damaged_lines_above_the_plots(tmp_path: Path, plain: bytes) -> None:
    impossible = msgspec.structs.replace(event("prolog", 1, RequestOutcome("hit")), time=1.0)
    events = [*sample(PLAIN), impossible]
    damaged = Page(page(tmp_path, events, b"{}", b"\xff", b"[")).text
    assert "3 lines could not be read." in damaged
    assert "1 event had a time before 2020 or in the future." in damaged
    assert damaged.index("could not be read") < damaged.index("Over time")
    assert "could not be read" not in Page(plain).text


def test_report_page_without_events_says_so_and_has_no_plot(tmp_path: Path) -> None:
    parsed = Page(page(tmp_path, []))
    assert "no events" in parsed.text
    assert "svg" not in parsed.names


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (fmt.format_share(0.99999), "99.9 %"),
        (fmt.format_share(1.0), "100.0 %"),
        (fmt.format_share(0.29), "29.0 %"),
        (fmt.format_share(None), "–"),
        (fmt.format_seconds(0.0204), "20 ms"),
        (fmt.format_seconds(34.4), "34 s"),
        (fmt.format_seconds(-47.0), "−47 s"),
        (fmt.format_seconds(27114.0), "7.5 h"),
        (fmt.format_seconds(3600 * 12345.6), "12,346 h"),
        (fmt.format_utc_offset(-12600), "UTC−03:30"),
        (fmt.format_plural(1, "copy", "copies"), "1 copy"),
        (fmt.format_plural(1200, "copy", "copies"), "1,200 copies"),
    ],
)
def test_report_numbers_are_rounded_without_exaggeration(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.integers(0, 10**15))
def test_plot_scale_covers_the_largest_value_without_excess(largest: int) -> None:
    for top in (round_up_count(largest), round_up_size(largest)):
        assert top >= max(largest, 1)
        assert top <= max(2, largest * 5)
