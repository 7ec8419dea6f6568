"""FLASH_ATTN without a GPU: each version's rules, which library counts, and how each library is called.

The libraries are faked through `sys.modules`. A fake takes its library's own arguments, keeps them, and computes in
float64 from nothing else, so an argument mapped wrongly gives a wrong result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import math
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from labkit.attention import flash_attn, registry
from labkit.attention import flash_attn_providers as providers
from labkit.attention.flash_attn import FlashAttentionBackend, choose
from labkit.attention.flash_attn_providers import (
    ADAPTERS,
    ASSUMED,
    MAX_SPLITS_UNDER_GRAPH,
    FlashAttn2,
    FlashAttn3,
    FlashAttn4,
    FlashAttnProvider,
    Kernels,
    TorchVarlen,
)
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Availability, Platform, Provider
from labkit.errors import BackendError
from tests.parity import SMALL as PARITY
from tests.parity import Case, Contender, check_case, prove_tier
from tests.reference import PagedBatch, assert_attention_close, dense_attention, random_batch

CPU = torch.device("cpu")
SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", block_size=16)

# --- rules ---------------------------------------------------------------------------------------------------------


def ask(gpu: str, **changes: Any) -> tuple[AttentionSpec, Platform]:
    return dataclasses.replace(SPEC, **changes), registry.platform_for_gpu(gpu)


@pytest.mark.parametrize(
    ("gpu", "version", "tier"),
    [
        ("A100", 2, AttentionCGSupport.UNIFORM_BATCH),
        ("L4", 2, AttentionCGSupport.UNIFORM_BATCH),
        ("RTX 4090", 2, AttentionCGSupport.UNIFORM_BATCH),
        ("H100", 3, AttentionCGSupport.ALWAYS),
        ("H200", 3, AttentionCGSupport.ALWAYS),
        ("B200", 4, AttentionCGSupport.ALWAYS),
        ("B300", 4, AttentionCGSupport.ALWAYS),
        ("RTX 5090", 2, AttentionCGSupport.UNIFORM_BATCH),
    ],
)
def test_which_version_each_gpu_takes_and_how_far_it_is_captured(
    gpu: str, version: int, tier: AttentionCGSupport
) -> None:
    spec, platform = ask(gpu, block_size=256)
    assert choose(spec, platform, ASSUMED).version == version
    found, why = FlashAttentionBackend.graph_support(spec, platform)
    assert found is tier and why.startswith(f"FA{version}, first usable of")
    assert ("packed heads" in why) == (version == 2)


@pytest.mark.parametrize("gpu", ["T4", "cpu", "MI300X"])
def test_where_no_version_runs_the_table_says_so_alone(gpu: str) -> None:
    spec, platform = ask(gpu, dtype="float16")
    (reason,) = FlashAttentionBackend.why_not(spec, platform)
    assert "needs" in str(reason)
    assert FlashAttentionBackend.graph_support(spec, platform)[0] is AttentionCGSupport.NEVER
    answers = FlashAttentionBackend.versions(spec, platform)
    assert {a.version for a in answers} == {2, 3, 4} and not any(a.usable for a in answers)


@pytest.mark.parametrize(
    ("gpu", "changes", "words"),
    [
        ("H200", {}, ""),
        ("H200", {"block_size": 48, "head_size": 72, "kv_cache_layout": "HND"}, ""),
        ("H200", {"sliding_window": 100, "logits_soft_cap": 30.0, "has_sinks": True, "num_splits": 4}, ""),
        ("H200", {"num_splits": 300}, "FA3 takes 256 splits, not 300"),
        ("H200", {"block_size": 24}, "pages of 24 tokens are not supported; set block_size to 16"),
        ("H200", {"dtype": "float32"}, "no kernel for float32"),
        ("H200", {"head_size": 264}, "head size 264"),
        ("H200", {"head_size": 84}, "head size 84"),
        ("H200", {"num_heads": 6, "num_kv_heads": 4}, "no multiple of 4 KV heads"),
        ("H200", {"family": "MLA"}, "MHA"),
        ("H200", {"batch_invariant": True}, "batch-invariant"),
        ("H200", {"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        ("H200", {"flash_attn_version": 4}, ""),
        ("H200", {"flash_attn_version": 4, "num_splits": 1}, ""),
        ("H200", {"flash_attn_version": 4, "num_splits": 2}, "FA4 splits no keys on sm_90"),
        ("H200", {"flash_attn_version": 4, "head_size": 192, "block_size": 16}, ""),
        ("H200", {"flash_attn_version": 4, "head_size": 72, "block_size": 64}, "set block_size to 128"),
        ("H200", {"flash_attn_version": 4, "head_size": 72, "block_size": 128}, ""),
        ("H200", {"flash_attn_version": 4, "head_size": 136, "block_size": 128}, "set block_size to 112"),
        ("H200", {"flash_attn_version": 4, "head_size": 200, "sliding_window": 9}, "set block_size to 64"),
        ("H200", {"flash_attn_version": 2}, "pages of 16 tokens are not supported by FA2; set block_size to 256"),
        ("H200", {"flash_attn_version": 2, "block_size": 512}, ""),
        ("H200", {"flash_attn_version": 2, "block_size": 256, "has_sinks": True}, "does not implement attention sinks"),
        ("A100", {}, "pages of 16 tokens are not supported by FA2; set block_size to 256"),
        ("A100", {"block_size": 256}, ""),
        ("A100", {"block_size": 256, "logits_soft_cap": 30.0}, ""),
        ("A100", {"block_size": 256, "num_splits": 8}, ""),
        ("A100", {"block_size": 256, "num_splits": 200}, "FA2 takes 128 splits"),
        ("A100", {"block_size": 256, "has_sinks": True}, "attention sinks"),
        ("A100", {"block_size": 256, "logits_soft_cap": 30.0, "num_splits": 8}, "flash-attn takes no number of splits"),
        ("A100", {"flash_attn_version": 3, "block_size": 256}, "FA3 has paged kernels for sm_9x only, not for sm_80"),
        ("A100", {"flash_attn_version": 4, "block_size": 256}, "sm_9x, sm_10x and sm_11x only"),
        ("B200", {"flash_attn_version": 3}, "set flash_attn_version to None"),
        ("B200", {"num_splits": 4}, ""),
        ("B200", {"head_size": 192}, "head sizes up to 128, and 256, on sm_100, not 192"),
        ("B200", {"head_size": 192, "block_size": 256}, ""),
        ("B200", {"head_size": 256}, ""),
        ("RTX 5090", {"block_size": 256, "flash_attn_version": 4}, "FA4 has paged kernels"),
    ],
    ids=str,
)
def test_what_is_served_and_why_not(gpu: str, changes: dict[str, Any], words: str) -> None:
    spec, platform = ask(gpu, **changes)
    found = " | ".join(map(str, FlashAttentionBackend.why_not(spec, platform)))
    if gpu == "B200" and changes == {"head_size": 192}:
        # FA4 cannot and FA2 wants other pages: what one setting mends is what is said.
        assert "set block_size to 256" in found
        found = str(FlashAttentionBackend.versions(spec, platform)[0].reasons)
    assert words in found if words else found == ""


@pytest.mark.parametrize(
    ("gpu", "changes", "size"),
    [
        ("H200", {}, 16),
        ("A100", {}, 256),
        ("RTX 5090", {}, 256),
        ("B200", {}, 128),
        ("B200", {"head_size": 256}, 128),
        ("B200", {"head_size": 192}, 256),
        ("H200", {"flash_attn_version": 4}, 128),
        ("H200", {"flash_attn_version": 4, "head_size": 256}, 16),
        ("H200", {"flash_attn_version": 2}, 256),
        ("A100", {"flash_attn_version": 3}, 256),
        ("cpu", {}, 16),
        ("T4", {}, 16),
    ],
    ids=str,
)
def test_the_page_size_follows_the_version(gpu: str, changes: dict[str, Any], size: int) -> None:
    spec, platform = ask(gpu, block_size=999, **changes)
    assert FlashAttentionBackend.preferred_block_size(spec, platform) == size


def there(*versions: int, lacks: tuple[str, ...] = ()) -> Availability:
    """These versions usable, the others missing."""
    names = {3: "flash_attn_interface", 4: "flash_attn.cute", 2: "torch.nn.attention.varlen"}
    found = tuple(
        FlashAttnProvider(v, n, True, "", n, lacks)
        if v in versions
        else FlashAttnProvider(v, n, False, f"ModuleNotFoundError: No module named '{n}'", n)
        for v, n in names.items()
    )
    return Availability(bool(versions), "" if versions else "nothing is installed", None, found)


@pytest.mark.parametrize(
    ("gpu", "installed", "taken", "said"),
    [
        ("H200", (3, 4, 2), 3, "FA3, first usable of 3, 4, 2 on sm_90"),
        ("H200", (4, 2), 4, "not FA3: FA3 has no usable provider (flash_attn_interface: ModuleNotFoundError"),
        ("H200", (2,), 2, "not FA4: FA4 has no usable provider (flash_attn.cute: ModuleNotFoundError"),
        ("B200", (3, 4, 2), 4, "FA4, first usable of 4, 2 on sm_100"),
        ("B200", (3, 2), 2, "not FA4"),
        ("A100", (3, 4, 2), 2, "FA2, first usable of 2 on sm_80"),
    ],
)
def test_auto_takes_the_first_usable_and_says_why_not_the_others(
    gpu: str, installed: tuple[int, ...], taken: int, said: str
) -> None:
    spec, platform = ask(gpu, block_size=256)
    available = there(*installed)
    assert FlashAttentionBackend.why_not(spec, platform, available) == []
    assert choose(spec, platform, available.providers).version == taken
    assert said in FlashAttentionBackend.graph_support(spec, platform, available)[1]


def test_a_feature_that_the_provider_lacks_moves_the_choice_on() -> None:
    """C11: a build without soft-capping is no reason to ignore the cap."""
    spec, platform = ask("H200", logits_soft_cap=30.0)
    both = (
        FlashAttnProvider(3, "flash_attn_interface", True, "", FlashAttn3.module, ("logits_soft_cap",)),
        FlashAttnProvider(4, "flash-attn-4", True, "", FlashAttn4.module),
    )
    assert choose(spec, platform, both).version == 4
    assert choose(dataclasses.replace(spec, logits_soft_cap=None), platform, both).version == 3
    (reason,) = FlashAttentionBackend.why_not(spec, platform, Availability(True, providers=both[:1]))
    assert "FA3 of flash_attn_interface does not implement logits soft-capping" in reason.condition


def test_two_providers_of_one_version_serve_what_each_has() -> None:
    platform = registry.platform_for_gpu("A100")
    for changes, module in (
        ({}, TorchVarlen.module),
        ({"num_splits": 4}, TorchVarlen.module),
        ({"logits_soft_cap": 30.0}, FlashAttn2.module),
    ):
        choice = choose(dataclasses.replace(SPEC, block_size=256, **changes), platform, ASSUMED)  # type: ignore[arg-type]
        assert choice.provider.module == module and not choice.reasons  # type: ignore[union-attr]


def test_versions_answer_for_each_of_the_three() -> None:
    spec, platform = ask("H200")
    answers = {a.version: a for a in FlashAttentionBackend.versions(spec, platform, there(4, 2))}
    assert list(answers) == [3, 4, 2], "in the order in which they are tried"
    assert not answers[3].usable and "ModuleNotFoundError" in answers[3].reasons[0].condition
    assert answers[4].usable and answers[4].provider == "flash_attn.cute"
    assert [(r.field, r.value) for r in answers[2].reasons] == [("block_size", 256)]
    asked = dataclasses.replace(spec, flash_attn_version=4)
    told = {a.version: a for a in FlashAttentionBackend.versions(asked, platform)}
    assert told[4].usable and (told[3].reasons[-1].field, told[3].reasons[-1].value) == ("flash_attn_version", 3)
    thor = Platform("cuda", (11, 0))
    paged = dataclasses.replace(spec, block_size=256)
    (other,) = [a for a in FlashAttentionBackend.versions(paged, thor) if a.version == 4]
    assert (other.reasons[0].field, other.reasons[0].value) == ("flash_attn_version", 4)


def test_what_is_not_installed_is_said_once() -> None:
    """The selector shows availability's reason; the rules then answer as if all were there."""
    spec, platform = ask("H200")
    nothing = there()
    assert FlashAttentionBackend.why_not(spec, platform, nothing) == []
    for answer in FlashAttentionBackend.versions(spec, platform, nothing):
        assert any("ModuleNotFoundError" in r.condition for r in answer.reasons)
    assert FlashAttentionBackend.why_not(spec, platform, Availability(True, providers=(Provider(3, "x", True),))) == []


