"""The tables of forms against an engine whose every step is known, a mixed step on the real one, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics

import pytest

from labkit import bench
from labkit.bench.forms import PIECEWISE_LIMIT, ROUNDS, Form
from labkit.bench.steps import rotations
from labkit.cli.entry import main
from labkit.cli.step_tables import form_table
from labkit.config import EngineConfig
from labkit.errors import ConfigError, LabkitError
from labkit.measure.provenance import Kind
from labkit.measure.recordings import load
from tests.test_bench import LAUNCHES, fake  # noqa: F401

MIXED = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "cudagraph_capture_sizes": (4, 32)}


def test_every_form_takes_its_turn_and_is_put_beside_the_first(fake) -> None:  # noqa: F811
    recording, results, notes = bench.bench_forms(EngineConfig(), models=["smollm2-135m", "tiny"], steps=8, warmup=1)
    assert [(r.row.model, r.form.name) for r in results] == [
        (model, form.name) for model in ("smollm2-135m", "tiny") for form in bench.COMPILE_TABLE
    ]
    assert len(fake.made) == 2, "one engine for all forms of a model"
    by_name = {r.form.name: r for r in results[:7]}
    ran = {name: (r.row.compile, r.row.requested_mode, r.row.mode) for name, r in by_name.items()}
    assert ran == {
        "none": ("NONE", "NONE", "NONE"), "compile": ("VLLM_COMPILE", "NONE", "NONE"),
        "graph": ("NONE", "FULL_DECODE_ONLY", "FULL"), "both": ("VLLM_COMPILE", "FULL_DECODE_ONLY", "FULL"),
        "reduce-overhead": ("STOCK_TORCH_COMPILE", "FULL_DECODE_ONLY", "FULL"),
        "pieces": ("NONE", "PIECEWISE", "PIECEWISE"), "pieces, compiled": ("VLLM_COMPILE", "PIECEWISE", "PIECEWISE"),
    }  # fmt: skip
    none = by_name["none"].row
    for name, one in by_name.items():
        assert one.row.n == 8 and len({r.key for r in recording.rows}) == 14
        assert (one.ratio is None) == (name == "none")
        if one.ratio:
            pairs = [a / b for a, b in zip(none.samples_ms, one.row.samples_ms, strict=True)]
            assert one.ratio.paired and one.ratio.value == pytest.approx(statistics.median(pairs))
    assert recording.rows == tuple(r.row for r in results) and recording.provenance.kind is Kind.LIVE
    steps = [call for call in fake.made[0].calls if call[0] in ("step", "reconfigure")]
    turns = [
        (c[1].get("compilation_mode"), c[1].get("cudagraph_mode")) for c, after in itertools.pairwise(steps)
        if c[0] == "reconfigure" and after[0] == "step"
    ]  # fmt: skip
    wanted = [(form.compile, form.mode) for order in rotations(bench.COMPILE_TABLE, ROUNDS) for form in order]
    assert turns == wanted, "each round begins one form later"


def test_a_form_that_cannot_run_is_said_and_the_others_are_measured(fake) -> None:  # noqa: F811
    fake.cannot = ("STOCK_TORCH_COMPILE",)
    recording, results, notes = bench.bench_forms(EngineConfig(model="tiny"), steps=4, warmup=0)
    assert [r.form.name for r in results] == [f.name for f in bench.COMPILE_TABLE if f.name != "reduce-overhead"]
    (one,) = recording.refused
    assert (one.compile, one.requested_mode) == ("STOCK_TORCH_COMPILE", "FULL_DECODE_ONLY")
    assert any(note.startswith("tiny, reduce-overhead: not measured, attention_backend") for note in notes)
    fake.cannot = ("NONE",)
    with pytest.raises(LabkitError, match="the form 'none', which the others are compared with"):
        bench.bench_forms(EngineConfig(model="tiny"), steps=4, warmup=0)


def test_a_step_in_pieces_is_held_against_what_starting_it_costs(fake) -> None:  # noqa: F811
    forms = (Form("none", "NONE", "NONE"), Form("pieces", "NONE", "PIECEWISE"))
    recording, (none, pieces), _ = bench.bench_forms(EngineConfig(), forms, steps=4, warmup=0)
    assert none.budget is None
    assert LAUNCHES["PIECEWISE"] == {"torch": 12, "gemm": 1, "graph": 3, "copy": 5}
    explained = 12 * 11.0 + 1 * 20.0 + 3 * 9.0
    found = pieces.budget
    assert (found.explained_us, found.factor) == (explained, PIECEWISE_LIMIT)
    assert found.limit_us == pytest.approx(1.5 * explained + 300, abs=0.1) and not found.kept
    for p50_us, kept in ((found.limit_us - 0.1, True), (found.limit_us + 0.1, False)):
        row = dataclasses.replace(pieces.row, p50_ms=p50_us / 1e3)
        again = bench.budget(row, PIECEWISE_LIMIT)
        assert again.kept is kept
        text = form_table(
            dataclasses.replace(recording, rows=(row,)), [dataclasses.replace(pieces, row=row, budget=again)]
        )
        assert (
            f"us is {'within' if kept else 'ABOVE'} 1.5 x 179 us (launches x cost, replays included) + 300 us" in text
        )


def test_a_mixed_step_runs_the_decodes_and_one_whole_new_chunk(fake) -> None:  # noqa: F811
    recording, results, _ = bench.bench_forms(
        EngineConfig(**MIXED), bench.mode_forms(), batches=[3], contexts=[40], chunk=20, steps=8, warmup=1
    )
    assert [(r.form.name, r.row.mode, r.row.size) for r in results] == [
        ("none", "NONE", 23), ("PIECEWISE", "PIECEWISE", 32), ("FULL", "FULL", 32), ("FULL_DECODE_ONLY", "NONE", 23),
        ("FULL_AND_PIECEWISE", "PIECEWISE", 32),
    ]  # fmt: skip
    for one in results:
        row = one.row
        assert (row.batch, row.chunk, row.query_len, row.context) == (3, 20, 1, 40)
        assert row.gb_s is None and row.floor_ms is None
        assert row.tok_s == pytest.approx(4 / row.p50_ms * 1e3, rel=1e-3), "the chunk ends in a token as well"
        row.check()
    assert results[-1].ratio.shown and results[-1].ratio.value > 2
    chunks = [call[1] for call in fake.made[0].calls if call[0] == "chunk"]
    assert {len(chunk) for chunk in chunks} == {20} and len(set(chunks[:3])) == 3, "no prompt is another's prefix"


def test_a_chunk_without_a_graph_or_room_is_said(fake) -> None:  # noqa: F811
    _, results, notes = bench.bench_forms(
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=64), bench.mode_forms(), batches=[3], contexts=[40],
        chunk=20, steps=4, warmup=0,
    )  # fmt: skip
    assert {r.row.mode for r in results} == {"NONE"}
    assert sum("23 tokens are above the largest capture size, 16" in note for note in notes) == 3
    for chunk, batch, says in ((62, 3, "max_num_batched_tokens of at least 65"), (2, 8, "max_num_seqs of at least 9")):
        with pytest.raises(ConfigError, match=says):
            bench.bench_forms(EngineConfig(max_num_seqs=8, max_num_batched_tokens=64), bench.mode_forms(),
                              batches=[batch], chunk=chunk, steps=4)  # fmt: skip


# --- the real engine and the command -------------------------------------------------------------------------------

TINY = ["--model", "tiny-llama", "--device", "cpu", "--context", "16", "--max-model-len", "128", "--max-num-seqs", "8",
        "--max-num-batched-tokens", "64"]  # fmt: skip


def test_mixed_steps_of_the_real_engine(capsys, tmp_path) -> None:
    out = tmp_path / "mixed.json.gz"
    words = ["bench", "--mixed", "3x20", *TINY, "--steps", "50", "--warmup", "1", "--cudagraph-capture-sizes", "24"]
    assert main([*words, "--out", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    ran = {one["form"]: (one["mode"], one["size"]) for one in data["forms"]}
    assert ran == {"none": ("NONE", 23), "PIECEWISE": ("PIECEWISE", 24), "FULL_DECODE_ONLY": ("NONE", 23),
                   "FULL_AND_PIECEWISE": ("PIECEWISE", 24)}  # fmt: skip
    assert any("FULL: not measured" in note and "cannot capture mixed batches" in note for note in data["notes"])
    assert [row.chunk for row in load(out).rows] == [20] * 4
    assert {row["chunk"] for row in data["rows"]} == {20} and all(row["n"] >= 50 for row in data["rows"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mixed", "8"], "does not read like 8x1024"),
        (["--mixed", "8x256,1x2"], "takes one pair"),
        (["--mixed", "8x256", "--compile-table"], "are two tables"),
        (["--compile-table", "--html", "x.html"], "has no chart"),
    ],
)
def test_what_cannot_be_a_table_is_refused_before_anything_runs(capsys, words: list[str], says: str) -> None:
    assert main(["bench", *words]) == 2
    assert says in capsys.readouterr().err
