"""Looking recorded steps up: what is said about launches that no recorded batch has, and about machines."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.lab import sentences
from labkit.lab.recorded import NotRecorded, RecordedSource, first_compiles, recorded_sources
from labkit.lab.settings import MODES, Settings
from labkit.measure.recordings import Refusal, Setup
from tests.lab.fakes import recording, row


@pytest.fixture
def source() -> RecordedSource:
    eager = [
        row("NONE", 16, 5.5, launches=412),
        row("NONE", 64, 5.9, launches=380),
        row("NONE", 128, 6.0, launches=380),
    ]
    graphs = [row("FULL", size, 1.5, launches=3) for size in (8, 16, 24, 100, 256)]
    return RecordedSource([recording([*eager, *graphs])])


@pytest.mark.parametrize(
    ("batch", "bounds"), [(16, (412, 412)), (24, (380, 412)), (100, (380, 380)), (256, (380, 380)), (8, (412, 412))]
)
def test_launches_that_a_graph_replaced_lie_between_those_of_the_recorded_neighbours(source, batch, bounds):
    run = source.answer(Settings("smollm2-135m", "TRITON_ATTN", "FULL", None, batch, 512), 1)
    assert run.eager_launches == bounds


def test_what_was_not_recorded_names_what_was(source):
    with pytest.raises(NotRecorded, match="Recorded models: smollm2-135m"):
        source.answer(Settings("qwen3-0.6b", "TRITON_ATTN", "FULL", None, 8, 512), 1)
    with pytest.raises(NotRecorded, match="Recorded batches: 16, 64, 128"):
        source.answer(Settings("smollm2-135m", "TRITON_ATTN", "NONE", None, 17, 512), 1)


def where(mode: str, compile: str = "NONE", batch: int = 1, **changes) -> Settings:
    return Settings("smollm2-135m", "TRITON_ATTN", mode, None, batch, 512, compile=compile, **changes)


@pytest.mark.parametrize(
    ("mode", "sizes", "batch", "fits"),
    [
        ("FULL_DECODE_ONLY", None, 2, False),
        ("FULL_AND_PIECEWISE", None, 2, False),  # the same KV is missing
        ("FULL_AND_PIECEWISE", None, 1, True),
        ("FULL_AND_PIECEWISE", (), 1, True),  # without sizes a step is not padded
        ("FULL_AND_PIECEWISE", (8, 1), 1, True),
        ("FULL_AND_PIECEWISE", (8,), 1, False),
        ("NONE", (8,), 1, True),  # nor is an eager one
        ("PIECEWISE", None, 8, True),
    ],
)
def test_what_does_not_fit_is_asked_at_the_size_that_runs_and_for_every_mode_with_full_graphs(mode, sizes, batch, fits):
    rows = [row("NONE", 1, 5.0), row("FULL", 1, 1.5), row("FULL", 8, 1.5, context=128), row("PIECEWISE", 8, 3.0)]
    no = Refusal("smollm2-135m", "TRITON_ATTN", "NONE", "FULL_DECODE_ONLY", "the KV cache holds 4 requests", 8, 512)
    source = RecordedSource([dataclasses.replace(recording(rows), refused=(no,))])
    said = source.unfit(Settings("smollm2-135m", "TRITON_ATTN", mode, sizes, batch, 512))
    assert (said == "") is fits and ("holds 4 requests" in said) is not fits


def test_prefills_and_mixed_steps_are_no_decode_steps():
    rows = [row("NONE", 1, 5.0), row("NONE", 2, 5.0, query_len=4, size=8), row("NONE", 4, 5.0, size=260, chunk=256)]
    (source,) = recorded_sources([recording(rows)])
    assert source.batches(where("NONE")).points == (1,)
    assert recorded_sources([recording(rows[1:])]) == []


@pytest.fixture
def modes_source() -> RecordedSource:
    """Both ways of compiling, in PIECEWISE and in FULL, as the suite of modes records them."""
    rows = []
    for factor, compile in ((1, "NONE"), (2, "VLLM_COMPILE")):
        rows += [row("NONE", b, 5.0 / factor, launches=412 // factor, compile=compile) for b in (1, 8)]
        rows += [row("PIECEWISE", b, 3.0 / factor, compile=compile, launches=90, graph_launches=31) for b in (1, 8)]
        rows += [row("FULL", b, 1.5 / factor, compile=compile, requested_mode="FULL") for b in (1, 8)]
    return RecordedSource([recording(rows)])


@pytest.mark.parametrize(
    ("mode", "compile", "ms"),
    [
        ("NONE", "NONE", 5.0), ("NONE", "VLLM_COMPILE", 2.5), ("PIECEWISE", "NONE", 3.0),
        ("PIECEWISE", "VLLM_COMPILE", 1.5), ("FULL", "NONE", 1.5), ("FULL_AND_PIECEWISE", "VLLM_COMPILE", 0.75),
    ],
)  # fmt: skip
def test_mode_and_compilation_are_looked_up_together(modes_source, mode, compile, ms):
    assert modes_source.compiles("smollm2-135m", "TRITON_ATTN") == ["NONE", "VLLM_COMPILE"]
    assert modes_source.modes("smollm2-135m", "TRITON_ATTN", compile) == list(MODES)
    run = modes_source.answer(where(mode, compile, 8), 1)
    assert run.row.p50_ms == pytest.approx(ms, rel=0.01)
    assert (run.row.mode, run.row.compile) == (modes_source.resolved(where(mode))[0], compile)
    assert run.eager_launches == ((412, 412) if compile == "NONE" else (206, 206))


def test_a_graph_that_was_captured_for_other_batches_is_said_to_be(modes_source):
    assert modes_source.answer(where("FULL"), 1).notes == ()
    (note,) = modes_source.answer(where("FULL_DECODE_ONLY"), 1).notes
    assert note.startswith("Recorded under FULL, whose graphs are captured for mixed batches too")


def test_of_two_files_the_newer_answers_and_the_older_fills_the_gaps():
    old = recording([row("NONE", 1, 9.0), row("NONE", 2, 9.0)], date="2026-11-01T10:00:00Z")
    new = recording([row("NONE", 1, 5.0), row("NONE", 1, 4.0, backend="FLASHINFER")], date="2026-12-01T10:00:00Z")
    (source,) = recorded_sources([old, new])
    assert source.batches(where("NONE")).points == (1, 2)
    assert [name for _, name in source.backends("smollm2-135m")] == ["TRITON_ATTN", "FLASHINFER"]
    first, second = source.answer(where("NONE"), 1), source.answer(where("NONE", batch=2), 2)
    assert (first.row.p50_ms, second.row.p50_ms) == (pytest.approx(5, rel=0.01), pytest.approx(9, rel=0.01))
    assert (first.provenance, second.provenance) == (new.provenance, old.provenance)
    said = sentences.comparison(first, second)
    assert "recorded in two runs (2026-12-01 and 2026-11-01)." in said
    assert "another" not in said
    newer = dataclasses.replace(first, provenance=first.provenance.replace(commit="f" * 40))
    assert "with another commit." in sentences.comparison(newer, second)


def test_the_generation_of_kernels_and_who_was_refused_are_known():
    rows = [row("NONE", 1, 5.0), row("NONE", 1, 4.0, backend="FLASH_ATTN", backend_version="FA3: tokenspeed-fa3 1.0")]
    no = [
        Refusal("smollm2-135m", "FLASHINFER", "NONE", "", "no nvcc"),
        Refusal("smollm2-135m", "TRITON_ATTN", "NONE", "FULL", "out of memory"),
    ]
    (source,) = recorded_sources([dataclasses.replace(recording(rows), refused=tuple(no))])
    assert source.backends("smollm2-135m") == [("TRITON_ATTN", "TRITON_ATTN"), ("FLASH_ATTN · FA3", "FLASH_ATTN")]
    assert source.refused("smollm2-135m") == {"FLASHINFER": "no nvcc"}


def test_what_getting_ready_took_is_told_with_the_run_and_announced_for_that_machine():
    setup = Setup("smollm2-135m", "TRITON_ATTN", "VLLM_COMPILE", "PIECEWISE", 4, 124, 900.0, 120.4, 23_400.0, False)
    stored = dataclasses.replace(recording([row("PIECEWISE", 1, 1.0, compile="VLLM_COMPILE")]), setups=(setup,))
    (source,) = recorded_sources([stored])
    assert source.answer(where("PIECEWISE", "VLLM_COMPILE"), 1).ready == (
        "When it was recorded the model was compiled for the first time in 23.4 s.",
        "124 graphs for 4 sizes were captured in 0.9 s and took 120 MiB.",
    )
    assert first_compiles([stored], "NVIDIA H200") == {"smollm2-135m": 23.4}
    warm = dataclasses.replace(stored, setups=(dataclasses.replace(setup, from_cache=True),))
    assert first_compiles([stored], "cpu") == first_compiles([warm], "NVIDIA H200") == {}
