"""Charts of attention calls: they hold the numbers they were given, say where from, and mix no kinds of numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from labkit.config import ATTENTION_BACKENDS
from labkit.errors import ConfigError
from labkit.figures import calls_figure, palette, relative_figure, splits_figure
from labkit.measure.attention import AttentionRecording, AttentionRow, load_attention
from labkit.measure.provenance import Kind, ProvenanceError, collect

ORIGIN = collect("RECORDED", "labkit record", order="x", n=50, primed=True, device="cpu").replace(
    gpu="NVIDIA H200", driver="1", packages={"torch": "2.11.0"}
)


def row(backend: str, batch: int = 1, context: int = 1024, us: float = 50.0, **changes: Any) -> AttentionRow:
    seed = [batch, context, len(backend), int(us)]
    samples = tuple(round(float(s), 3) for s in np.random.default_rng(seed).normal(us, us / 50, 50))
    p10, p50, p90 = (round(float(p), 3) for p in np.percentile(samples, (10, 50, 90)))
    values: dict[str, Any] = dict(
        kind="decode", backend=backend, backend_version="1", dtype="bfloat16", batch=batch, context=context,
        query_lens=(1,) * batch, kv_lens=(context,) * batch, num_heads=32, num_kv_heads=8, head_size=128,
        block_size=16, kv="rotated", sets=8, launch="graph", p10_us=p10, p50_us=p50, p90_us=p90, n=50,
        samples_us=samples, gb_s=round(batch * context * 4096 / p50 / 1e3, 2), tflop_s=1.0, prepare_us=3.0,
    )  # fmt: skip
    made = AttentionRow(**{**values, **changes})
    made.check()
    return made


def recording(*rows: AttentionRow, kind: Kind = Kind.RECORDED, **origin: Any) -> AttentionRecording:
    return AttentionRecording(ORIGIN.replace(kind=kind, **origin), rows)


def grid(kind: Kind = Kind.RECORDED, names: tuple[str, ...] = ("TRITON_ATTN", "FLASH_ATTN")) -> AttentionRecording:
    rows = [
        row(name, batch, context, 10 + batch * context / 1000 * (1 + i / 4))
        for i, name in enumerate(names) for context in (1024, 8192) for batch in (32, 1, 8)
    ]  # fmt: skip
    return recording(*rows, kind=kind)


def traces(figure: go.Figure, what: str) -> dict[str, go.Scatter]:
    return {trace.meta[1]: trace for trace in figure.data if trace.meta[0] == what}


@pytest.mark.parametrize(("over", "at"), [("batch", {"context": 8192}), ("context", {"batch": 8})])
def test_every_number_is_in_the_figure_as_it_was_given(over: str, at: dict[str, int]) -> None:
    source = grid()
    figure = calls_figure([source], over, **at)
    for name in ("TRITON_ATTN", "FLASH_ATTN"):
        ((field, value),) = at.items()
        rows = [r for r in source.rows if r.backend == name and getattr(r, field) == value]
        rows.sort(key=lambda r: getattr(r, over))
        time, rate = traces(figure, "time")[name], traces(figure, "rate")[name]
        assert list(time.x) == list(rate.x) == [getattr(r, over) for r in rows]
        assert list(time.y) == [r.p50_us for r in rows] and list(rate.y) == [r.gb_s for r in rows]
        assert [y + up for y, up in zip(time.y, time.error_y.array, strict=True)] == pytest.approx(
            [r.p90_us for r in rows]
        )
        assert [y - d for y, d in zip(time.y, time.error_y.arrayminus, strict=True)] == pytest.approx(
            [r.p10_us for r in rows]
        )
        assert list(rate.xaxis) == list("x2")
    for axis in (figure.layout.xaxis, figure.layout.yaxis, figure.layout.xaxis2, figure.layout.yaxis2):
        assert axis.type == "log"
    low, high = figure.layout.xaxis.range
    assert low < math.log10(min(time.x)) and high > math.log10(max(time.x))


def test_the_origin_is_in_every_figure() -> None:
    source = [grid(), grid(Kind.LIVE, ("TORCH_SDPA", "TRITON_ATTN"))]
    for figure in (
        calls_figure(source, "batch", context=1024),
        splits_figure(source, batch=1, context=1024),
        relative_figure(source, "batch", "TRITON_ATTN", context=1024),
    ):
        text = figure.layout.annotations[0].text
        assert "RECORDED · NVIDIA H200 · torch 2.11.0" in text and "LIVE" in text
    empty = splits_figure(source, batch=1, context=1024)
    assert not empty.data and "Nothing fits" in empty.layout.annotations[1].text


def test_backends_differ_by_dash_and_marker_and_not_only_by_colour() -> None:
    assert set(palette.BACKEND_DASHES) == set(palette.BACKEND_MARKERS) == set(ATTENTION_BACKENDS)
    assert len(set(palette.BACKEND_DASHES.values())) == len(set(palette.BACKEND_MARKERS.values())) == 6
    figure = calls_figure([grid(names=ATTENTION_BACKENDS)], "batch", context=1024)
    lines = traces(figure, "time").values()
    assert len({(t.line.dash) for t in lines}) == len({t.marker.symbol for t in lines}) == 6
    assert len({t.line.color for t in lines}) == 6
    both = calls_figure([grid(), grid(Kind.LIVE)], "batch", context=1024)
    symbols = {(t.meta[1], t.meta[2]): t.marker.symbol for t in both.data if t.meta[0] == "time"}
    assert len(symbols) == len(set(symbols.values())) == 4
    assert [t.name for t in both.data if t.meta[0] == "time"][0] == "TRITON_ATTN · RECORDED"


def test_bare_calls_and_settings_are_lines_of_their_own() -> None:
    source = recording(
        row("FLASHINFER"), row("FLASHINFER", us=40, call="bare"), row("FLASHINFER", us=60, batch_invariant=True),
        row("FLASHINFER", us=70, num_splits_asked=4, num_splits=4), row("FLASHINFER", us=45, kv="warm"),
    )  # fmt: skip
    lines = traces(calls_figure([source], "batch", context=1024), "time")
    assert list(lines) == ["FLASHINFER", "FLASHINFER, bare", "FLASHINFER, batch-invariant"]
    assert lines["FLASHINFER, bare"].marker.symbol != lines["FLASHINFER"].marker.symbol


def test_a_backend_without_graph_rows_shows_its_eager_ones_and_says_so() -> None:
    source = recording(
        row("TRITON_ATTN"), row("TRITON_ATTN", us=80, launch="eager"), row("TORCH_SDPA", us=90, launch="eager")
    )
    lines = traces(calls_figure([source], "batch", context=1024), "time")
    assert list(lines) == ["TRITON_ATTN", "TORCH_SDPA (eager)"] and lines["TRITON_ATTN"].y[0] < 60
    lines = traces(calls_figure([source], "batch", context=1024, launch="eager"), "time")
    assert list(lines) == ["TRITON_ATTN", "TORCH_SDPA"]


def test_prefills_show_operations() -> None:
    source = recording(row("TRITON_ATTN", 2, 64, kind="prefill", query_lens=(64, 64), tflop_s=123.0))
    figure = calls_figure([source], "batch", kind="prefill", rate="tflop_s")
    assert list(traces(figure, "rate")["TRITON_ATTN"].y) == [123.0] and "TFLOP/s" in figure.layout.yaxis2.title.text
    with pytest.raises(ConfigError):
        calls_figure([source], "weight")


def test_time_over_splits_is_over_those_that_ran() -> None:
    asked = [(1, 1, 400.0), (4, 4, 120.0), (16, 16, 50.0), (64, 16, 51.0)]
    rows = [row("TRITON_ATTN", us=us, num_splits_asked=a, num_splits=n) for a, n, us in asked]
    source = recording(*rows, row("TRITON_ATTN", us=45, num_splits=16), row("FLASH_ATTN", us=40))
    figure = splits_figure([source], batch=1, context=1024)
    line = traces(figure, "time")["TRITON_ATTN"]
    assert list(line.x) == [1, 4, 16] and list(line.y) == [r.p50_us for r in rows[:3]]
    (level,) = [t for t in figure.data if t.meta[0] == "choice"]
    assert set(level.y) == {source.rows[4].p50_us} and "by itself: 16" in level.name
    assert figure.layout.xaxis.type == "log" and list(figure.layout.xaxis.ticktext) == ["1", "4", "16"]


def test_a_ratio_stays_within_one_recording() -> None:
    source = grid()
    figure = relative_figure([source], "batch", "TRITON_ATTN", context=8192)
    (line,) = figure.data
    for x, y in zip(line.x, line.y, strict=True):
        pair = {r.backend: r.p50_us for r in source.rows if (r.batch, r.context) == (x, 8192)}
        assert y == pytest.approx(pair["FLASH_ATTN"] / pair["TRITON_ATTN"], rel=1e-3)
    assert "TRITON_ATTN" in figure.layout.yaxis.title.text
    for other in (grid(Kind.LIVE, ("FLASH_ATTN",)), grid(Kind.RECORDED, ("FLASH_ATTN",))):
        with pytest.raises(ProvenanceError, match="within one recording"):
            relative_figure([source, other], "batch", "TRITON_ATTN", context=8192)


def test_a_figure_is_plain_data_and_drawn_from_a_file(tmp_path: Path) -> None:
    path = grid().save(tmp_path / "h200.json.gz")
    figure = calls_figure([load_attention(path)], "batch", context=1024)
    assert go.Figure(json.loads(figure.to_json())) == figure
    assert figure == calls_figure([grid()], "batch", context=1024)
