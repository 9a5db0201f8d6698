"""Reports are one self-contained file, and no text in them can become markup."""

import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from training import report
from training.report import Html

NASTY = "<script>alert('x')</script> & \"quoted\""


class Page(HTMLParser):
    """Collects tags, attributes and ids; fails on tags that do not close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def line(axes):
    axes.plot([0, 1], [0, 1], label=r"a \$ b")
    axes.legend()


def everything():
    drawing = report.draw(line)
    return [
        report.heading(NASTY),
        report.paragraph(NASTY, report.badge(NASTY, "warn"), report.code(NASTY)),
        report.tiles([(NASTY, NASTY, NASTY)]),
        report.table([NASTY, "n"], [[NASTY, 1], [report.badge(NASTY, "bad"), None]], caption=NASTY),
        report.grid([report.figure(drawing, NASTY), report.figure(report.draw(line, width=3), "other")]),
        report.details(NASTY, report.paragraph("inside")),
    ]


def test_every_text_is_escaped_wherever_it_stands():
    text = report.page(NASTY, everything(), subtitle=NASTY)
    page = Page(text)
    assert "script" not in page.tags
    assert "<script" not in text
    assert sum(NASTY in part for part in page.texts) == 16
    assert ("aria-label", NASTY) in page.attributes


def test_a_page_needs_nothing_from_outside_and_runs_nothing():
    page = Page(report.page("t", everything()))
    assert not {"script", "link", "iframe", "object", "img"} & set(page.tags)
    targets = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "action")]
    assert targets
    assert all(target.startswith("#") for target in targets)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_ids_of_several_figures_differ_and_references_resolve():
    page = Page(report.page("t", everything()))
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for name, value in page.attributes if name in ("href", "xlink:href")}
    used |= set(re.findall(r"url\(#([^)]+)\)", " ".join(value or "" for _, value in page.attributes)))
    assert used <= set(ids)


def test_the_same_report_is_the_same_text():
    assert report.page("t", everything()) == report.page("t", everything())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0, "0"),
        (1234567, "1,234,567"),
        (0.0, "0.0000"),
        (0.90441, "0.9044"),
        (-0.5, "-0.5000"),
        (0.000123, "0.000123"),
        (1.5e9, "1,500,000,000"),
        (12345.678, "12,345.6780"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_written_for_reading(value, text):
    assert report.number(value) == text


def test_percent_keeps_number_and_unit_on_one_line():
    assert report.percent(0.12345) == "12.3\u00a0%"
    assert report.percent(None) == "–"


def test_numeric_columns_stand_right_and_missing_cells_are_dashes():
    text = report.table(["a", "b"], [["x", 0.25], ["y", None]])
    assert re.findall(r"<td class=\"([^\"]*)\">([^<]*)", text) == [("text", "x"), ("num", "0.2500"), ("text", "y"), ("num none", "–")]


def test_a_row_of_another_width_is_an_error():
    for rows in ([["x"]], [["x", "y"], ["x"]]):
        with pytest.raises(ValueError, match="zip"):
            report.table(["a", "b"], rows)
    assert "<tbody></tbody>" in report.table(["a", "b"], [])


def test_dollar_signs_and_long_texts_are_tamed_for_figures():
    assert report.figure_text("$a$") == r"\$a\$"
    assert len(report.figure_text("x" * 99)) == 24


def test_pixels_show_the_figure():
    image = report.pixels(report.draw(line, width=3, height=2))
    assert image.dtype == np.uint8
    assert image.shape[2] == 3
    assert image.shape[1] / image.shape[0] == pytest.approx(1.5, abs=0.02)
    assert image.min() < 100
    assert image.max() == 255


def test_drawing_leaves_global_settings_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    report.figure(report.draw(line), "x")
    report.pixels(report.draw(line))
    assert dict(mpl.rcParams) == before


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "report.html"
    report.write_text(path, "first")
    with pytest.raises(UnicodeEncodeError):
        report.write_text(path, "\udc80")
    assert path.read_text() == "first"
    report.write_text(path, "zweite – Fassung")
    assert path.read_text(encoding="utf-8") == "zweite – Fassung"
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_importing_draws_in_no_matplotlib():
    code = "import sys, training.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_markup_is_made_by_this_module_only():
    assert isinstance(report.badge("x", "good"), Html)
    assert "&lt;b&gt;" in report.paragraph("<b>")
