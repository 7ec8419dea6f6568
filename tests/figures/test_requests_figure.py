"""The chart of waits holds the numbers of its rows, marks what spiked and when the prompt came, and needs no colour."""

from __future__ import annotations

import json

import numpy as np
import pytest

from labkit.errors import LabkitError
from labkit.figures.requests import requests_figure, requests_summary
from tests.measure.test_requests import make_recording, make_row

ROWS = make_row("prefill_first", 42), make_row("whole"), make_row("chunk 64", 10, 90)


def test_every_number_is_in_the_figure_as_it_was_given() -> None:
    figure = requests_figure(make_recording(*ROWS))
    found = {tuple(trace.meta): trace for trace in figure.data}
    for row in ROWS:
        by_token = list(zip(*row.waits, strict=True))
        waits, band = found["waits", row.scheduling], found["band", row.scheduling]
        assert list(waits.x) == list(range(2, 11)), "the first wait ends with the second token"
        assert list(waits.y) == pytest.approx([float(np.median(runs)) for runs in by_token])
        assert list(band.y[:9]) == pytest.approx([float(np.percentile(runs, 90)) for runs in by_token])
        assert list(band.y[9:])[::-1] == pytest.approx([float(np.percentile(runs, 10)) for runs in by_token])
        spikes = found["spikes", row.scheduling]
        assert list(spikes.x) == [5, 6] and list(spikes.y) == [waits.y[3], waits.y[4]]
        bar = found["ttft", row.scheduling]
        assert list(bar.y) == [row.p50_ttft_ms] and bar.yaxis == "y2"
        assert bar.y[0] + bar.error_y.array[0] == pytest.approx(row.p90_ttft_ms)
    assert figure.layout.yaxis.range[0] == 0 and figure.layout.yaxis.range[1] > max(r.worst_itl_ms for r in ROWS)


def test_the_arrival_lies_between_the_token_before_and_the_first_that_waits() -> None:
    figure = requests_figure(make_recording(*ROWS))
    (line,) = figure.layout.shapes
    assert 4 < line.x0 == line.x1 < 5, "four tokens came before; the spikes are at the fifth and sixth"


def test_lines_differ_by_dash_marker_and_pattern_and_say_where_they_are_from() -> None:
    figure = requests_figure(make_recording(*ROWS))
    of = {what: [t for t in figure.data if t.meta[0] == what] for what in ("waits", "spikes", "ttft")}
    assert len({t.line.dash for t in of["waits"]}) == len({t.marker.symbol for t in of["spikes"]}) == 3
    assert len({t.marker.pattern.shape for t in of["ttft"]}) == 3
    assert [t.name for t in of["waits"]] == [f"{row.scheduling} · LIVE" for row in ROWS]
    assert "LIVE" in figure.layout.annotations[1].text and "ms" in figure.layout.yaxis.title.text
    stored = requests_figure(make_recording(*ROWS, kind="RECORDED"))
    assert all(t.marker.symbol.endswith("-open") for t in stored.data if t.meta[0] == "spikes")


def test_one_traffic_at_a_time_and_plain_data() -> None:
    other = make_row("whole", 41, decodes=9)
    recording = make_recording(*ROWS, other)
    figure = requests_figure(recording)
    assert {t.meta[1] for t in figure.data} == {row.scheduling for row in ROWS} and len(figure.data) == 12
    assert len(requests_figure(recording, [other]).data) == 4
    json.loads(figure.to_json())
    for rows in ([], recording.rows):
        with pytest.raises(LabkitError, match="one traffic"):
            requests_figure(recording, rows)


def test_the_summary_says_the_same_in_words() -> None:
    text = requests_summary(make_recording(*ROWS), ROWS[:1])
    assert text.startswith("LIVE") and f"{ROWS[0].worst_itl_ms:.3g} ms" in text and "prefill_first" in text