# --- fakes: each with its library's arguments ------------------------------------------------------------------------


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, table: torch.Tensor,
    scale: float, window: tuple[int, int], causal: bool, cap: float = 0.0, sinks: torch.Tensor | None = None,
    empty: float = 0.0, empty_lse: float = -math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """FlashAttention's meaning of its arguments: output like `q`, LSE `[H, T]`. Rows behind the last stay NaN."""
    assert all(t.dtype == torch.int32 for t in (starts, lens, table)) and table.shape[0] == len(lens) == len(starts) - 1
    out, lse = torch.full_like(q, math.nan), torch.full((q.shape[1], q.shape[0]), math.nan)
    left, right = window[0], 0 if causal else window[1]
    group = q.shape[1] // k.shape[2]
    for i, n in enumerate(lens.tolist()):
        first, last = int(starts[i]), int(starts[i + 1])
        keys, values = (
            c[table[i].long()].flatten(0, 1)[:n].double().repeat_interleave(group, 1) for c in (k, v)
        )  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", q[first:last].double(), keys) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        at = torch.arange(last - first)[:, None] + n - (last - first)
        distance = torch.arange(n)[None] - at
        hidden = (distance > right if right >= 0 else distance > n) | (distance < -left if left >= 0 else distance < -n)
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, last - first, 1)], -1)
        blind = (hidden.all(1) if n else torch.ones(last - first, dtype=torch.bool))[:, None, None]
        weights = scores.softmax(-1).nan_to_num(0.0)[..., :n]
        result = torch.einsum("hqk,khd->qhd", weights, values).masked_fill(blind, empty)
        out[first:last] = result.to(q.dtype)
        total = scores.logsumexp(-1)
        lse[:, first:last] = total.masked_fill(torch.isneginf(total), empty_lse).float()
    return out, lse


