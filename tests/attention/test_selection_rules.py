"""Rules of selection, over every backend of the registry: precedence, tables, and that each remedy is one."""

from __future__ import annotations

import dataclasses

import pytest

from labkit import LLM, EngineConfig
from labkit.attention import registry
from labkit.attention.interface import Platform
from labkit.attention.sdpa import TorchSDPABackend
from labkit.config import ModelConfig
from labkit.engine.plan import make_plan
from labkit.errors import BackendError, ConfigError
from labkit.llm import BACKEND_VARIABLE

MODEL = ModelConfig("m", 512, 64, 128, 2, 4, 2, 32, 4096)
SMALL = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "enforce_eager": True}


# --- who decides: keyword, config, environment, automatic ----------------------------------------------------------


@pytest.mark.parametrize(
    ("keyword", "field", "variable", "picked"),
    [
        ({}, None, None, "TORCH_SDPA"),
        ({}, None, "triton_attn", "TRITON_ATTN"),
        ({}, "TORCH_SDPA", "TRITON_ATTN", "TORCH_SDPA"),
        ({"attention_backend": "TRITON_ATTN"}, "TORCH_SDPA", "TORCH_SDPA", "TRITON_ATTN"),
        ({"attention_backend": "auto"}, "TRITON_ATTN", "TRITON_ATTN", "TORCH_SDPA"),
        ({}, "auto", "TRITON_ATTN", "TORCH_SDPA"),
        ({"attention_backend": None}, None, "TRITON_ATTN", "TRITON_ATTN"),
        ({}, None, "Auto", "TORCH_SDPA"),
        ({}, None, "", "TORCH_SDPA"),
    ],
)
def test_c21_a_keyword_goes_before_the_config_and_both_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, keyword: dict[str, str], field: str | None, variable: str | None, picked: str
) -> None:
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(BACKEND_VARIABLE, variable)
    config = EngineConfig(**SMALL, attention_backend=field)  # type: ignore[arg-type]
    with LLM("tiny-llama", config, **keyword) as llm:
        assert llm.selection.selected == picked


def test_c21_a_wrong_name_in_the_environment_is_answered_with_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "TRITON_ATN")
    with pytest.raises(ConfigError) as error:
        LLM("tiny-llama", **SMALL)
    assert "LABKIT_ATTENTION_BACKEND='TRITON_ATN'" in error.value.what
    assert "Did you mean 'TRITON_ATTN'" in error.value.try_


def test_c21_a_backend_from_the_environment_that_cannot_serve_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "XFORMERS")
    with pytest.raises(BackendError) as error:
        LLM("tiny-llama", **SMALL)
    assert error.value.what == "LABKIT_ATTENTION_BACKEND='XFORMERS'" and "TORCH_SDPA" in error.value.try_
    with pytest.raises(BackendError) as error:
        LLM("tiny-llama", attention_backend="XFORMERS", **SMALL)
    assert error.value.what == "attention_backend='XFORMERS'", "this time the keyword asked"


def test_the_environment_is_read_when_an_llm_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "TRITON_ATTN")
    with LLM("tiny-llama", **SMALL) as llm:
        monkeypatch.setenv(BACKEND_VARIABLE, "nonsense")
        llm.reconfigure(num_splits=2)
        assert llm.selection.selected == "TRITON_ATTN"
        llm.reconfigure(attention_backend="TORCH_SDPA", num_splits=0)
        assert llm.selection.selected == "TORCH_SDPA"
        llm.reconfigure(attention_backend=None)
        assert llm.selection.selected == "TRITON_ATTN", "nothing said any more, so the environment's answer again"
        llm.reconfigure(attention_backend="auto")
        assert llm.selection.selected == "TORCH_SDPA"
    monkeypatch.delenv(BACKEND_VARIABLE)
    with LLM("tiny-llama", **SMALL) as llm:
        monkeypatch.setenv(BACKEND_VARIABLE, "TRITON_ATTN")
        llm.reconfigure(max_num_seqs=1)
        assert llm.selection.selected == "TORCH_SDPA"


# --- page size -----------------------------------------------------------------------------------------------------


def prefer(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """TORCH_SDPA with another favourite page size."""
    monkeypatch.setattr(
        TorchSDPABackend, "capabilities", dataclasses.replace(TorchSDPABackend.capabilities, preferred_block_size=size)
    )


def test_a_page_size_that_was_not_set_follows_the_backend_through_a_toggle(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, 64)
    with LLM("tiny-llama", attention_backend="TRITON_ATTN", **SMALL) as llm:
        sizes = [llm.config.block_size]
        report = llm.reconfigure(attention_backend="TORCH_SDPA")
        sizes.append(llm.config.block_size)
        assert report.changed["block_size"] == (16, 64) and "kv_cache" not in report.kept
        engine = llm.engine
        assert engine.pool.block_size == engine.plan.spec.block_size == engine.kv.key_caches[0].shape[1] == 64
        llm.reconfigure(attention_backend="TRITON_ATTN")
        assert [*sizes, llm.config.block_size] == [16, 64, 16]
    with LLM("tiny-llama", attention_backend="TRITON_ATTN", block_size=32, **SMALL) as llm:
        report = llm.reconfigure(attention_backend="TORCH_SDPA")
        assert llm.config.block_size == 32 and "kv_cache" in report.kept, "the user's own stays"


def test_the_plan_says_which_page_size_a_backend_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, 64)
    plan = make_plan(EngineConfig(), MODEL, Platform("cpu"))
    assert plan.config.block_size == plan.spec.block_size == 64
    assert any("TORCH_SDPA prefers pages of 64" in note for note in plan.notes)
    asked = make_plan(EngineConfig(block_size=16), MODEL, Platform("cpu"))
    assert asked.spec.block_size == 16 and not asked.notes, "the user's own size needs no sentence"


def test_a_page_size_that_excludes_a_better_backend_is_named() -> None:
    hopper = registry.platform_for_gpu("H200")
    best = make_plan(EngineConfig(), MODEL, hopper)
    plan = make_plan(EngineConfig(block_size=24), MODEL, hopper)
    assert plan.backend == "TORCH_SDPA", "it is the one that takes any size"
    (note,) = [n for n in plan.notes if "block_size=24" in n]
    assert f"excludes {best.backend}" in note and f"set it to {best.spec.block_size}" in note
    assert not make_plan(EngineConfig(block_size=best.spec.block_size), MODEL, hopper).notes
    explicit = make_plan(EngineConfig(block_size=24, attention_backend="TORCH_SDPA"), MODEL, hopper)
    assert not explicit.notes, "who names the backend has not lost another one"


# --- flash_attn_version --------------------------------------------------------------------------------------------


def test_flash_attn_version_takes_auto_and_three_numbers() -> None:
    assert EngineConfig(flash_attn_version="auto").flash_attn_version is None
    assert EngineConfig(flash_attn_version=3).flash_attn_version == 3
    for wrong in (1, 5, "3", True, 3.0):
        with pytest.raises(ConfigError, match="flash_attn_version"):
            EngineConfig(flash_attn_version=wrong)  # type: ignore[arg-type]
