"""Engines side by side: one definition of a step, tokens that agree or say so, every number with engine and version."""

from __future__ import annotations

import html.parser
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from labkit.bench import beside, theirs
from labkit.cli import main
from labkit.cli.page import write_beside_page, write_page
from labkit.config import EngineConfig
from labkit.errors import ConfigError, LabkitError
from labkit.figures import beside_figure, beside_summary
from labkit.figures.beside import ENGINE_COLOURS
from labkit.measure.beside import BesideRecording, BesideRow, beside_pairs, decode_steps, load_beside
from labkit.measure.provenance import Kind, ProvenanceError, collect
from labkit.measure.recordings import Recording, Row
from labkit.measure.storage import RecordingError

ROOT = Path(__file__).resolve().parents[1]
ORIGIN = collect("RECORDED", "labkit compare transformers", order="x", n=60, device="cpu").replace(
    gpu="NVIDIA H200", driver="1", packages={"torch": "2.11.0", "transformers": "5.15.0"}
)
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def row(way: str, ms: float, engine: str = "transformers", batch: int = 1, **changes: Any) -> BesideRow:
    seed = [batch, len(way), int(ms * 100)]
    samples = tuple(round(float(s), 4) for s in np.random.default_rng(seed).normal(ms, ms / 100, 60))
    p10, p50, p90 = (round(float(p), 5) for p in np.percentile(samples, (10, 50, 90)))
    version = {"labkit": "0.1.0"}.get(engine, "5.15.0")
    values: dict[str, Any] = dict(
        engine=engine, version=version, way=way, settings={"attention": "sdpa"}, model="smollm2-135m", weights="random",
        dtype="bfloat16", batch=batch, context=64, p10_ms=p10, p50_ms=p50, p90_ms=p90, n=60, samples_ms=samples,
        rounds=4, tok_s=round(batch / p50 * 1e3, 2), agreement="same tokens", agrees=True,
    )  # fmt: skip
    made = BesideRow(**{**values, **changes})
    made.check()
    return made


def recording(*rows: BesideRow, kind: Kind = Kind.RECORDED, **origin: Any) -> BesideRecording:
    return BesideRecording(ORIGIN.replace(kind=kind, **origin), rows)


def example(**origin: Any) -> BesideRecording:
    return recording(
        row("eager", 4.0, "labkit"), row("FULL_AND_PIECEWISE graphs", 1.0, "labkit"),
        row("static cache, eager", 12.0), row("continuous batching", 3.0), **origin,
    )  # fmt: skip


# --- what a step is ------------------------------------------------------------------------------------------------


def test_a_step_is_what_lies_between_two_tokens_of_the_whole_batch() -> None:
    # Request 0 starts at 1 s; request 1 three steps later, and with it all three others have a token every 0.1 s.
    early = [1.0, 1.5, 2.0] + [2.3 + 0.1 * k for k in range(8)]
    late = [2.3 + 0.1 * k for k in range(11)]
    # The window is 2.3 … 3.0; of its seven steps the first two are warm-up.
    assert decode_steps([early, late], 2, 5) == pytest.approx([100.0] * 5)
    with pytest.raises(LabkitError, match="had all 2 requests decoding"):
        decode_steps([early, late], 2, 6)
    with pytest.raises(LabkitError, match="no token"):
        decode_steps([[], late], 0, 1)


def test_prefill_is_in_no_step() -> None:
    assert decode_steps([[9.0, 9.004, 9.01]], 0, 2) == (4.0, 6.0)


# --- another engine on the same tensors ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_transformers_gets_the_very_tensors(name: str) -> None:
    from labkit.models.loader import load_model

    decoder = load_model(name).decoder
    model = theirs.to_transformers(decoder)
    views, params = decoder.checkpoint_views(), dict(model.named_parameters())
    assert set(views) == set(params)
    for key, view in views.items():
        assert params[key].data_ptr() == view.data_ptr() and params[key].shape == view.shape
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(t.is_meta or t.requires_grad for t in tensors)
    assert model.lm_head.weight.data_ptr() == (decoder.lm_head).data_ptr()


@pytest.fixture(scope="module")
def compared() -> BesideRecording:
    """One real run of everything that a CPU has time for."""
    found, _ = beside.compare_transformers(
        EngineConfig(model="tiny-qwen3", **SMALL), (2,), 8, steps=4, warmup=1, rounds=2, command="labkit compare"
    )
    return found


