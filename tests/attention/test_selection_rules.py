"""Rules of selection, over every backend of the registry: precedence, tables, and that each remedy is one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import LLM, EngineConfig
from labkit.attention import registry
from labkit.attention.interface import AttentionCGSupport, AttentionSpec, Availability, Platform, Provider, Reason
from labkit.attention.kernels.tiles import choose_tile
from labkit.attention.sdpa import TorchSDPABackend
from labkit.attention.selector import select
from labkit.config import ATTENTION_BACKENDS, SDPA_KERNELS, ModelConfig
from labkit.engine.plan import make_plan, resolve_dtype
from labkit.errors import BackendError, ConfigError
from labkit.figures import palette
from labkit.llm import BACKEND_VARIABLE
from tests.parity import CONTENDERS

MODEL = ModelConfig("m", 512, 256, 512, 2, 4, 2, 64, 4096)
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
    with LLM("tiny-llama", attention_backend="auto", **SMALL) as llm:
        assert llm.selection.selected == "TORCH_SDPA", "nobody asks the variable then"
        with pytest.raises(ConfigError, match="TRITON_ATN"):
            llm.reconfigure(attention_backend=None)
        assert llm.generate("it still runs")[0].token_ids


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
    assert plan.backend != best.backend, "whose pages are multiples of 16"
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


# --- every backend's reasons ---------------------------------------------------------------------------------------

CAPABILITIES = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)]
SETTINGS = {f.name for f in dataclasses.fields(EngineConfig)}
PAGES = (1, 8, 16, 24, 32, 48, 64, 128, 256, 512, 768, 1024, 8192)

platforms = st.sampled_from(
    [*(Platform("cuda", capability) for capability in CAPABILITIES), Platform("rocm"), Platform("cpu")]
)
specs = st.builds(
    AttentionSpec,
    num_heads=st.sampled_from([4, 6, 9, 32]),
    num_kv_heads=st.sampled_from([1, 2, 3, 4, 8]),
    head_size=st.sampled_from([16, 32, 40, 64, 80, 96, 112, 128, 192, 256, 300, 512]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    block_size=st.sampled_from(PAGES),
    kv_cache_dtype=st.sampled_from(["auto", "auto", "fp8_e4m3"]),
    kv_cache_layout=st.sampled_from(["NHD", "HND"]),
    family=st.sampled_from(["MHA", "MHA", "MHA", "MLA"]),
    sliding_window=st.sampled_from([None, None, 1, 128]),
    logits_soft_cap=st.sampled_from([None, None, 30.0]),
    has_sinks=st.booleans(),
    max_model_len=st.sampled_from([128, 8192, 131_072]),
    max_num_seqs=st.sampled_from([1, 256, 1024]),
    max_num_batched_tokens=st.sampled_from([64, 8192]),
    sdpa_kernel=st.sampled_from(SDPA_KERNELS),
    num_splits=st.sampled_from([0, 0, 1, 4, 64, 200]),
    flash_attn_version=st.sampled_from([None, None, 2, 3, 4]),
    split_mixed_batches=st.booleans(),
    batch_invariant=st.booleans(),
)
providers = st.lists(
    st.builds(Provider, st.sampled_from([2, 3, 4]), st.just("some library 1.0"), st.booleans(), st.just("")), max_size=4
)
availabilities = st.none() | st.builds(
    Availability, st.booleans(), st.just(""), st.just("1.0"), providers.map(tuple)
).map(lambda a: a if a.usable else dataclasses.replace(a, reason="ImportError: undefined symbol: _Z1f"))


@pytest.mark.parametrize("name", registry.BACKENDS)
@given(spec=specs, platform=platforms, available=availabilities)
@settings(max_examples=300)
def test_setting_the_named_field_removes_exactly_that_reason(
    name: str, spec: AttentionSpec, platform: Platform, available: Availability | None
) -> None:
    backend = registry.load(name)

    def answers(spec: AttentionSpec) -> dict[int | None, list[Reason]]:
        """The backend's reasons under None, and those of each of its versions."""
        versions = {v.version: list(v.reasons) for v in backend.versions(spec, platform, available)}
        return {None: backend.why_not(spec, platform, available), **versions}

    for who, reasons in answers(spec).items():
        for i, reason in enumerate(reasons):
            assert reason.condition and not reason.condition.endswith("."), reason
            if reason.field is None:
                continue
            assert reason.field in SETTINGS, f"{reason.field} is no setting"
            EngineConfig(**{reason.field: reason.value})
            assert getattr(spec, reason.field) != reason.value, f"{reason} is what is set already"
            left, kept = answers(dataclasses.replace(spec, **{reason.field: reason.value}))[who], [*reasons]
            del kept[i]
            if who is not None and reason.field != "flash_attn_version":
                # A version outside the automatic order says so only when nothing else speaks against it.
                left = [r for r in left if r.field != "flash_attn_version"]
                kept = [r for r in kept if r.field != "flash_attn_version"]
            assert left == kept, f"{who}: after {reason.field}={reason.value!r}"


