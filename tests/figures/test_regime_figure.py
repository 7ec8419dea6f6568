"""The regime map, the launch-cost card and the table of claims as drawn."""

from __future__ import annotations

import html.parser

import plotly.graph_objects as go
import pytest

from labkit.figures.claims import HEAD, claims_html, claims_rows, claims_summary
from labkit.figures.palette import contrast
from labkit.figures.regime import INK, LOOKS, launch_figure, regime_figure
from labkit.measure import recordings
from labkit.measure.recordings import load
from labkit.models.shapes import SHAPES
from labkit.simulate.claims import findings
from labkit.simulate.launch_card import card_from
from labkit.simulate.regime import REGIMES, RegimeMap, points_of, regime_map

MODELS = [SHAPES[name] for name in ("smollm2-135m", "qwen3-0.6b", "llama-3.1-8b")]
RECORDING = load(recordings.SHIPPED / "h200.json.gz")


@pytest.fixture(scope="module")
def found() -> RegimeMap:
    return regime_map(MODELS, points=points_of([RECORDING]))


def trace(figure: go.Figure, what: str) -> go.Scatter:
    (one,) = [t for t in figure.data if list(t.meta)[0] == what]
    return one


def test_every_cell_has_colour_letter_and_number(found: RegimeMap) -> None:
    figure = regime_figure(found)
    cells, letters = trace(figure, "cells"), trace(figure, "letters")
    assert len(letters.text) == len(MODELS) * len(found.batches)
    for k, text in enumerate(letters.text):
        i, j = divmod(k, len(found.batches))
        regime = found.regime(i, j)
        assert REGIMES[cells.z[i][j]] == regime
        assert text.startswith(f"<b>{LOOKS[regime][0]}</b> ")
    assert len({look[0] for look in LOOKS.values()}) == len(LOOKS)
    keys = {t.meta[1] for t in figure.data if t.meta[0] == "key"}
    assert keys == {found.regime(i, j) for i in range(3) for j in range(len(found.batches))}
    assert min(contrast(INK, look[1]) for look in LOOKS.values()) >= 4.5


def test_colours_of_the_scale_are_those_of_the_key(found: RegimeMap) -> None:
    """z = k lies in the middle of the k-th band."""
    cells = trace(regime_figure(found), "cells")
    for k, name in enumerate(REGIMES):
        at = (k - cells.zmin) / (cells.zmax - cells.zmin)
        stops = [hue for edge, hue in cells.colorscale if abs(edge - at) <= 0.5 / len(REGIMES) + 1e-9]
        assert LOOKS[name][1] in stops
        low = max((edge, i) for i, (edge, _) in enumerate(cells.colorscale) if edge <= at)[1]
        assert cells.colorscale[low][1] == cells.colorscale[low + 1][1] == LOOKS[name][1]


def test_kinds_are_apart_and_named(found: RegimeMap) -> None:
    figure = regime_figure(found)
    points = trace(figure, "points")
    assert "RECORDED" in points.name and points.marker.symbol.endswith("-open")
    assert len(points.x) == len(found.points) == 16
    assert "SIMULATED" in figure.layout.title.text and "RECORDED" not in figure.layout.title.text
    assert figure.layout.xaxis.title.text == "batch, requests per step"
    without = regime_figure(regime_map(MODELS))
    assert not [t for t in without.data if t.meta[0] == "points"]


def test_the_line_is_the_crossing(found: RegimeMap) -> None:
    line = trace(regime_figure(found), "crossing")
    for i, batch in enumerate(found.crossing()):
        edge = len(found.batches) if batch is None else found.batches.index(batch)
        assert line.x[2 * i] == line.x[2 * i + 1] == edge - 0.5


def test_the_card_shows_the_rows() -> None:
    card = card_from(RECORDING, model="smollm2-135m")
    assert card is not None
    figure = launch_figure(card)
    cost, step = trace(figure, "cost"), trace(figure, "step")
    assert list(cost.x) == list(card.cost_us.values())
    assert "19.7 µs × 181" in list(cost.text)
    shown = dict(zip(step.y, step.x, strict=True))
    assert shown["… waiting for instructions"] == pytest.approx(4.39076)
    assert shown["eager step"] == card.step_ms
    assert "RECORDED" in figure.layout.title.text


class _Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


def test_the_table_of_claims_has_a_row_per_claim() -> None:
    got = findings([RECORDING], SHAPES)
    rows = claims_rows(got)
    assert len(rows) == len(got) and {len(row) for row in rows} == {len(HEAD)}
    for finding, row in zip(got, rows, strict=True):
        assert row[-1].endswith(finding.verdict) and row[-1][0] in "✓✗○~"
        assert (row[2] == "not recorded") == (not finding.recorded)
    parser = _Cells()
    parser.feed(claims_html(got))
    assert parser.tags.count("tr") == len(got) + 1 and parser.tags.count("caption") == 1
    assert claims_summary(got).startswith(f"{len(got)} claims. ")
