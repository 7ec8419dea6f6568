"""The recordings that come with the package, asked for through the panel's own source."""

from __future__ import annotations

import pytest

from labkit.lab.recorded import RecordedSource, recorded_sources
from labkit.lab.settings import Settings
from labkit.measure.recordings import Row, shipped

SOURCES = recorded_sources(shipped())
ROWS = [(source, row) for source in SOURCES for recording in source._recordings for row in recording.rows]


def test_an_h200_is_among_them():
    assert "NVIDIA H200" in [source.label for source in SOURCES]


def ask(source: RecordedSource, row: Row, **changes) -> Row:
    settings = Settings(row.model, row.backend, row.requested_mode, None, row.batch, row.context)
    return source.answer(Settings(**{**vars(settings), **changes}), 1).row


def test_every_recorded_row_answers_for_its_own_settings():
    for source, row in ROWS:
        assert ask(source, row) == row
        settings = Settings(row.model, row.backend, row.requested_mode, None, row.batch, row.context)
        assert source.snap(settings) == (settings, [])


def test_every_batch_is_answered_by_the_recorded_step_of_its_padded_size():
    for source in SOURCES:
        for model in source.models():
            for backend in source.backends(model):
                sizes = source.default_sizes(model, backend, "FULL")
                (context,) = source.contexts(model, backend, "FULL").points or (512,)
                for batch in range(1, max(sizes) + 1):
                    answer = source.answer(Settings(model, backend, "FULL", None, batch, context), 1)
                    assert answer.row.size == min(s for s in sizes if s >= batch)
                    assert bool(answer.notes) == (batch not in sizes)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY"])
def test_the_panel_offers_each_mode_for_each_model(mode):
    for source in SOURCES:
        for model in source.models():
            assert mode in source.modes(model, source.backends(model)[0])


def test_a_graph_run_names_the_launches_it_replaced():
    for source, row in ROWS:
        if row.mode == "FULL":
            run = source.answer(Settings(row.model, row.backend, "FULL", None, row.batch, row.context), 1)
            fewest, most = run.eager_launches
            assert most >= fewest > 100 > row.launches >= row.graph_launches == 1
