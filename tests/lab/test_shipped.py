"""The recordings that come with the package, asked for through the panel's own source."""

from __future__ import annotations

import itertools

import pytest

from labkit.lab.recorded import RecordedSource, recorded_sources
from labkit.lab.settings import Run, Settings
from labkit.measure.recordings import Row, shipped

SOURCES = recorded_sources(shipped())
ROWS = [(source, row) for source in SOURCES for row in source.rows]


def test_an_h200_is_among_them():
    assert "NVIDIA H200" in [source.label for source in SOURCES]


def settings_of(row: Row, **changes) -> Settings:
    found = Settings(row.model, row.backend, row.requested_mode, None, row.batch, row.context, compile=row.compile)
    return Settings(**{**vars(found), **changes})


def ask(source: RecordedSource, row: Row, **changes) -> Run:
    return source.answer(settings_of(row, **changes), 1)


def test_every_recorded_row_answers_for_its_own_settings():
    for source, row in ROWS:
        answer = ask(source, row)
        assert answer.row == row and answer.provenance.kind == "RECORDED"
        assert source.snap(settings_of(row)) == (settings_of(row), [])


def test_every_batch_of_every_combination_is_answered_by_the_recorded_step_of_its_padded_size():
    for source in SOURCES:
        for model in source.models():
            for _, backend in source.backends(model):
                for compile in source.compiles(model, backend):
                    for mode in source.modes(model, backend, compile):
                        where = Settings(model, backend, mode, None, 1, 512, compile=compile)
                        every_batch(source, where)


def every_batch(source: RecordedSource, where: Settings) -> None:
    batches, contexts = source.batches(where), source.contexts(where)
    for context, batch in itertools.product(contexts.points, batches.points or range(1, batches.high + 1)):
        answer = source.answer(Settings(**{**vars(where), "batch": batch, "context": context}), 1)
        sizes = source.default_sizes(where)
        assert answer.row.size == min((s for s in sizes if s >= batch), default=batch)
        assert answer.row.compile == where.compile and answer.row.backend == where.backend
        assert any("padding" in note for note in answer.notes) == (bool(sizes) and batch not in sizes)


@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_the_panel_offers_each_mode_for_each_model(mode):
    for source in SOURCES:
        for model in source.models():
            assert mode in source.modes(model, source.backends(model)[0][1])


def test_a_graph_run_names_the_launches_it_replaced():
    def where(row):
        return row.model, row.backend, row.compile, row.context

    eager = {where(row) for _, row in ROWS if row.mode == "NONE"}
    for source, row in ROWS:
        if row.mode == "FULL" and where(row) in eager:
            fewest, most = ask(source, row).eager_launches
            assert most >= fewest > 100 > row.launches >= row.graph_launches == 1
        elif row.mode == "FULL":
            assert ask(source, row).eager_launches is None, "nothing is said of an eager step that is not recorded"
