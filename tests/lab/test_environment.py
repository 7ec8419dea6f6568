"""The environment card: the machine, and for each backend that does not load the exact reason."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from labkit.attention import registry
from labkit.attention.interface import AttentionCGSupport, Reason
from labkit.attention.selector import Candidate
from labkit.lab.environment import LIVE_CPU, LIVE_GPU, RECORDED_ONLY, Environment, card_html, environment_card, look
from tests.lab.fakes import recording

HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture(scope="module")
def here() -> Environment:
    return look()


def test_the_card_of_this_machine_names_every_backend_and_every_reason(here):
    assert {c.name for c in here.backends} == set(registry.BACKENDS)
    html = card_html(here)
    for candidate in here.backends:
        assert candidate.name in html
        for reason in candidate.reasons:
            assert str(reason).split(";")[0].replace("'", "&#x27;") in html
    assert here.made.packages["python"] in html


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
def test_a_machine_with_torch_and_no_gpu_is_live_on_the_cpu(here):
    if here.made.gpu:
        pytest.skip("this machine has a GPU")
    assert here.mode == LIVE_CPU and here.selected == "TORCH_SDPA"
    assert "● LIVE · CPU" in card_html(here) and "graphs are emulated" in card_html(here)


@pytest.mark.skipif(HAS_TORCH, reason="needs a Python without torch")
def test_without_torch_only_recordings_are_left_and_the_real_error_is_shown(here):
    assert here.mode == RECORDED_ONLY and here.selected is None
    html = card_html(here)
    assert "torch is not installed" in html and "■ RECORDED" in html
    assert "ModuleNotFoundError" in html


def test_a_gpu_is_named_with_capability_driver_and_free_memory(here):
    made = dataclasses.replace(recording([]).provenance, gpu="NVIDIA H200", driver="580.65")
    backends = (
        Candidate("TRITON_ATTN", True, (), AttentionCGSupport.ALWAYS, "any batch", 1),
        Candidate("FLASH_ATTN", False, (Reason("ImportError: <undefined symbol>", "reinstall it"),), None, "", 2),
    )
    env = dataclasses.replace(
        here, mode=LIVE_GPU, why="", made=made, capability=(9, 0), free_bytes=100 << 30, total_bytes=140 << 30,
        backends=backends, selected="TRITON_ATTN",
    )  # fmt: skip
    html = card_html(env)
    for words in (
        "NVIDIA H200, compute capability 9.0, driver 580.65", "100.0 GiB of 140.0 GiB on the GPU", "● LIVE · GPU",
        "✓ selected", "ImportError: &lt;undefined symbol&gt;; reinstall it", "✗ not here",
    ):  # fmt: skip
        assert words in html


def test_the_card_is_a_widget(here):
    card = environment_card(here)
    assert any("Environment" in getattr(child, "value", "") for child in card.children)
