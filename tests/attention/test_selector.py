"""Selection as a pure question: which backend, why not the others, on GPUs that are not here."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.attention import registry
from labkit.attention.interface import AttentionSpec, Availability, Platform
from labkit.attention.selector import candidates, select
from labkit.config import ATTENTION_BACKENDS, EngineConfig, ModelConfig
from labkit.engine.plan import make_plan, resolve_dtype
from labkit.errors import BackendError, ConfigError, LabkitError

SPEC = AttentionSpec(32, 8, 128, "bfloat16", 16)
HALF = dataclasses.replace(SPEC, dtype="float16")
MISSING = Availability(False, "ModuleNotFoundError: No module named 'that'")
LOADS = {name: Availability(True) if name in ("TRITON_ATTN", "TORCH_SDPA") else MISSING for name in registry.BACKENDS}
MODEL = ModelConfig("m", 512, 64, 128, 2, 4, 2, 32, 4096)


@pytest.mark.parametrize(
    ("gpu", "spec", "picked"),
    [
        ("T4", HALF, "TORCH_SDPA"),
        ("A100", SPEC, "TRITON_ATTN"),
        ("H200", SPEC, "TRITON_ATTN"),
        ("B200", SPEC, "TRITON_ATTN"),
        ("RTX 5090", SPEC, "TRITON_ATTN"),
        ("cpu", dataclasses.replace(SPEC, dtype="float32"), "TORCH_SDPA"),
    ],
)
def test_what_each_gpu_picks_when_nothing_was_installed_for_attention(
    gpu: str, spec: AttentionSpec, picked: str
) -> None:
    selection = select(spec, registry.platform_for_gpu(gpu), None, LOADS)
    assert selection.selected == picked
    for candidate in selection.candidates:
        assert candidate.usable == (not candidate.reasons), candidate.name


def test_every_name_is_listed_and_has_a_place_in_the_order_or_is_for_an_explicit_choice_only() -> None:
    found = {c.name: c for c in candidates(SPEC, registry.platform_for_gpu("H200"), LOADS)}
    assert set(found) == set(registry.BACKENDS) == set(ATTENTION_BACKENDS)
    for name, candidate in found.items():
        capabilities = registry.load(name).capabilities
        assert capabilities.name == name
        assert (candidate.order is None) == capabilities.explicit_only
        assert candidate.usable == LOADS[name].usable and bool(candidate.reasons) != candidate.usable
    assert "XFORMERS" in [name for name, c in found.items() if c.order is None]


def test_whatever_is_installed_xformers_is_never_picked_by_itself() -> None:
    only = {name: Availability(True) if name == "XFORMERS" else MISSING for name in registry.BACKENDS}
    with pytest.raises(BackendError):
        select(SPEC, registry.platform_for_gpu("A100"), None, only)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (11, 0), (12, 1), (13, 0)])
def test_every_capability_has_an_answer(capability: tuple[int, int]) -> None:
    assert select(HALF, Platform("cuda", capability), None, LOADS).selected in ("TRITON_ATTN", "TORCH_SDPA")
    assert select(HALF, Platform("cuda", capability)).selected in registry.BACKENDS


def test_c19_turing_falls_back_and_an_explicit_choice_fails_at_once() -> None:
    """Being importable is not being able to run: sm_75 never gets FlashAttention, and is told why."""
    turing = registry.platform_for_gpu("T4")
    everything = {name: Availability(True) for name in registry.BACKENDS}
    selection = select(HALF, turing, None, everything)
    assert selection.selected == "TORCH_SDPA"
    assert not selection.candidate("FLASH_ATTN").usable and selection.candidate("FLASH_ATTN").reasons
    with pytest.raises(BackendError, match="FLASH_ATTN"):
        select(HALF, turing, "FLASH_ATTN", everything)


def test_c21_an_explicit_choice_is_never_replaced() -> None:
    odd = dataclasses.replace(SPEC, head_size=300)
    with pytest.raises(BackendError) as error:
        select(odd, registry.platform_for_gpu("H200"), "triton_attn", LOADS)
    assert error.value.what == "attention_backend='TRITON_ATTN'"
    assert "head size 300" in error.value.why and "TORCH_SDPA" in error.value.try_
    assert select(SPEC, registry.platform_for_gpu("H200"), "torch_sdpa").selected == "TORCH_SDPA"


@pytest.mark.parametrize(
    ("name", "hint"), [("TRITON_ATN", "TRITON_ATTN"), ("flashinfr", "FLASHINFER"), ("sdpa", "TORCH_SDPA")]
)
def test_c21_a_misspelt_name_is_answered_with_the_closest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        select(SPEC, Platform("cpu"), name)
    with pytest.raises(ConfigError, match=hint):
        EngineConfig(attention_backend=name)


def test_c21_names_are_taken_in_any_case_and_auto_means_no_choice() -> None:
    assert EngineConfig(attention_backend="triton_attn").attention_backend == "TRITON_ATTN"
    assert EngineConfig(attention_backend="AUTO").attention_backend == "auto"


def test_c22_float32_goes_to_backends_that_have_it() -> None:
    spec = dataclasses.replace(SPEC, dtype="float32")
    found = select(spec, registry.platform_for_gpu("H200")).candidates
    assert not {c.name for c in found if c.usable} & {"FLASH_ATTN", "FLASHINFER"}


def test_c22_auto_means_float16_on_turing_with_one_notice() -> None:
    turing = registry.platform_for_gpu("T4")
    dtype, notes = resolve_dtype("auto", turing)
    assert dtype == "float16" and len(notes) == 1 and "sm_75" in notes[0]
    plan = make_plan(EngineConfig(), MODEL, turing)
    assert plan.dtype == "float16" and plan.notes == tuple(notes)
    with pytest.raises(ConfigError, match="float16"):
        resolve_dtype("bfloat16", turing)
    assert resolve_dtype("auto", registry.platform_for_gpu("A100")) == ("bfloat16", [])
    assert resolve_dtype("auto", Platform("cpu")) == ("float32", [])


def test_c26_an_import_error_is_shown_as_it_is() -> None:
    broken = {**LOADS, "TRITON_ATTN": Availability(False, "OSError: libcuda.so.1: cannot open shared object file")}
    selection = select(SPEC, registry.platform_for_gpu("H200"), None, broken)
    assert selection.selected == "TORCH_SDPA"
    assert "OSError: libcuda.so.1: cannot open" in str(selection.candidate("TRITON_ATTN").reasons[0])


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("ModuleNotFoundError: No module named 'that'", "install it"),
        ("ImportError: undefined symbol: _ZN3c10", "mend its installation"),
        ("OSError: libcudart.so.12: cannot open shared object file", "mend its installation"),
        ("RuntimeError: built without paged KV", "mend its installation"),
    ],
)
def test_c26_only_what_is_missing_is_to_be_installed(reason: str, remedy: str) -> None:
    broken = {**LOADS, "TRITON_ATTN": Availability(False, reason)}
    first = select(SPEC, registry.platform_for_gpu("H200"), None, broken).candidate("TRITON_ATTN").reasons[0]
    assert first.condition == reason and first.remedy.startswith(remedy)


def test_when_nothing_can_serve_every_reason_is_named() -> None:
    nothing = {name: Availability(False, f"{name} is not here") for name in registry.BACKENDS}
    with pytest.raises(BackendError) as error:
        select(SPEC, registry.platform_for_gpu("H200"), None, nothing)
    assert "TORCH_SDPA is not here" in error.value.why and "TRITON_ATTN is not here" in error.value.why


def test_on_a_cpu_triton_is_never_automatic() -> None:
    spec = dataclasses.replace(SPEC, dtype="float32")
    selection = select(spec, Platform("cpu"), None, LOADS)
    assert selection.selected == "TORCH_SDPA" and selection.candidate("TRITON_ATTN").order is None


def test_an_amd_gpu_gets_the_portable_backends_and_is_told_that_it_was_never_tried() -> None:
    amd = registry.platform_for_gpu("MI300X")
    assert (amd.device_type, amd.capability) == ("rocm", None), "its numbers must not pass for sm_9x"
    selection = select(SPEC, amd)
    assert selection.selected == "TRITON_ATTN"
    assert [c.name for c in selection.candidates if c.order] == ["TRITON_ATTN", "TORCH_SDPA"]
    plan = make_plan(EngineConfig(), MODEL, amd)
    assert plan.dtype == "bfloat16" and plan.notes == (registry.NEVER_RUN,)


def test_an_unknown_gpu_is_answered() -> None:
    with pytest.raises(ConfigError, match="H200"):
        registry.platform_for_gpu("H20O")
    assert registry.platform_for_gpu("rtx5090").capability == (12, 0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"block_size": -1}, "block_size=-1"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens=1.5"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"dtype": "bf16"}, "dtype='bf16'"),
        ({"cudagraph_mode": "FULLL"}, "Did you mean 'FULL'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"max_model_len": 5000}, "5000"),
        ({"cudagraph_capture_sizes": [0, 4]}, "0 is not"),
        ({"max_cudagraph_capture_size": 9000}, "9000"),
        (
            {
                "cudagraph_mode": "FULL",
                "attention_backend": "TORCH_SDPA",
                "max_model_len": 4096,
                "sdpa_kernel": "flash",
            },
            "NEVER",
        ),
    ],
)
def test_bad_settings_are_refused_with_their_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(LabkitError, match=named.replace("'", ".")):
        make_plan(EngineConfig(**changes), MODEL, registry.platform_for_gpu("H200"), LOADS)  # type: ignore[arg-type]


def test_an_unknown_field_is_answered() -> None:
    with pytest.raises(ConfigError, match="attention_backend"):
        EngineConfig().replace(attention_backnd="TRITON_ATTN")


def test_the_plan_says_how_the_mode_came_about() -> None:
    hopper = registry.platform_for_gpu("H200")
    plan = make_plan(EngineConfig(), MODEL, hopper, LOADS)
    assert plan.mode.name == "FULL_AND_PIECEWISE" and plan.backend == "TRITON_ATTN"
    uncut = make_plan(EngineConfig(piecewise_method="compile"), MODEL, hopper, LOADS)
    assert uncut.mode.name == "FULL_DECODE_ONLY"
    assert "PIECEWISE needs a model compiled in pieces" in " ".join(uncut.mode_trail)
    assert make_plan(EngineConfig(cudagraph_mode="FULL"), MODEL, hopper, LOADS).mode.name == "FULL"
    sdpa = make_plan(
        EngineConfig(cudagraph_mode="FULL", attention_backend="TORCH_SDPA", max_model_len=512), MODEL, hopper, LOADS
    )
    assert sdpa.mode.name == "FULL_DECODE_ONLY"
    eager = make_plan(EngineConfig(cudagraph_mode="FULL", enforce_eager=True), MODEL, hopper, LOADS)
    assert eager.mode.name == "NONE" and eager.capture_sizes == ()


def test_a_library_that_nobody_chose_is_not_asked() -> None:
    """Asking may import it and compile a kernel for a probe; the list of all candidates asks when it is looked at."""
    asked: list[str] = []

    class Spy(dict[str, Availability]):
        def get(self, name: str, default: object = None) -> Availability:  # type: ignore[override]
            asked.append(name)
            return Availability(name in ("TRITON_ATTN", "TORCH_SDPA"), "" if name != "FLASH_ATTN" else "not here")

    spec, hopper = dataclasses.replace(SPEC, block_size=16), registry.platform_for_gpu("H200")
    explicit = select(spec, hopper, "TRITON_ATTN", Spy())
    assert (explicit.selected, asked) == ("TRITON_ATTN", ["TRITON_ATTN"])
    assert explicit.candidate("TRITON_ATTN").usable and asked == ["TRITON_ATTN"]
    asked.clear()
    automatic = select(spec, hopper, None, Spy())
    assert automatic.selected == "TRITON_ATTN" and asked == ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]
    assert {c.name for c in automatic.candidates} == set(registry.BACKENDS) <= set(asked)


def test_what_loads_is_asked_once_per_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def availability(name: str) -> Availability:
        asked.append(name)
        return Availability(True)

    monkeypatch.setattr(registry, "availability", availability)
    here = registry.Installed()
    assert list(here) == list(registry.BACKENDS) and asked == []
    assert here["FLASH_ATTN"] is here.get("FLASH_ATTN") and here.get("NO_SUCH") is None
    assert asked == ["FLASH_ATTN"]