class Calls(list[dict[str, Any]]):
    """What a fake was called with, by the library's own names."""

    def keep(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        self.append(dict(bound.arguments))
        return self[-1]


SCHEMA = (
    "fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,Tensor? q_v = None,"
    "Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,Tensor? cu_seqlens_k_new = None,"
    "Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,int? max_seqlen_k = None,"
    "Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,Tensor? rotary_cos = None,"
    "Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,Tensor? k_descale = None,"
    "Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,int window_size_left = -1,"
    "int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,bool is_rotary_interleaved = False,"
    "Tensor? scheduler_metadata = None,int num_splits = 0,bool? pack_gqa = None,int sm_margin = 0,"
    "Tensor? sinks = None) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)


class FakeFA3:
    """`flash_attn_interface`, its operator and its scheduler; what it `raises_at` is not built in."""

    def __init__(self, operator: bool = True, sinks: bool = True, raises_at: str = "", wrong: bool = False) -> None:
        self.calls, self.schedules = Calls(), Calls()
        self.raises_at, self.wrong, self.operator = raises_at, wrong, operator
        self.module = types.ModuleType(FlashAttn3.module)
        self.module.get_scheduler_metadata = self.get_scheduler_metadata  # type: ignore[attr-defined]

        def flash_attn_with_kvcache(
            q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
            cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
            max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
            causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
            scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False, sinks=None,
        ):  # fmt: skip
            out, lse = self.run(
                q, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, seqused_k=cache_seqlens, page_table=page_table,
                max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, is_causal=causal, window=window_size,
                softcap=softcap, scheduler_metadata=scheduler_metadata, num_splits=num_splits, sinks=sinks,
            )  # fmt: skip
            return (out, lse) if return_softmax_lse else out

        if not sinks:
            full = inspect.signature(flash_attn_with_kvcache)
            kept = [p for name, p in full.parameters.items() if name != "sinks"]
            flash_attn_with_kvcache.__signature__ = full.replace(parameters=kept)  # type: ignore[attr-defined]
        self.schema = SCHEMA if sinks else SCHEMA.replace(",Tensor? sinks = None", "")
        self.module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]

    def get_scheduler_metadata(
        self, batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
        qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
        page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
        num_splits=0, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        self.schedules.append({k: v for k, v in locals().items() if k != "self"})
        lengths = cache_seqlens.tolist()
        return torch.tensor([len(self.schedules), *lengths, *lengths], dtype=torch.int32)

    def operate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> tuple[Any, ...]:
        arguments = torch.ops.flash_attn_3.fwd.default._schema.arguments[3:]
        given = {a.name: a.default_value for a in arguments}  # what equals its default is not passed on
        given.update(dict(zip(given, rest, strict=False)), **named)
        out = given["out"]
        result, lse = self.run(
            q, k, v, window=(given["window_size_left"], given["window_size_right"]), sinks=given.get("sinks"),
            **{n: given[n] for n in ("cu_seqlens_q", "seqused_k", "page_table", "max_seqlen_q", "softmax_scale",
                                     "is_causal", "softcap", "scheduler_metadata", "num_splits")},
        )  # fmt: skip
        out.copy_(result)
        return out, lse, torch.empty(0), torch.empty(0)

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append(given)
        features = {
            "paged KV": True,
            "tanh softcapping": given["softcap"] > 0,
            "splits": given["num_splits"] > 1,
            "local attention": given["window"][0] >= 0,
        }
        if features.get(self.raises_at):
            raise RuntimeError(f"This flash attention build does not support {self.raises_at}.")
        scheduler = given["scheduler_metadata"]
        if scheduler is not None:
            made = self.schedules[int(scheduler[0]) - 1]
            table = given["page_table"]
            assert made["num_splits"] == given["num_splits"], "a schedule for other splits writes out of bounds"
            assert made["max_seqlen_k"] == table.shape[1] * k.shape[1] and made["page_size"] == k.shape[1]
            assert tuple(made["window_size"]) == tuple(given["window"])
            assert made["has_softcap"] == (given["softcap"] > 0) and made["causal"] == given["is_causal"]
            assert (made["num_heads_q"], made["num_heads_kv"], made["headdim"]) == (q.shape[1], k.shape[2], q.shape[2])
            assert made["max_seqlen_q"] == given["max_seqlen_q"] and made["qkv_dtype"] == q.dtype
            assert made["batch_size"] == len(given["seqused_k"])
            assert made["cu_seqlens_q"].tolist() == given["cu_seqlens_q"].tolist()
        lens = given["seqused_k"]
        queries = given["cu_seqlens_q"].diff()
        assert int(queries.max()) <= given["max_seqlen_q"]
        return attend(
            q, k, v, given["cu_seqlens_q"], lens, given["page_table"], given["softmax_scale"], given["window"],
            given["is_causal"] and not self.wrong, given["softcap"], given["sinks"],
        )  # fmt: skip

    @contextlib.contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFA3]:
        monkeypatch.setitem(sys.modules, FlashAttn3.module, self.module)
        if not self.operator:
            yield self
            return
        with torch.library._scoped_library("flash_attn_3", "DEF") as library:
            library.define(self.schema)
            library.impl("fwd", self.operate, "CPU")
            yield self


class FakeFA4:
    """`flash_attn.cute`. Rows that see nothing get what lies in memory, as its kernels for sm_90 leave it."""

    def __init__(self, inner: bool = True) -> None:
        self.calls = Calls()
        self.modules = {name: types.ModuleType(name) for name in (FlashAttn4.module, f"{FlashAttn4.module}.interface")}

        def run(q, k, v, given):
            assert given["page_table"] is not None and given["cu_seqlens_k"] is None
            assert int(given["seqused_k"].max()) <= given["max_seqlen_k"], "an integer bound must cover the batch"
            assert int(given["cu_seqlens_q"].diff().max()) <= given["max_seqlen_q"]
            left, right = given["window"]
            return attend(
                q, k, v, given["cu_seqlens_q"], given["seqused_k"], given["page_table"], given["softmax_scale"],
                (-1 if left is None else left, -1 if right is None else right), given["causal"],
                given["softcap"] or 0.0, given["learnable_sink"], empty=7.0,
            )  # fmt: skip

        def flash_attn_varlen_func(
            q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
            min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
            softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
            pack_gqa=None, deterministic=False, return_lse=False,
        ):  # fmt: skip
            given = {**locals(), "window": window_size}
            self.calls.append(given)
            out, lse = run(q, k, v, given)
            return out, lse if return_lse else None

        def _flash_attn_fwd(
            q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
            max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
            window_size_left=None, window_size_right=None, learnable_sink=None, num_splits=1, pack_gqa=None,
            return_lse=False, out=None, lse=None,
        ):  # fmt: skip
            given = {**locals(), "window": (window_size_left, window_size_right)}
            self.calls.append(given)
            result, found = run(q, k, v, given)
            out.copy_(result)
            return out, found if return_lse else None, None, None, None

        outer, below = self.modules.values()
        outer.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
        if inner:
            below._flash_attn_fwd = _flash_attn_fwd  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFA4]:
        namespace(monkeypatch, *self.modules.values())
        yield self