def test_every_way_runs_and_its_tokens_agree(compared: BesideRecording) -> None:
    assert [(r.engine, r.way) for r in compared.rows] == [
        ("labkit", "eager"), ("labkit", "FULL_AND_PIECEWISE graphs"), ("transformers", "static cache, eager"),
        ("transformers", "continuous batching"),
    ]  # fmt: skip
    assert not compared.refused
    for one in compared.rows:
        one.check()
        assert one.n == 4 and one.rounds == 2 and one.agrees and one.batch == 2
        assert one.agreement in ("the reference", "same tokens")
    versions = compared.provenance.packages
    assert all(one.version == versions["transformers"] for one in compared.rows if one.engine == "transformers")
    assert compared.rows[1].emulated and not compared.rows[0].emulated
    continuous = compared.rows[3].settings
    assert {"attention", "use_cuda_graph", "page_size"} <= set(continuous)
    assert compared.provenance.kind is Kind.LIVE and compared.provenance.order.startswith("2 rounds")


def test_a_way_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(theirs.Continuous, "run", broken)
    found, _ = beside.compare_transformers(
        EngineConfig(model="tiny-qwen3", enforce_eager=True, **SMALL), (1,), 4, ways=["continuous"], steps=1,
        warmup=0, rounds=1,
    )  # fmt: skip
    assert [r.engine for r in found.rows] == ["labkit"]
    assert found.refused == {"continuous batching, batch 1": "RuntimeError: no such kernel"}


