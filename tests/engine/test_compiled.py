"""A compiled engine: every mode equals eager, the switches turn off what they say, and toggling keeps what is valid."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from labkit import LLM, SamplingParams
from labkit.engine import compiled as compiled_module
from labkit.engine import engine as engine_module
from labkit.errors import CompileError, ConfigError
from labkit.graphs import compile_cache
from labkit.graphs.capture import GraphCapturer
from tests.engine.test_capture import nothing_is_left, weights_after_capture
from tests.engine.test_engine import EAGER, SMALL, prompts
from tests.teacher import assert_same_logits, one_by_one, teach

SIZES = [1, 2, 4, 8, 24]
COMPILED = {**SMALL, "compilation_mode": "VLLM_COMPILE", "cudagraph_capture_sizes": SIZES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One compile serves the whole file; nothing is left in the user's cache."""
    monkeypatch.setattr(compile_cache, "default_folder", lambda: folder)
    yield


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3"])
def test_every_mode_equals_eager(model: str, mode: str) -> None:
    batch, counts = prompts(6, seed=5, shared=9), [12, 5, 9, 3, 14, 7]
    with LLM(model, **EAGER) as eager:
        reference = one_by_one(eager, batch, counts)
    with LLM(model, **COMPILED, cudagraph_mode=mode) as llm:
        assert llm.cudagraph_mode.name == mode and not llm.notes
        report = llm.compile_report
        assert report is not None and report.pieces == llm.model_config.num_layers + 1
        ours, reports = teach(llm, batch, counts, stagger=2)
    assert_same_logits(ours, reference, what=mode)
    ran = {r.mode for r in reports}
    expected = {"NONE": {"NONE"}, "PIECEWISE": {"PIECEWISE", "NONE"}, "FULL_DECODE_ONLY": {"FULL", "NONE"}}
    assert ran == expected.get(mode, {"FULL", "PIECEWISE", "NONE"})


@pytest.mark.parametrize(
    ("settings", "compilation", "mode"),
    [
        ({}, "NONE", "FULL_AND_PIECEWISE"),
        ({"optimization_level": 0}, "NONE", "NONE"),
        ({"optimization_level": 1}, "VLLM_COMPILE", "PIECEWISE"),
        ({"optimization_level": 2}, "VLLM_COMPILE", "FULL_AND_PIECEWISE"),
        ({"optimization_level": 3}, "VLLM_COMPILE", "FULL_AND_PIECEWISE"),
        ({"optimization_level": 3, "enforce_eager": True}, "NONE", "NONE"),
        ({"optimization_level": 3, "cudagraph_mode": "NONE"}, "VLLM_COMPILE", "NONE"),
        ({"optimization_level": 3, "compilation_mode": "NONE"}, "NONE", "FULL_AND_PIECEWISE"),
        ({"piecewise_method": "compile"}, "NONE", "FULL_DECODE_ONLY"),
        ({"compilation_mode": "VLLM_COMPILE", "splitting_ops": []}, "VLLM_COMPILE", "FULL_DECODE_ONLY"),
    ],
    ids=str,
)
def test_levels_and_switches(settings: dict[str, object], compilation: str, mode: str) -> None:
    with LLM("tiny-llama", **SMALL, **settings) as llm:
        assert (llm.config.compilation_mode, llm.cudagraph_mode.name) == (compilation, mode)
        assert (llm.compile_report is not None) == (compilation == "VLLM_COMPILE")


def test_one_piece_with_attention_inside_gives_the_same_text() -> None:
    """An empty list: nothing is cut, so no PIECEWISE; the operator is called from inside the compiled code."""
    batch = prompts(3, seed=2)
    with LLM("tiny-llama", **EAGER) as eager:
        reference = one_by_one(eager, batch, 6)
    with LLM("tiny-llama", **COMPILED, splitting_ops=[]) as llm:
        assert llm.compile_report.pieces == 1
        assert any("one piece" in line for line in llm.mode_trail)
        ours, _ = teach(llm, batch, 6)
    assert_same_logits(ours, reference)


def test_toggling_keeps_weights_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny-llama", **COMPILED) as llm:
        text = llm.generate([[1, 2, 3]])[0].token_ids
        off = llm.reconfigure(compilation_mode="NONE")
        assert "compilation_mode" in off.changed and "kv_cache" in off.kept and llm.compile_report is None
        assert llm.generate([[1, 2, 3]])[0].token_ids == text

        def never(*_: object, **__: object) -> None:
            raise AssertionError("compiled twice")

        monkeypatch.setattr(compiled_module, "compile_model", never)
        on = llm.reconfigure(compilation_mode="VLLM_COMPILE")
        assert "compile" not in on.rebuilt_ms and "graphs" in on.kept, "both are still there"
        assert llm.generate([[1, 2, 3]])[0].token_ids == text