class FakeVarlen:
    """torch's own FA2 behind the real signatures of the torch that is installed, with its traps."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.library = importlib.import_module(TorchVarlen.module)
        self.plain, self.into = self.library.varlen_attn, self.library.varlen_attn_out

    def run(self, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, bool]:
        q, k = given["query"], given["key"]
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert given["enable_gqa"] or q.shape[1] == k.shape[2]
        lens, starts_k = given["seqused_k"], given["cu_seq_k"]
        assert starts_k.tolist() == [0, *lens.cumsum(0).tolist()] and int(lens.max()) <= given["max_k"]
        assert int(given["cu_seq_q"].diff().max()) <= given["max_q"]
        window = given["window_size"]
        packed = given["max_q"] == 1 and q.shape[1] > k.shape[2] and window == (-1, -1)
        starts = given["cu_seq_q"]
        if packed:
            assert q.shape[0] == len(lens), "row i is taken for request i"
            starts = torch.arange(len(lens) + 1, dtype=torch.int32)
        scale, table = given["scale"], given["block_table"]
        out, lse = attend(
            q, k, given["value"], starts, lens, table, scale, window, window == (-1, 0), empty_lse=math.inf
        )
        return out, lse, packed

    def attn(self, *args: Any, **kwargs: Any) -> Any:
        given = self.calls.keep(self.plain, *args, **kwargs)
        out, lse, _ = self.run(given)
        return (out, lse) if given["return_aux"] is not None and given["return_aux"].lse else out

    def attn_out(self, *args: Any, **kwargs: Any) -> Any:
        given = self.calls.keep(self.into, *args, **kwargs)
        out, lse, packed = self.run(given)
        if not packed:  # packed, it writes into a copy of what it was given
            given["out"].copy_(out)
        return (given["out"], lse) if given["return_aux"] is not None and given["return_aux"].lse else given["out"]

    @contextlib.contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVarlen]:
        if "block_table" not in inspect.signature(self.plain).parameters:
            pytest.skip(f"torch {torch.__version__} has no paged varlen attention to take the signature of")
        for name, real, fake in (("varlen_attn", self.plain, self.attn), ("varlen_attn_out", self.into, self.attn_out)):

            def call(*args: Any, fake: Callable[..., Any] = fake, **kwargs: Any) -> Any:
                return fake(*args, **kwargs)

            call.__signature__ = inspect.signature(real)  # type: ignore[attr-defined]
            monkeypatch.setattr(self.library, name, call)
        yield self


class FakeFA2:
    """The package flash-attn 2.8: no `seqused_k`, no place for the result."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.module = types.ModuleType(FlashAttn2.module)

        def flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
            causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
            return_attn_probs=False, block_table=None,
        ):  # fmt: skip
            self.calls.append({k_: v_ for k_, v_ in locals().items() if k_ != "self"})
            assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
            lens, starts = cu_seqlens_k.diff(), cu_seqlens_q
            assert int(lens.max()) <= max_seqlen_k and int(starts.diff().max()) <= max_seqlen_q
            if max_seqlen_q == 1 and q.shape[1] > k.shape[2] and window_size == (-1, -1):
                assert q.shape[0] == len(lens), "row i is taken for request i"
                starts = torch.arange(len(lens) + 1, dtype=torch.int32)
            out, lse = attend(
                q, k, v, starts, lens, block_table, softmax_scale, window_size, causal, softcap, empty_lse=math.inf
            )
            return (out, lse, None) if return_attn_probs else out

        self.module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFA2]:
        namespace(monkeypatch, self.module)
        yield self


def namespace(monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
    """A package `flash_attn` that has these modules and no other."""
    package = types.ModuleType("flash_attn")
    package.__path__ = []  # a package, so that what it lacks is a ModuleNotFoundError
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)


