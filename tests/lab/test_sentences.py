"""The sentence about a run, and what is said about two."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.lab import sentences
from labkit.lab.settings import Run, Settings
from labkit.measure.provenance import Kind
from tests.lab.fakes import recording, row


def run_of(shown, number=1, *, kind=Kind.RECORDED, gpu="NVIDIA H200", **changes) -> Run:
    made = dataclasses.replace(recording([shown], gpu=gpu).provenance, kind=kind)
    settings = Settings(shown.model, shown.backend, shown.mode, None, shown.batch, shown.context)
    return Run(number, settings, shown, made, **changes)


@pytest.mark.parametrize(
    ("launches", "eager", "words"),
    [
        (1, (412, 412), "mode FULL, size 16: 1 graph launch instead of 412 launches;"),
        (4, (412, 412), "mode FULL, size 16: 1 graph launch and 3 more instead of 412 launches;"),
        (4, (380, 412), "mode FULL, size 16: 1 graph launch and 3 more instead of 380 to 412 launches;"),
        (4, None, "mode FULL, size 16: 1 graph launch and 3 more;"),
        (None, None, "mode FULL, size 16: 1 graph launch;"),
    ],
)
def test_a_graph_run_says_what_it_replaced(launches, eager, words):
    run = run_of(row("FULL", 16, 1.5, launches=launches), eager_launches=eager)
    assert sentences.summary(run).startswith(words)
    assert "1.50 ms a step (median of 50, p10–p90" in sentences.summary(run)


def test_an_eager_run_says_who_starts_everything():
    assert "batch 4: 412 launches a step, each started by the host" in sentences.summary(
        run_of(row("NONE", 4, 5.0, launches=412))
    )
    assert "every operation is started by the host" in sentences.summary(run_of(row("NONE", 4, 5.0)))


def test_an_emulated_graph_never_claims_a_launch_saved():
    said = sentences.summary(run_of(row("FULL", 4, 50.0, emulated=True), emulated=True, eager_launches=(412, 412)))
    assert "nothing is saved" in said and "instead of" not in said


def test_the_longer_run_is_named_first():
    slow, fast = run_of(row("NONE", 1, 6.0), 1), run_of(row("FULL", 1, 1.5), 2)
    assert sentences.comparison(slow, fast).startswith("A takes 4.00 times as long as B")
    assert sentences.comparison(fast, slow).startswith("B takes 4.00 times as long as A")


def test_a_small_difference_is_no_difference():
    a, b = run_of(row("NONE", 1, 6.0), 1), run_of(row("NONE", 1, 6.1), 2)
    assert sentences.comparison(a, b).startswith("No difference shown")


def test_runs_that_differ_in_more_than_one_thing_say_so():
    a, b = run_of(row("NONE", 1, 6.0), 1), run_of(row("FULL", 4, 1.5), 2)
    assert sentences.comparison(a, b).endswith(
        "The two differ in batch and mode: this is the effect of all of it together."
    )
    assert "differ" not in sentences.comparison(a, run_of(row("FULL", 1, 1.5), 2))


def test_no_ratio_across_kinds_or_machines():
    here = run_of(row("NONE", 1, 60.0), 1, kind=Kind.LIVE, gpu=None)
    there, elsewhere = run_of(row("NONE", 1, 6.0), 2), run_of(row("NONE", 1, 9.0), 3, gpu="NVIDIA L4")
    assert "LIVE" in sentences.comparison(here, there) and "No ratio" in sentences.comparison(here, there)
    assert "compare machines" in sentences.comparison(there, elsewhere)


def test_padding_makes_no_tokens():
    run = run_of(row("FULL", 16, 2.0))
    run = dataclasses.replace(run, settings=dataclasses.replace(run.settings, batch=13))
    assert sentences.table_row(run)["tok_s"] == pytest.approx(13 / run.row.p50_ms * 1e3)