@pytest.mark.parametrize(
    "settings", [{"splitting_ops": [], "cudagraph_mode": "NONE"}, {"compilation_mode": "STOCK_TORCH_COMPILE"}], ids=str
)
def test_a_backend_may_compile_inside_compiled_code(settings: dict[str, object]) -> None:
    """FLEX_ATTENTION traces its mask at the first call of a shape, here from inside the operator."""
    with LLM("tiny-llama", **EAGER) as eager:
        reference = one_by_one(eager, [[1, 2, 3]], 3)
    torch._dynamo.reset()  # an earlier test may have compiled the shape
    asked = {**COMPILED, "block_size": None, "attention_backend": "FLEX_ATTENTION", "cudagraph_capture_sizes": [1]}
    with LLM("tiny-llama", **{**asked, **settings}) as llm:
        ours, _ = teach(llm, [[1, 2, 3]], 3)
        assert not [note for note in llm.notes if "without" in note]
    assert_same_logits(ours, reference)


def test_c34_weights_after_compilation_and_capture() -> None:
    weights_after_capture(COMPILED)


def test_c44_nothing_is_left_of_a_closed_compiled_engine() -> None:
    nothing_is_left(COMPILED, turns=2)


def test_a_trace_does_not_keep_the_weights() -> None:
    """Dynamo keeps what it was given to call, for the life of the process."""
    with LLM("tiny-llama", **EAGER) as llm:
        compiled_module._trace(llm.engine.model.decoder, lambda traced, held=llm.engine.model.decoder: None)
        gone = [weakref.ref(tensor) for tensor in llm.engine.model.decoder.tensors().values()]
    del llm
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * len(gone)


@pytest.mark.parametrize("where", ["compile_model", "Builder", "capture"])
def test_an_interrupted_change_leaves_the_old_settings(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Pages, cache and settings belong together afterwards, live requests go on, and the change can be made again."""
    changes = {"block_size": 16, "num_gpu_blocks_override": 30, "compilation_mode": "VLLM_COMPILE"}
    batch, counts = prompts(3, seed=8), [9, 12, 7]
    with LLM("tiny-llama", **EAGER) as alone:
        reference = one_by_one(alone, batch, counts)
    with LLM("tiny-llama", **{**COMPILED, "compilation_mode": "NONE"}) as llm:
        llm.add_request([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True), "live")
        llm.step()
        before = llm.config.as_dict()
        places = {"compile_model": compiled_module, "Builder": engine_module, "capture": GraphCapturer}
        original, calls = getattr(places[where], where), itertools.count()

        def stop(*args: object, **kwargs: object) -> object:
            if next(calls) == 0:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(places[where], where, stop)
            llm.reconfigure(**changes)
        assert llm.config.as_dict() == before and llm.engine.pool.block_size == llm.engine.inputs.block_size == 4
        assert llm.engine.kv.key_caches[0].shape[:2] == (200, 4) and not llm.engine.runner.missing_graphs()
        outputs = [o for _ in range(8) for o in llm.step().outputs if o.finished]
        assert [(o.request_id, o.finish_reason, len(o.token_ids)) for o in outputs] == [("live", "length", 8)]
        assert set(changes) <= set(llm.reconfigure(**changes).changed)
        assert llm.engine.kv.key_caches[0].shape[:2] == (30, 16)
        ours, _ = teach(llm, batch, counts, stagger=1)
    assert_same_logits(ours, reference)


def test_a_compile_that_fails_leaves_an_engine_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CompileError("a piece of the model", "Inductor failed: no compiler", "Set compilation_mode to NONE.")

    monkeypatch.setattr(compiled_module, "compile_model", fail)
    with pytest.warns(UserWarning, match="runs without compilation"), LLM("tiny-llama", **COMPILED) as llm:
        assert llm.config.compilation_mode == "NONE" and any("no compiler" in note for note in llm.notes)
        assert len(llm.generate([[1, 2, 3]])[0].token_ids) == 16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"splitting_ops": ["aten::mm"]}, "no operator to split at"),
        ({"compile_sizes": [0]}, "does not lie in 1"),
        ({"compile_sizes": [65]}, "does not lie in 1"),
        ({"piecewise_method": "brake"}, "Did you mean 'break'"),
        ({"piecewise_method": "break", "compilation_mode": "VLLM_COMPILE"}, "Drop one of the two"),
        ({"compilation_mode": "VLLM"}, "VLLM_COMPILE"),
    ],
    ids=str,
)
def test_bad_settings_are_answered(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("tiny-llama", **SMALL, **settings)


def test_the_operator_is_registered_as_the_compiler_needs_it() -> None:
    """C39: schema, mutation and the fake implementation, by torch's own check."""
    from labkit.attention import op
    from labkit.attention.opaque import unified_attention_with_output

    with LLM("tiny-llama", **EAGER) as llm:
        runner, config = llm.engine.runner, llm.model_config
        view = llm.engine.inputs.fill_dummy(5, 1, 5, 5)
        view.metadata.for_graph = False
        runner.backend.prepare(view.metadata)
        query = torch.randn(5, config.num_heads, config.head_size)
        key, value = torch.randn(2, 5, config.num_kv_heads, config.head_size)
        with op.forward_context(runner._context(view.metadata)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = torch.library.opcheck(
                unified_attention_with_output, (query, key, value, torch.empty_like(query), 0)
            )
    assert set(results.values()) == {"SUCCESS"}