ADAPTED: dict[str, tuple[type[Kernels], Callable[[], Any]]] = {
    "FA3 operator": (FlashAttn3, FakeFA3),
    "FA3 function": (FlashAttn3, lambda: FakeFA3(operator=False)),
    "FA4 inner": (FlashAttn4, FakeFA4),
    "FA4 public": (FlashAttn4, lambda: FakeFA4(inner=False)),
    "FA2 torch": (TorchVarlen, FakeVarlen),
    "FA2 package": (FlashAttn2, FakeFA2),
}
#: The GPU on which each version is asked for.
CAPABILITY = {2: (8, 0), 3: (9, 0), 4: (9, 0)}


@pytest.fixture(params=ADAPTED)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Kernels], Any]]:
    adapter, make = ADAPTED[request.param]
    with make().installed(monkeypatch) as fake:
        yield adapter, fake


def backend(monkeypatch: pytest.MonkeyPatch, adapter: type[Kernels], batch: PagedBatch, **changes: Any) -> Any:
    """The backend as it is on a GPU, over a faked library, on CPU tensors."""
    values: dict[str, Any] = {
        "num_heads": batch.query.shape[1],
        "num_kv_heads": batch.key_cache.shape[2],
        "head_size": batch.query.shape[2],
        "dtype": "bfloat16" if batch.query.dtype == torch.bfloat16 else "float16",
        "block_size": batch.key_cache.shape[1],
        "flash_attn_version": adapter.version,
        **changes,
    }
    lacks = tuple(adapter().lacks)
    found = (FlashAttnProvider(adapter.version, adapter.module, True, "", adapter.module, lacks),)
    monkeypatch.setattr(flash_attn, "find_providers", lambda: found)
    monkeypatch.setattr(flash_attn, "_platform", lambda *_: Platform("cuda", CAPABILITY[adapter.version]))
    return FlashAttentionBackend(AttentionSpec(**values), CPU)


def run(
    it: FlashAttentionBackend, batch: PagedBatch, pad: int = 0, want_lse: bool = False, **features: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad)
    query = torch.cat([batch.query, torch.full((pad, *batch.query.shape[1:]), math.nan, dtype=batch.query.dtype)])
    output, lse = torch.full_like(query, math.nan), torch.full(query.shape[:2], math.nan)
    it.prepare(metadata)
    it.forward(
        query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale,
        lse=lse if want_lse else None, **features,
    )  # fmt: skip
    return output[: batch.num_tokens], lse[: batch.num_tokens]


def sample(
    adapter: type[Kernels], query_lens: list[int], kv_lens: list[int], seed: int = 0, **shape: Any
) -> PagedBatch:
    wanted = {"num_heads": 6, "num_kv_heads": 2, "head_size": 16, "block_size": adapter.page_size, **shape}
    return random_batch(query_lens, kv_lens, dtype=torch.float16, seed=seed, **wanted)


# --- how each library is called ------------------------------------------------------------------------------------


