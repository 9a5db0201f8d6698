"""The benchmarks run and do the work they claim to: small forms, whose speed says nothing. Peers take part where they are installed."""

import numpy as np
import pytest

from benchmarks import end_to_end, report, rows
from benchmarks.results import Result, Row, Spread
from benchmarks.streams import GOLDEN, distinct, draw, gradients_of, rows_of, signs_of

TINY = end_to_end.SIZES["quick"]


def test_signs_are_different_and_lead_back_to_their_rows():
    numbers = np.array([0, 1, 25, 10**7, 2**40], np.int64)
    signs = signs_of(numbers)
    assert signs[0] == GOLDEN
    assert len(set(signs.tolist())) == len(numbers)
    np.testing.assert_array_equal(rows_of(signs), numbers)
    assert np.abs(gradients_of(numbers, 16)).max() <= 0.5


def test_a_zipf_stream_repeats_ids_and_a_uniform_one_hardly():
    rng = np.random.default_rng(0)
    assert len(np.unique(draw(rng, 10**6, 10_000, 1.05))) < 6_500
    assert len(np.unique(draw(rng, 10**6, 10_000, 0.0))) > 9_900
    ids = distinct(rng, 1_000, 900, 1.05)
    assert len(np.unique(ids)) == 900
    assert 0 <= ids.min() <= ids.max() < 1_000


def test_rows_contenders_agree_after_an_update_and_every_case_is_measured():
    result = rows.measure("quick")
    assert {row.section for row in result.rows} == {"look-up", "update", "occurrences", "evict"}
    assert all(0 < row.ratio.low <= row.ratio.median <= row.ratio.high for row in result.rows)
    assert all(figure["lost"] < 0.02 for figure in result.figures["memory"])


def test_the_trainer_loses_what_plain_torch_loses():
    result = end_to_end.measure(TINY, "peers")
    losses = result.figures["losses"]
    assert losses["own"] == pytest.approx(losses["joined"], abs=0.02)
    assert all(row.ratio.median > 0 for row in result.rows)


@pytest.mark.slow
def test_staleness_stays_within_its_bound_when_the_server_is_far():
    result = end_to_end.measure(TINY, "delay")
    assert result.figures["delay_staleness"]["sync"] == 0
    assert 0 < result.figures["delay_staleness"]["hybrid"] <= 16
    assert next(row for row in result.rows if row.against == "own mode sync").ratio.median > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["wire", "flatness"])
def test_other_parts_run(part):
    assert end_to_end.measure(TINY, part).rows


def test_ratios_are_taken_within_a_round():
    row = Row.rates("update", "w", "a", "M rows/s", ([10.0, 1.0, 4.0], [5.0, 0.5, 4.0]), goal=2.0)
    assert row.ratio == Spread(2.0, 1.0, 2.0)
    assert row.reached
    assert Row.rates("wire", "w", "a", "bytes", ([1.0], [2.0]), goal=0.3, at_most=True).reached is False


def test_the_page_says_which_rows_fall_short(tmp_path):
    result = Result("rows")
    result.rows = [
        Row.rates("update", "slow", "peer", "M rows/s", ([1.0], [2.0]), goal=4.0),
        Row.rates("evict", "fast", "peer", "M rows/s", ([2.0], [2.0]), goal=0.5),
    ]
    result.figures = {"memory": [], "unique_share": 0.5}
    result.missing = {"FBGEMM": "not installed"}
    result.save(tmp_path)
    text = report.write(tmp_path, tmp_path).read_text()
    assert "| Update by sign | peer | >= 4 | 0.50 | **falls short** |" in text
    assert "| Insertion at capacity | peer | >= 0.5 | 1.00 | yes |" in text
    assert "FBGEMM did not take part: not installed." in text