@pytest.mark.parametrize("name", registry.BACKENDS)
@given(spec=specs, platform=platforms, available=availabilities)
@settings(max_examples=200)
def test_a_backend_answers_every_question_and_asks_for_a_page_size_it_takes(
    name: str, spec: AttentionSpec, platform: Platform, available: Availability | None
) -> None:
    backend = registry.load(name)
    tier, why = backend.graph_support(spec, platform, available)
    assert isinstance(tier, AttentionCGSupport) and why
    for answer in backend.versions(spec, platform, available):
        assert answer.usable == (not answer.reasons), answer
    size = backend.preferred_block_size(spec, platform, available)
    left = backend.why_not(dataclasses.replace(spec, block_size=size), platform, available)
    assert not [r for r in left if r.field == "block_size"], f"it prefers {size} and refuses it"


# --- tables, drawn from the rules by hand --------------------------------------------------------------------------

#: Llama-3.1-8B's attention in the dtype that "auto" means there, everything installed: picked, usable in this order.
PICKS = {
    "T4": ("float16", ["TORCH_SDPA", "TRITON_ATTN", "FLEX_ATTENTION"]),
    "A100": ("bfloat16", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"]),
    "L4": ("bfloat16", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"]),
    "H100": ("bfloat16", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"]),
    "H200": ("bfloat16", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"]),
    "B200": ("bfloat16", ["FLASHINFER", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"]),
    "RTX5090": ("bfloat16", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"]),
    "MI300X": ("bfloat16", ["TRITON_ATTN", "TORCH_SDPA"]),
    "cpu": ("float32", ["TORCH_SDPA"]),
}


@pytest.mark.parametrize("gpu", PICKS)
def test_what_each_gpu_picks(gpu: str) -> None:
    platform = registry.platform_for_gpu(gpu)
    dtype, usable = PICKS[gpu]
    assert resolve_dtype("auto", platform)[0] == dtype
    spec = AttentionSpec(32, 8, 128, dtype, 16)
    selection = select(spec, platform, None, None, block_size_is_set=False)
    automatic = [c.name for c in selection.candidates if c.usable and c.order is not None]
    assert automatic == usable and selection.selected == usable[0]
    assert {c.name for c in selection.candidates} == set(registry.BACKENDS), "six rows everywhere"


def test_the_registry_has_the_names_that_the_config_takes() -> None:
    assert tuple(registry.BACKENDS) == ATTENTION_BACKENDS
    for name in registry.BACKENDS:
        assert registry.load(name).capabilities.name == name


def test_c20_sm_12x_is_not_sm_10x() -> None:
    """ "major >= 10" would send consumer Blackwell, and cards nobody has seen, to data-centre kernels."""
    for capability in CAPABILITIES:
        order = registry.priority(Platform("cuda", capability))
        assert (order[0] == "FLASHINFER") == (capability[0] == 10), capability
        assert set(order) == {n for n in registry.BACKENDS if not registry.load(n).capabilities.explicit_only}


@pytest.mark.parametrize("asked", [None, 2, 3, 4])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_c20_which_flash_attention_runs_where(capability: tuple[int, int], asked: int | None) -> None:
    runs_on = {
        2: {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)},
        3: {(9, 0)},
        4: {(9, 0), (10, 0), (10, 3), (11, 0)},
    }
    platform = Platform("cuda", capability)
    spec = AttentionSpec(32, 8, 128, "float16", 256, flash_attn_version=asked)
    backend = registry.load("FLASH_ATTN")
    usable = {answer.version for answer in backend.versions(spec, platform) if answer.usable}
    versions = {asked} if asked else {2, 3, 4}
    assert usable <= {v for v in versions if capability in runs_on[v]}
    assert bool(usable) == (not backend.why_not(spec, platform))
    assert select(spec, platform).selected, "whatever the card, something portable serves"


@pytest.mark.parametrize("name", registry.BACKENDS)
@pytest.mark.parametrize("gpu", ["H200", "T4", "cpu"])
def test_c22_what_takes_float32_and_what_is_told_about_bfloat16(name: str, gpu: str) -> None:
    platform, backend = registry.platform_for_gpu(gpu), registry.load(name)
    reasons = backend.why_not(AttentionSpec(32, 8, 128, "float32", 16), platform)
    if name in ("FLASH_ATTN", "FLASHINFER"):
        (dtype,) = [r for r in reasons if r.field == "dtype"]
        assert dtype.value == ("float16" if gpu == "T4" else "bfloat16"), dtype
    elif gpu == "H200" and name != "XFORMERS":
        assert not reasons


@pytest.mark.parametrize("name", registry.BACKENDS)
def test_c12_heads_that_do_not_divide_are_refused_by_all_and_once(name: str) -> None:
    spec, hopper = AttentionSpec(6, 4, 64, "bfloat16", 256), registry.platform_for_gpu("H200")
    assert [str(r) for r in registry.load(name).why_not(spec, hopper) if "no multiple of 4 KV heads" in str(r)] == [
        "6 query heads are no multiple of 4 KV heads; every KV head must serve the same number of query heads"
    ]


#: Page sizes each backend takes on an H200 with everything installed, of those in case C23.
TAKES = {
    "FLASH_ATTN": {16, 32, 48, 64, 256, 768},
    "FLASHINFER": {8, 16, 24, 32, 48, 64, 256, 768},
    "TRITON_ATTN": {16, 32, 48, 64, 256, 768},
    "FLEX_ATTENTION": {16, 32, 48, 64, 256, 768},
    "XFORMERS": {256, 768},
    "TORCH_SDPA": {1, 8, 16, 24, 32, 48, 64, 256, 768},
}


def test_every_backend_is_in_every_list() -> None:
    """What the recipe for a new backend names: the page sizes above, the parity suite, colours, dashes and markers."""
    names = set(registry.BACKENDS)
    assert set(TAKES) == names and {contender.name for contender in CONTENDERS} == names
    for table in (palette.BACKEND_COLOURS, palette.BACKEND_DASHES, palette.BACKEND_MARKERS):
        assert set(table) == names
    for name in names:
        versions = registry.load(name).versions(AttentionSpec(32, 8, 128, "bfloat16", 256), Platform("cuda", (9, 0)))
        played = {dict(c.options).get(f"{name.lower()}_version") for c in CONTENDERS if c.name == name}
        assert played >= {answer.version for answer in versions}, f"a version of {name} is in no test"


@pytest.mark.parametrize("name", TAKES)
def test_c23_a_page_size_is_refused_at_selection_or_kept(name: str) -> None:
    hopper, backend = registry.platform_for_gpu("H200"), registry.load(name)
    for size in (1, 8, 16, 24, 32, 48, 64, 256, 768):
        spec = AttentionSpec(32, 8, 128, "bfloat16", size)
        reasons = backend.why_not(spec, hopper)
        assert (not reasons) == (size in TAKES[name]), f"{name}, pages of {size}: {reasons}"
        assert all(r.field == "block_size" for r in reasons), "and nothing else is wrong"
        config = EngineConfig(block_size=size, attention_backend=name)
        if reasons:
            with pytest.raises(BackendError, match=f"pages of {size}.*block_size to {reasons[0].value}"):
                make_plan(config, MODEL, hopper)
        else:
            plan = make_plan(config, MODEL, hopper)
            assert plan.spec.block_size == plan.config.block_size == size


@pytest.mark.parametrize("size", [1, 24, 48])
def test_c23_pool_buffers_cache_and_kernel_agree_on_the_page_size(size: int) -> None:
    with LLM("tiny-llama", block_size=size, **SMALL) as llm:
        engine = llm.engine
        assert engine.pool.block_size == size == engine.kv.key_caches[0].shape[1]
        assert engine.inputs.block_size == size == engine.scheduler.limits.block_size
        assert llm.generate("some words to fill a page or two")[0].token_ids


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
def test_c24_what_a_t4_selects_fits_its_shared_memory(head_size: int, dtype: str) -> None:
    turing, itemsize = registry.platform_for_gpu("T4"), 2 if dtype == "float16" else 4
    spec = AttentionSpec(32, 8, head_size, dtype, 16)
    triton = select(spec, turing).candidate("TRITON_ATTN")
    tiles = [choose_tile(head_size, itemsize, rows, 65_536, (7, 5)) for rows in (1, 16, 64, 4096)]
    if triton.usable:
        for tile in tiles:
            assert tile is not None and tile.shared_bytes(head_size, itemsize, (7, 5)) <= 65_536
            assert tile.block_m >= 16 and tile.block_n >= 16
    else:
        assert any("head size" in str(r) for r in triton.reasons)
    assert select(spec, turing).selected == "TORCH_SDPA"