class Planted:
    """A pair of models whose logits are a table: what two engines may differ by is then known."""

    device = torch.device("cpu")

    def __init__(self, logits: list[float], dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self._logits = dtype, torch.tensor([[logits]])

    def __call__(self, ids: torch.Tensor, **_: Any) -> Any:
        return type("Out", (), {"logits": self._logits})


@pytest.mark.parametrize(
    ("exact", "rounded", "agrees"),
    [
        ([5.0, 4.9999, 0.0], None, True),  # fp32: within 2.5e-4 of the largest logit
        ([5.0, 4.9, 0.0], None, False),
        ([5.0, 4.9, 0.0], [5.05, 4.95, 0.0], True),  # 16 bits: each engine may be off by what transformers is
        ([5.0, 4.8, 0.0], [5.05, 4.75, 0.0], False),
    ],
)
def test_a_difference_counts_only_where_rounding_cannot_explain_it(
    exact: list[float], rounded: list[float] | None, agrees: bool
) -> None:
    judge = beside._Judge(None)  # type: ignore[arg-type]
    same = Planted(exact)
    judge._models = (Planted(rounded) if rounded else same, same)
    assert judge([[7]], [[1, 0, 2]], [[1, 0, 2]]) == (True, "same tokens")
    found, words = judge([[7]], [[2, 0, 2]], [[2, 1, 2]])
    assert found is agrees and "1 of 1 requests differ, first at token 1" in words
    assert ("explains only" in words) is not agrees


@pytest.mark.parametrize(
    "changes", [{"ways": ["vllm"]}, {"batches": (9,)}, {"context": 500}, {"rounds": 0}], ids=lambda c: next(iter(c))
)
def test_what_cannot_be_compared_is_refused_with_a_sentence(changes: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"batches": (1,), "context": 4, "steps": 1, **changes}
    with pytest.raises(ConfigError):
        beside.compare_transformers(EngineConfig(model="tiny-qwen3", enforce_eager=True, **SMALL), **arguments)


# --- files ---------------------------------------------------------------------------------------------------------


def test_saved_and_read_again(tmp_path: Path) -> None:
    source = example(kind=Kind.LIVE)
    path = source.save(tmp_path / "b.json.gz")
    again = load_beside(path)
    assert again.rows == source.rows and again.provenance.kind is Kind.RECORDED


DAMAGED = {
    "median": lambda r: r.update(p50_ms=r["p50_ms"] * 1.1),
    "no version": lambda r: r.update(version=""),
    "rounds": lambda r: r.update(rounds=7),
    "tokens": lambda r: r.update(tok_s=r["tok_s"] * 2),
    "field": lambda r: r.update(ours_is_better=True),
    "missing": lambda r: r.pop("agreement"),
    "sorted": lambda r: r.update(samples_ms=sorted(r["samples_ms"])),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_file_that_disagrees_with_itself_is_refused(case: str) -> None:
    data = json.loads(json.dumps(example().as_dict()))
    DAMAGED[case](data["rows"][2])
    with pytest.raises(RecordingError):
        BesideRecording.from_dict(data)


def test_few_samples_and_repeats_are_no_recording(tmp_path: Path) -> None:
    few = row("eager", 4.0, "labkit")
    samples = few.samples_ms[:8]
    p10, p50, p90 = (round(float(p), 5) for p in np.percentile(samples, (10, 50, 90)))
    few = row("eager", 4.0, "labkit", samples_ms=samples, n=8, p10_ms=p10, p50_ms=p50, p90_ms=p90,
              tok_s=round(1e3 / p50, 2))  # fmt: skip
    with pytest.raises(RecordingError, match="has 8 samples"):
        recording(few, kind=Kind.LIVE, n=8).save(tmp_path / "b.json.gz")
    with pytest.raises(RecordingError, match="repeats"):
        recording(row("eager", 4.0, "labkit"), row("eager", 4.1, "labkit")).check()


def test_an_interrupted_recording_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def fake(config: EngineConfig, batches: tuple[int, ...], context: int, **_: Any) -> Any:
        asked.append((config.model, batches[0]))
        ways = ("eager", 4.0, "labkit"), ("continuous batching", 3.0, "transformers")
        rows = [row(*one, batches[0], model=config.model, context=context) for one in ways]
        return recording(*rows, kind=Kind.LIVE), []

    monkeypatch.setattr(beside, "compare_transformers", fake)
    out = tmp_path / "beside.json.gz"
    stop = iter([False, True])
    common: dict[str, Any] = {"device": "cpu", "models": ("tiny-qwen3",), "context": 8}
    beside.record_beside(out, batches=(1, 2), should_stop=lambda: next(stop), **common)
    found = beside.record_beside(out, batches=(1, 2), **common)
    assert asked == [("tiny-qwen3", 1), ("tiny-qwen3", 2)]
    assert [r.batch for r in found.rows] == [1, 1, 2, 2] and load_beside(out) == found
    monkeypatch.setattr(sys.modules[__name__], "ORIGIN", ORIGIN.replace(driver="2"))
    with pytest.raises(ProvenanceError, match="recorded elsewhere"):
        beside.record_beside(out, batches=(4,), **common)


# --- sentences, figure, page ---------------------------------------------------------------------------------------


def test_sentences_name_engine_version_way_and_torch() -> None:
    static, continuous = (pair.sentence for pair in beside_pairs(example()))
    assert static.startswith("Batch 1: a step of transformers 5.15.0, static cache, eager, takes 3.0")
    assert "the time of labkit 0.1.0, eager (in process, torch 2.11.0, RECORDED)" in static
    assert "of labkit 0.1.0, FULL_AND_PIECEWISE graphs" in continuous and "3.0" in continuous


def test_tokens_that_differ_are_in_no_ratio() -> None:
    odd = row("continuous batching", 3.0, agrees=False, agreement="1 of 1 requests differ")
    (pair,) = beside_pairs(recording(row("eager", 4.0, "labkit"), odd))
    assert pair.ratio is None and "is not compared" in pair.sentence and "1 of 1 requests differ" in pair.sentence
    (trace,) = [t for t in beside_figure([recording(odd)]).data]
    assert trace.text == ("tokens differ",) and trace.marker.color[0] == "rgba(0,0,0,0)"


def test_the_figure_holds_what_it_was_given() -> None:
    source = example()
    figure = beside_figure([source])
    for trace, one in zip(figure.data, source.rows, strict=True):
        assert one.name in trace.name and trace.name.endswith("RECORDED")
        assert list(trace.meta) == [one.engine, one.way, "RECORDED"] and list(trace.y) == [one.p50_ms]
        assert trace.error_y.array[0] == pytest.approx(one.p90_ms - one.p50_ms)
        assert trace.error_y.arrayminus[0] == pytest.approx(one.p50_ms - one.p10_ms)
    looks = [(t.marker.line.color, t.marker.pattern.shape) for t in figure.data]
    assert len(set(looks)) == len(looks) and set(ENGINE_COLOURS.values()) == {colour for colour, _ in looks}
    assert figure.layout.title.text and "ms" in figure.layout.yaxis.title.text
    assert source.provenance.label in figure.layout.annotations[0].text
    assert all(one.name in beside_summary([source]) for one in source.rows)
    assert "Nothing" in beside_figure([]).layout.annotations[1].text


def test_bars_of_two_kinds_or_machines_are_never_beside_each_other() -> None:
    for other in (example(kind=Kind.LIVE), example(gpu="NVIDIA A100")):
        with pytest.raises(ProvenanceError):
            beside_figure([example(), other])


def test_figure_and_rows_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import labkit.figures.beside, labkit.measure.beside, labkit.bench.beside, labkit.cli.compare"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


class Reader(html.parser.HTMLParser):
    """Follows a page's tags: all are closed in order, ids are unique, and nothing names another place."""

    VOID = {"meta", "br", "link", "img", "hr", "input"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_decl(self, decl: str) -> None:
        assert decl == "doctype html" and not self.seen

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        assert tag not in ("link", "iframe", "object", "embed", "base", "img", "form")
        for name, value in attrs:
            assert name not in ("src", "href", "srcset", "background") and "url(" not in (value or "")
            self.ids += [value or ""] if name == "id" else []
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "@import" not in data and "url(" not in data
        elif "script" not in self.open:
            self.text += data


def read_page(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert not reader.open and len(set(reader.ids)) == len(reader.ids)
    assert reader.seen[:2] == ["html", "head"] and {"title", "body", "h1", "table"} <= set(reader.seen)
    return reader


def test_the_page_of_a_comparison_is_whole_by_itself(tmp_path: Path) -> None:
    source = example()
    sentences = [pair.sentence for pair in beside_pairs(source)] + ["<b>not bold</b> & so on"]
    reader = read_page(write_beside_page(tmp_path / "p.html", source, sentences))
    assert all(sentence in reader.text for sentence in sentences)
    assert all(one.way in reader.text for one in source.rows) and source.provenance.label in reader.text


def test_the_page_of_a_bench_is_whole_by_itself(tmp_path: Path) -> None:
    samples = tuple(4 + (k * 7 % 11) / 100 for k in range(50))
    p10, p50, p90 = (round(float(p), 5) for p in np.percentile(samples, (10, 50, 90)))
    one = Row(
        model="tiny", dtype="float32", backend="TORCH_SDPA", backend_version=None, requested_mode="NONE", mode="NONE",
        size=1, batch=1, context=16, query_len=1, compile="NONE", primed=True, p10_ms=p10, p50_ms=p50, p90_ms=p90, n=50,
        samples_ms=samples, host_us=4e3, device_us=None, launches=None, graph_launches=0, launch_cost_us={}, gb_s=1.0,
        floor_ms=None, tok_s=250.0, peak_mib=0.0, phases_us={"schedule": 12.5, "launch": 3e3},
    )  # fmt: skip
    reader = read_page(write_page(tmp_path / "p.html", Recording(ORIGIN, (one,)), ["Eager takes 2×."]))
    for words in ("Step latency", "Eager takes 2×.", "schedule", "12.5", "TORCH_SDPA", "RECORDED", "commit"):
        assert words in reader.text


# --- the command, and what nobody may say --------------------------------------------------------------------------


def test_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, compared: BesideRecording
) -> None:
    monkeypatch.setattr(beside, "compare_transformers", lambda *a, **k: (compared, ["a note"]))
    page = tmp_path / "p.html"
    words = ["compare", "transformers", "--batch", "2", "--html", str(page)]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["table"] == "beside" and len(data["comparisons"]) == 2 and data["notes"] == ["a note"]
    assert BesideRecording.from_dict({k: data[k] for k in ("schema", "table", "provenance", "rows", "refused")})
    read_page(page)
    assert main(words) == 0
    out = capsys.readouterr().out
    for one in compared.rows:
        assert one.way in out and one.version in out
    assert "use_cuda_graph=" in out and "prefill is left out" in out and "LIVE" in out
    assert main(["compare", "transformers", "--steps", "9", "--out", str(tmp_path / "x.json.gz")]) == 2
    assert main(["compare"]) == 2


BOAST = re.compile(r"(faster|quicker|slower|better) than (vllm|sglang|transformers)|beats? (vllm|transformers)", re.I)


def test_nothing_is_called_faster_than_another_engine_without_version_process_and_torch() -> None:
    """`faster than vLLM` only as in: faster than vLLM 0.23.0, in process, torch 2.11."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("labkit/**/*.md"), *ROOT.glob("labkit/**/*.py"), *ROOT.glob("docs/**/*.md"),
             *ROOT.glob("notebooks/*.ipynb")]  # fmt: skip
    assert len(found) > 50
    for path in found:
        assert not unqualified(path.read_text(encoding="utf-8")), f"{path.relative_to(ROOT)}"
    assert unqualified("It is faster than\n  vLLM.") and unqualified("faster than vLLM 0.23.0")
    assert not unqualified("faster than vLLM (0.23.0, in process, torch 2.11)")


def unqualified(text: str) -> list[str]:
    flat = " ".join(re.sub(r'\\n|["#*`]', " ", text).split())
    claims = [flat[m.start() : m.end() + 80] for m in BOAST.finditer(flat)]
    wanted = (r"\d+\.\d+", r"in process", r"torch \d+\.\d+")
    return [claim for claim in claims if not all(re.search(one, claim) for one in wanted)]
