"""The attention backends by name, where each lives, and who is tried first. Pure; refuses to import one unasked."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from labkit.attention.interface import AttentionBackend, Availability, Platform
from labkit.errors import ConfigError, did_you_mean

#: name → "module:class", of backends for models with K and V of their own per KV head.
BACKENDS: dict[str, str] = {
    "FLASH_ATTN": "labkit.attention.flash_attn:FlashAttentionBackend",
    "FLASHINFER": "labkit.attention.flashinfer:FlashInferBackend",
    "TRITON_ATTN": "labkit.attention.triton_attn:TritonAttentionBackend",
    "FLEX_ATTENTION": "labkit.attention.flex:FlexAttentionBackend",
    "XFORMERS": "labkit.attention.xformers:XFormersBackend",
    "TORCH_SDPA": "labkit.attention.sdpa:TorchSDPABackend",
}

#: The same for models with multi-head latent attention. The two families share no backend.
MLA_BACKENDS: dict[str, str] = {
    "FLASH_ATTN_MLA": "labkit.attention.mla.flash_attn_mla:FlashAttentionMLABackend",
    "FLASHMLA": "labkit.attention.mla.flashmla:FlashMLABackend",
    "FLASHINFER_MLA": "labkit.attention.mla.flashinfer_mla:FlashInferMLABackend",
    "TRITON_MLA": "labkit.attention.mla.triton_mla:TritonMLABackend",
    "TORCH_SDPA_MLA": "labkit.attention.mla.sdpa:TorchSDPAMLABackend",
}

#: Cards a question may name without having them: compute capability, or None for one that is not NVIDIA's.
GPUS: dict[str, tuple[int, int] | None] = {
    "T4": (7, 5), "A100": (8, 0), "A10": (8, 6), "RTX 3090": (8, 6), "L4": (8, 9), "RTX 4090": (8, 9),
    "H100": (9, 0), "H200": (9, 0), "B200": (10, 0), "B300": (10, 3), "RTX 5090": (12, 0), "MI300X": None,
}  # fmt: skip
NEVER_RUN = "labkit was never run on an AMD GPU: this answer follows from the rules alone."


def names(family: str) -> tuple[str, ...]:
    """The backends of a family, "MHA" or "MLA"."""
    return tuple(MLA_BACKENDS if family == "MLA" else BACKENDS)


def known(name: str) -> bool:
    """Whether there is a backend of that name, in either family."""
    return name in BACKENDS or name in MLA_BACKENDS


def load(name: str) -> type[AttentionBackend]:
    """The backend's class. Importing it loads no kernel library; `availability()` does."""
    module, cls = (BACKENDS.get(name) or MLA_BACKENDS[name]).split(":")
    return getattr(importlib.import_module(module), cls)


def availability(name: str) -> Availability:
    """Whether the backend's provider loads in this process."""
    return load(name).availability()


class Installed(Mapping[str, Availability]):
    """Which backends load in this process: each is asked when somebody wants to know, and its answer kept.

    Importing a library takes seconds, and probing one may compile a kernel. It answers for every name and lists those
    of the MHA family, which most models have.
    """

    def __init__(self) -> None:
        self._known: dict[str, Availability] = {}

    def __getitem__(self, name: str) -> Availability:
        if name not in self._known:
            if not known(name):
                raise KeyError(name)
            self._known[name] = availability(name)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(BACKENDS)

    def __len__(self) -> int:
        return len(BACKENDS)


def platform_for_gpu(name: str) -> Platform:
    """The platform of a named card ("T4", "H200", …), or "cpu"."""
    if name.casefold() == "cpu":
        return Platform("cpu")
    folded = {k.casefold().replace(" ", ""): k for k in GPUS}
    key = folded.get(name.casefold().replace(" ", "").replace("-", "").replace("_", ""))
    if key is None:
        raise ConfigError(f"gpu={name!r}", "is not in the table of GPUs", did_you_mean(name, [*GPUS, "cpu"]))
    return Platform("cuda" if GPUS[key] else "rocm", GPUS[key], key)


def priority(platform: Platform, family: str = "MHA") -> list[str]:
    """The order in which automatic selection tries the backends of a family; for MLA see `mla_priority`.

    vLLM 0.33's: FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION, with the first two exchanged on sm_10x, the
    data-centre Blackwells, and on nothing else: sm_12x has other kernels, and unknown newer ones go the common way.
    TORCH_SDPA, which vLLM does not have, comes last. What else differs from vLLM:

    * sm_75 and older: TORCH_SDPA before TRITON_ATTN before FLEX_ATTENTION. Triton emits no tensor-core instruction for
      sm_75, and FLEX_ATTENTION is made of Triton too. FLASH_ATTN and FLASHINFER come first here as well and refuse: the
      one needs sm_80, the other is gated at sm_80 as in vLLM.
    * CPU: TORCH_SDPA only. TRITON_ATTN would run in Triton's interpreter, FLEX_ATTENTION would materialise all scores.
    * AMD: TRITON_ATTN, TORCH_SDPA, the two that are not written for CUDA. Never run.
    * XFORMERS is in no order: an explicit choice gets it.
    """
    if family == "MLA":
        return mla_priority(platform)
    if platform.device_type == "rocm":
        return ["TRITON_ATTN", "TORCH_SDPA"]
    if platform.device_type != "cuda":
        return ["TORCH_SDPA"]
    if platform.capability and platform.capability < (8, 0):
        return ["FLASH_ATTN", "FLASHINFER", "TORCH_SDPA", "TRITON_ATTN", "FLEX_ATTENTION"]
    first = ["FLASH_ATTN", "FLASHINFER"]
    if platform.capability and platform.capability[0] == 10:
        first.reverse()
    return [*first, "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"]


def mla_priority(platform: Platform) -> list[str]:
    """The order for models with multi-head latent attention: vLLM 0.33's, with TORCH_SDPA_MLA behind it.

    FLASH_ATTN_MLA, FLASHMLA, FLASHINFER_MLA, TRITON_MLA on sm_8x and sm_9x; FLASHINFER_MLA first on sm_10x; TRITON_MLA
    alone on sm_12x. On sm_75, where TRITON_MLA refuses, on a CPU and on AMD as for MHA.
    """
    if platform.device_type == "rocm":
        return ["TRITON_MLA", "TORCH_SDPA_MLA"]
    if platform.device_type != "cuda":
        return ["TORCH_SDPA_MLA"]
    major = platform.capability[0] if platform.capability else 0
    if platform.capability and platform.capability < (8, 0):
        return ["TORCH_SDPA_MLA", "TRITON_MLA"]
    if major >= 12:
        return ["TRITON_MLA", "TORCH_SDPA_MLA"]
    first = ["FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA"]
    if major == 10:
        first = ["FLASHINFER_MLA", "FLASH_ATTN_MLA", "FLASHMLA"]
    return [*first, "TRITON_MLA", "TORCH_SDPA_MLA"]


def platform_notes(platform: Platform) -> list[str]:
    """What a reader must know about every answer for this machine."""
    return [NEVER_RUN] if platform.device_type == "rocm" else []