def test_the_suites_cases_and_its_proof_of_the_tier(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs made in inference mode and prepared outside it are among what it tries."""
    adapter, _ = library
    backend(monkeypatch, adapter, sample(adapter, [1], [1]))  # from here on the adapter is what is found
    gpu = Platform("cuda", CAPABILITY[adapter.version])

    class OnGPU(FlashAttentionBackend):
        @classmethod
        def why_not(cls, spec: AttentionSpec, platform: Platform, available: Any = None) -> list[Any]:
            return super().why_not(spec, gpu, available)

        @classmethod
        def graph_support(cls, spec: AttentionSpec, platform: Platform, available: Any = None) -> Any:
            return super().graph_support(spec, gpu, available)

    contender = Contender(
        f"{adapter.__name__} over a stand-in", "FAKE", (("flash_attn_version", adapter.version),), backend=OnGPU
    )
    case = Case((6, 2, 16), "float16", adapter.page_size, window=7, fused=True)
    assert check_case(contender, case, CPU, PARITY).kind == "ran"
    assert prove_tier(contender, case, CPU, PARITY).kind == "ran"


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_equal_dense_attention(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    adapter, _ = library
    rng = random.Random(seed)
    queries = [rng.choice([1, 1, rng.randint(2, 40)]) for _ in range(rng.randint(1, 6))]
    batch = sample(adapter, queries, [n + rng.choice([0, rng.randint(0, 300)]) for n in queries], seed)
    it = backend(monkeypatch, adapter, batch)
    out, lse = run(it, batch, pad=rng.choice([0, 3]), want_lse=True)
    assert_attention_close(batch, out)
    assert torch.allclose(lse.double(), dense_attention(batch)[1], atol=1e-4)
    assert_attention_close(batch, run(it, batch)[0])


@pytest.mark.parametrize("lens", [([1] * 4, [1, 300, 17, 16]), ([1, 1], [15, 512])], ids=str)
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (7, 1)], ids=str)
def test_decodes_equal_dense_attention(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch, lens: tuple[list[int], list[int]],
    heads: tuple[int, int],
) -> None:  # fmt: skip
    adapter, fake = library
    batch = sample(adapter, *lens, num_heads=heads[0], num_kv_heads=heads[1])
    it = backend(monkeypatch, adapter, batch)
    for pad in (0, 2):
        out, lse = run(it, batch, pad, want_lse=True)
        assert_attention_close(batch, out)
        assert torch.allclose(lse.double(), dense_attention(batch)[1], atol=1e-4)
    assert len(fake.calls) == 2, "one call for the batch"
    if adapter is TorchVarlen and heads != (4, 4):
        masks = [call["window_size"] for call in fake.calls]
        assert masks == [(-1, -1)] * 2, "without a mask the heads of a group share a tile"


def test_c09_requests_without_tokens_are_skipped(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FA2 takes row i for request i when every request brings at most one token; with empty ones it must not."""
    adapter, fake = library
    batch = sample(adapter, [0, 1, 0, 1], [0, 3, 0, 5], num_heads=9, num_kv_heads=3)
    it = backend(monkeypatch, adapter, batch)
    assert_attention_close(batch, run(it, batch)[0])
    nothing = dataclasses.replace(batch, query=batch.query[:0], query_lens=[0], kv_lens=[0], tables=[[]])
    assert run(it, nothing)[0].shape == (0, 9, 16) and len(fake.calls) == 1


def test_c08_causal_masks_are_aligned_to_the_last_key(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, _ = library
    batch = sample(adapter, [2, 5, 3, 1], [5, 2, 0, 0])
    out, lse = run(backend(monkeypatch, adapter, batch), batch, want_lse=True)
    assert_attention_close(batch, out)
    blind = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert (out[blind] == 0).all() and torch.isneginf(lse[blind]).all() and torch.isfinite(lse[~blind]).all()
    top_left = torch.tril(torch.ones(2, 5)).bool()
    keys, values = (t.double().repeat_interleave(3, 1) for t in batch.keys(0))
    scores = torch.einsum("qhd,khd->hqk", batch.query[:2].double(), keys) * batch.scale
    wrong = torch.einsum("hqk,khd->qhd", scores.masked_fill(~top_left, -math.inf).softmax(-1), values)
    assert (out[:2].double() - wrong).abs().max() > 0.1, "that would be the first key"


def test_a_sink_makes_no_blind_row_see(library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in every backend: exactly 0, and a neutral LSE."""
    adapter, _ = library
    if "sinks" in adapter().lacks:
        return
    batch, sinks = sample(adapter, [5, 3], [2, 9]), torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 16.0])
    it = backend(monkeypatch, adapter, batch, has_sinks=True)
    out, lse = run(it, batch, want_lse=True, sinks=sinks)
    assert_attention_close(batch, out, sinks=sinks)
    assert (out[:3] == 0).all() and torch.isneginf(lse[:3]).all()
    torch.testing.assert_close(lse[3:].double(), dense_attention(batch, sinks=sinks)[1][3:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [1, 5, 16, 1000])
def test_a_window_keeps_that_many_keys(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    adapter, _ = library
    for lens in (([1, 1, 1], [1, 9, 300]), ([1, 7, 12], [30, 7, 25])):
        batch = sample(adapter, *lens)
        it = backend(monkeypatch, adapter, batch, sliding_window=window)
        assert_attention_close(batch, run(it, batch, sliding_window=window)[0], window=window)


@pytest.mark.parametrize(("feature", "field"), [("soft_cap", "logits_soft_cap"), ("sinks", "has_sinks")])
def test_c11_a_feature_is_applied_or_refused(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch, feature: str, field: str
) -> None:
    adapter, fake = library
    batch = sample(adapter, [1, 7, 3], [40, 7, 25])
    batch.query *= 12
    # Sinks that bfloat16 holds exactly: some libraries take no other type.
    value: Any = 30.0 if feature == "soft_cap" else torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0, 16.0])
    name = {"soft_cap": "logits_soft_cap", "sinks": "sinks"}[feature]
    changes = {field: value if feature == "soft_cap" else True}
    if name in adapter().lacks:
        with pytest.raises(BackendError, match="does not implement"):
            backend(monkeypatch, adapter, batch, **changes)
        assert not fake.calls
        return
    out = run(backend(monkeypatch, adapter, batch, **changes), batch, **{name: value})[0]
    assert_attention_close(batch, out, **{feature: value})
    with_it, without = dense_attention(batch, **{feature: value})[0], dense_attention(batch)[0]
    assert (out.double() - with_it).abs().max() < (out.double() - without).abs().max() / 10, f"{feature} was ignored"


@pytest.mark.parametrize("length", [15, 16, 17, 32, 255, 256, 257])
def test_c17_lengths_around_a_page_and_rows_behind_the_last(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    adapter, _ = library
    batch = sample(adapter, [1, length], [length, length], num_heads=2, num_kv_heads=1)
    assert_attention_close(batch, run(backend(monkeypatch, adapter, batch), batch, pad=5)[0])


def test_a_cache_of_layout_hnd_is_read_by_its_strides(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, _ = library
    batch = sample(adapter, [1, 9], [30, 40])
    batch.key_cache, batch.value_cache = (
        c.transpose(1, 2).contiguous().transpose(1, 2) for c in (batch.key_cache, batch.value_cache)
    )
    it = backend(monkeypatch, adapter, batch, kv_cache_layout="HND")
    assert_attention_close(batch, run(it, batch)[0])


def test_a_layer_with_another_window_gets_no_schedule_made_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeFA3().installed(monkeypatch) as fake:
        batch = sample(FlashAttn3, [1, 7], [30, 40])
        it = backend(monkeypatch, FlashAttn3, batch, sliding_window=5)
        assert_attention_close(batch, run(it, batch, sliding_window=5)[0], window=5)
        assert fake.calls[-1]["scheduler_metadata"] is not None
        assert_attention_close(batch, run(it, batch)[0])
        assert fake.calls[-1]["scheduler_metadata"] is None


def test_the_bare_call_is_the_librarys_own(library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, _ = library
    for lens in (([1, 1], [30, 40]), ([1, 9], [30, 40])):
        batch = sample(adapter, *lens)
        it, output = backend(monkeypatch, adapter, batch), torch.empty_like(batch.query)
        call = it.bare_call(
            batch.query, batch.key_cache, batch.value_cache, output, batch.metadata(), batch.scale
        )  # fmt: skip
        result = call()
        assert_attention_close(batch, result[0] if isinstance(result, tuple) else result)


# --- under a graph ---------------------------------------------------------------------------------------------------


def captured(batch: PagedBatch, longest: int, query_len: int, pad: int = 0) -> Any:
    metadata = batch.metadata(pad_reqs=pad, pad_tokens=pad, max_blocks=-(-longest // batch.key_cache.shape[1]))
    metadata.for_graph, metadata.max_seq_len, metadata.max_query_len = True, longest, query_len
    return metadata


def test_a_graph_finds_new_lengths_where_it_was_captured(
    library: tuple[type[Kernels], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `forward` recorded at capture is called again with the tensors of then, and must see the batch of now."""
    adapter, fake = library
    first = sample(adapter, [1, 1, 1], [5, 1, 3], spare_blocks=120, poison=False)
    it, metadata = backend(monkeypatch, adapter, first), captured(first, 2048, 1)
    it.prepare(metadata)
    baked = dataclasses.replace(metadata)
    for lens in ([2000, 1, 77], [1, 1, 1], [512, 300, 16]):
        pages = [-(-n // adapter.page_size) for n in lens]
        first.kv_lens = lens
        first.tables = [
            [1 + (r * 7 + i) % (first.key_cache.shape[0] - 1) for i in range(n)] for r, n in enumerate(pages)
        ]
        metadata.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        metadata.seq_lens_cpu[:] = lens
        for row, blocks in enumerate(first.tables):
            metadata.block_table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        it.prepare(dataclasses.replace(metadata, scratch={}))
        output = torch.full_like(first.query, math.nan)
        it.forward(first.query, first.key_cache, first.value_cache, output, baked, scale=first.scale)
        assert_attention_close(first, output, what=str(lens))
    if adapter is FlashAttn3:
        last = fake.calls[-1]["scheduler_metadata"]
        assert last.tolist() == [len(fake.schedules), 512, 300, 16, 512, 300, 16], "the whole schedule is this step's"


def test_fa3_pins_its_splits_under_a_graph_and_leaves_them_to_the_library_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeFA3().installed(monkeypatch) as fake:
        batch = sample(FlashAttn3, [1, 1], [30, 40])
        for asked, eager, graph in ((0, 0, MAX_SPLITS_UNDER_GRAPH), (5, 5, 5)):
            it = backend(monkeypatch, FlashAttn3, batch, num_splits=asked)
            for metadata, splits in ((batch.metadata(), eager), (captured(batch, 4096, 1), graph)):
                it.prepare(metadata)
                output = torch.empty_like(batch.query)
                it.forward(batch.query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale)
                assert fake.schedules[-1]["num_splits"] == fake.calls[-1]["num_splits"] == splits
                assert [p.num_splits for p in it.describe(metadata)] == [splits or 1] * (2 if splits > 1 else 1)


@pytest.mark.parametrize("name", ["FA3 operator", "FA2 torch", "FA2 package"])
def test_a_row_of_a_graph_without_keys_is_zero(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """There the host knows no lengths: what the libraries answer themselves must be right, up to the LSE's sign."""
    adapter, make = ADAPTED[name]
    with make().installed(monkeypatch):
        batch = sample(adapter, [1, 1], [0, 40])
        it, metadata = backend(monkeypatch, adapter, batch), captured(batch, 512, 1)
        output, lse = torch.empty_like(batch.query), torch.full(batch.query.shape[:2], math.nan)
        it.prepare(metadata)
        it.forward(batch.query, batch.key_cache, batch.value_cache, output, metadata, scale=batch.scale, lse=lse)
        assert (output[0] == 0).all() and torch.isneginf(lse[0]).all() and torch.isfinite(lse[1]).all()


def test_fa3_sees_no_longer_context_than_the_batch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the page table's width for the longest context when it chooses a number of splits."""
    with FakeFA3().installed(monkeypatch) as fake:
        batch = sample(FlashAttn3, [1, 1], [30, 40])
        it = backend(monkeypatch, FlashAttn3, batch)
        for metadata, keys in ((batch.metadata(max_blocks=256), 48), (captured(batch, 4096, 1), 4096)):
            it.prepare(metadata)
            assert fake.schedules[-1]["max_seqlen_k"] == keys


def test_fa3_keeps_one_schedule_per_captured_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uniform and a mixed graph may have the same numbers of requests and tokens, and both stay alive."""
    with FakeFA3().installed(monkeypatch):
        batch = sample(FlashAttn3, [1, 1], [30, 40])
        it, kept = backend(monkeypatch, FlashAttn3, batch), {}
        for _ in range(2):
            for query_len, pad in ((1, 0), (2, 0), (1, 2)):
                metadata = captured(batch, 4096, query_len, pad)
                it.prepare(metadata)
                schedule = metadata.scratch["flash_attn"].scheduler
                assert kept.setdefault((query_len, pad), schedule) is schedule
        assert len({t.data_ptr() for t in kept.values()}) == 3
        eager = batch.metadata()
        it.prepare(eager)
        assert all(eager.scratch["flash_attn"].scheduler is not t for t in kept.values())


def test_fa2_passes_the_splits_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeVarlen().installed(monkeypatch) as fake:
        batch = sample(TorchVarlen, [1, 5], [30, 40])
        for asked, passed in ((0, None), (1, 1), (4, 4)):
            run(backend(monkeypatch, TorchVarlen, batch, num_splits=asked), batch)
            assert fake.calls[-1]["num_splits"] == passed


def test_fa4_is_compiled_before_the_first_step_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int]] = []
    for layout in ("NHD", "HND"):
        with FakeFA4().installed(monkeypatch) as fake:
            batch = sample(FlashAttn4, [1], [3])
            it = backend(monkeypatch, FlashAttn4, batch, kv_cache_layout=layout, max_num_batched_tokens=40)
            it.warm_up(lambda stage, done, total, detail: said.append((done, total)))
            assert [call["max_seqlen_q"] for call in fake.calls] == [1, 40]
            it.warm_up(None)
    assert said == [(0, 2), (1, 2), (2, 2)] * 2


# --- which library counts --------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No library but torch; a "GPU" to probe on whose tensors are the CPU's. Findings are forgotten afterwards."""
    for name in [m for m in sys.modules if m.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        monkeypatch.delitem(sys.modules, name)
    block(monkeypatch, {name: ModuleNotFoundError(f"No module named '{name}'", name=name) for name in GONE})
    monkeypatch.setattr(providers, "_gpu", lambda: (CPU, (9, 0)))
    monkeypatch.setattr(flash_attn, "_platform", lambda *_: Platform("cuda", (9, 0)))
    providers.find_providers.cache_clear()
    yield
    providers.find_providers.cache_clear()


GONE = ("flash_attn_interface", "flash_attn")


def block(monkeypatch: pytest.MonkeyPatch, errors: dict[str, Exception]) -> None:
    """Importing these raises, unless a fake of them is in `sys.modules`."""
    original = importlib.import_module

    def broken(name: str, package: str | None = None) -> Any:
        if name not in sys.modules:
            for gone, error in errors.items():
                if name == gone or (name.startswith(f"{gone}.") and gone not in sys.modules):
                    raise error
        return original(name, package)

    monkeypatch.setattr(providers.importlib, "import_module", broken)


def found() -> dict[str, FlashAttnProvider]:
    return {p.module: p for p in providers.find_providers()}


@pytest.mark.usefixtures("bare")
def test_what_passes_the_probe_is_usable(library: tuple[type[Kernels], Any]) -> None:
    adapter, _ = library
    mine = found()[adapter.module]
    assert mine.usable and mine.reason == "" and mine.version == adapter.version
    assert set(mine.lacks) == set(adapter().lacks), "nothing that its signature promises is missing"
    available = FlashAttentionBackend.availability()
    assert available.usable and available.version == f"FA{mine.version}: {mine.provider}"
    assert len(available.providers) == len(ADAPTERS)


@pytest.mark.usefixtures("bare")
def test_importable_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without paged KV loads like any other and raises at its first paged call."""
    with FakeFA3(raises_at="paged KV").installed(monkeypatch):
        mine = found()[FlashAttn3.module]
    assert not mine.usable
    assert "RuntimeError: This flash attention build does not support paged KV." in mine.reason


@pytest.mark.usefixtures("bare")
def test_a_wrong_result_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeFA3(wrong=True).installed(monkeypatch):
        mine = found()[FlashAttn3.module]
    assert not mine.usable and "off by" in mine.reason


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("left_out", "lacks"),
    [
        ("tanh softcapping", ("logits_soft_cap",)),
        ("local attention", ("sliding_window",)),
        ("splits", ("num_splits",)),
    ],
)
def test_what_a_build_left_out_is_a_feature_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, left_out: str, lacks: tuple[str, ...]
) -> None:
    with FakeFA3(raises_at=left_out).installed(monkeypatch) as fake:
        mine = found()[FlashAttn3.module]
        assert mine.usable and mine.lacks == lacks
        if left_out == "splits":
            monkeypatch.setattr(flash_attn, "find_providers", lambda: (mine,))
            batch = sample(FlashAttn3, [1], [30])
            spec = AttentionSpec(6, 2, 16, "float16", 16)
            it, metadata = FlashAttentionBackend(spec, CPU), captured(batch, 4096, 1)
            it.prepare(metadata)
            it.forward(batch.query, batch.key_cache, batch.value_cache, batch.query * 0, metadata, scale=batch.scale)
            assert fake.calls[-1]["num_splits"] == fake.schedules[-1]["num_splits"] == 1


@pytest.mark.usefixtures("bare")
def test_sinks_are_a_feature_where_the_signature_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for operator in (True, False):
        with FakeFA3(operator=operator, sinks=False).installed(monkeypatch):
            providers.find_providers.cache_clear()
            mine = found()[FlashAttn3.module]
            assert mine.usable and mine.lacks == ("sinks",)


@pytest.mark.usefixtures("bare")
def test_one_name_in_a_namespace_proves_nothing_about_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn-4 brings a `flash_attn` with no FA2 in it, flash-attn one with no FA4."""
    with FakeFA4().installed(monkeypatch):
        seen = found()
        assert seen[FlashAttn4.module].usable and not seen[FlashAttn2.module].usable
        assert seen[FlashAttn2.module].reason.startswith("ModuleNotFoundError: No module named 'flash_attn.flash_attn")
    providers.find_providers.cache_clear()
    for name in [m for m in sys.modules if m.startswith("flash_attn.")]:
        monkeypatch.delitem(sys.modules, name)
    with FakeFA2().installed(monkeypatch):
        seen = found()
        assert seen[FlashAttn2.module].usable and not seen[FlashAttn4.module].usable
        assert seen[FlashAttn4.module].reason == "ModuleNotFoundError: No module named 'flash_attn.cute'"


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'flash_attn_interface'", name="flash_attn_interface"),
        ModuleNotFoundError("No module named 'einops'", name="einops"),
        ImportError("_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"),
        OSError("libcudart.so.13: cannot open shared object file"),
        RuntimeError("CUDA driver is too old"),
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[:20]}",
)
def test_c26_an_import_error_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    block(
        monkeypatch, {"flash_attn_interface": error, "flash_attn": ModuleNotFoundError("No module named 'flash_attn'")}
    )
    mine = found()[FlashAttn3.module]
    assert not mine.usable and mine.reason == f"{type(error).__name__}: {error}"
    spec, platform = ask("H200")
    available = dataclasses.replace(there(4), providers=tuple(providers.find_providers()) + there(4).providers[1:2])
    why = FlashAttentionBackend.graph_support(spec, platform, available)[1]
    assert why.startswith("FA4") and str(error) in why, "the fallback says what was wrong with the first"


@pytest.mark.usefixtures("bare")
def test_without_a_gpu_nothing_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "_gpu", lambda: None)
    with FakeFA3().installed(monkeypatch) as fake:
        mine = found()[FlashAttn3.module]
        assert not mine.usable and "no GPU to probe it on" in mine.reason and not fake.calls
    available = FlashAttentionBackend.availability()
    assert not available.usable and "no GPU to probe it on" in available.reason


@pytest.mark.usefixtures("bare")
def test_fa3_is_not_probed_where_it_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher does not raise there, it ends the process."""
    monkeypatch.setattr(providers, "_gpu", lambda: (CPU, (10, 0)))
    with FakeFA3().installed(monkeypatch) as fake:
        mine = found()[FlashAttn3.module]
    assert not mine.usable and "no kernels for sm_100" in mine.reason and not fake.calls


@pytest.mark.usefixtures("bare")
def test_a_torch_that_reads_no_pages_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has varlen_attn, over kernels without a page table."""
    monkeypatch.setattr(providers, "_arguments_of_torch_flash", lambda: {"query", "seqused_k"})
    mine = found()[TorchVarlen.module]
    assert not mine.usable and "its kernels take no block_table, num_splits, torch 2.13's do" in mine.reason


def test_torchs_own_kernels_are_found_by_the_arguments_they_have() -> None:
    real = providers._arguments_of_torch_flash()
    paged = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    assert ({"block_table", "seqused_k", "num_splits"} <= real) == paged


@pytest.mark.usefixtures("bare")
def test_a_probe_runs_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeFA3().installed(monkeypatch) as fake:
        FlashAttentionBackend.availability()
        calls = len(fake.calls)
        assert calls > 0
        FlashAttentionBackend.availability()
        assert len(fake.calls) == calls


# --- construction ----------------------------------------------------------------------------------------------------


def test_an_instance_that_cannot_serve_fails_at_once_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="needs an NVIDIA GPU"):
        FlashAttentionBackend(SPEC, CPU)
    with FakeFA3().installed(monkeypatch):
        batch = sample(FlashAttn3, [1], [3])
        with pytest.raises(BackendError, match="pages of 24 tokens"):
            backend(monkeypatch, FlashAttn3, batch, block_size=24)
        it = backend(monkeypatch, FlashAttn3, batch, flash_attn_version=None)
        assert it.version == 3 and it.provider.module == FlashAttn3.module
        (plan, merge) = it.describe(captured(batch, 64, 1))
        assert plan.kernel == "FlashAttnFwdSm90" and "FA3 of flash_attn_interface" in plan.note
        assert merge.kernel == "FlashAttnFwdCombine"
