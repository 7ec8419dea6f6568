"""Looking recorded steps up: what is said about launches that no recorded batch has, and about machines."""

from __future__ import annotations

import pytest

from labkit.lab.recorded import NotRecorded, RecordedSource, recorded_sources
from labkit.lab.settings import Settings
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


def test_prefill_and_compiled_rows_are_no_decode_steps():
    rows = [row("NONE", 1, 5.0), row("NONE", 2, 5.0, query_len=4, size=8), row("NONE", 4, 5.0, compile="VLLM_COMPILE")]
    (source,) = recorded_sources([recording(rows)])
    assert source.batches("smollm2-135m", "TRITON_ATTN", "NONE").points == (1,)
    assert recorded_sources([recording(rows[1:])]) == []
