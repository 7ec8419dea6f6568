"""Attention as one opaque operator of torch: what torch.compile sees in place of it. Refuses to know backends.

`labkit::unified_attention_with_output(query, key, value, output!, layer)` writes K and V into the paged cache and
attends. The compiler knows only that it fills `output`; caches, metadata and backend come from the forward context at
call time, so nothing of one step is baked into compiled code. Registered through `torch.library.Library`: a custom_op
costs ten times as much per call.

`labkit::unified_mla_attention_with_output(query, latent, kv_b, output!, layer)` is the same for latent attention (MLA).
"""

from __future__ import annotations

import torch

from labkit.attention import op

NAME = "labkit::unified_attention_with_output"
MLA_NAME = "labkit::unified_mla_attention_with_output"

_library = torch.library.Library("labkit", "FRAGMENT")
_library.define(
    "unified_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor(a!) output, int layer) -> ()"
)
_library.define(
    "unified_mla_attention_with_output(Tensor query, Tensor latent, Tensor kv_b, Tensor(a!) output, int layer) -> ()"
)

# The dispatcher switches these off below it. A backend that compiles at its first call traces a mask with them.
_TRANSFORMS = (
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode,
    torch._C.DispatchKey.FuncTorchBatched,
)


def _transforms_on() -> torch._C._ForceDispatchKeyGuard:
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for transform in _TRANSFORMS:
        excluded = excluded.remove(transform)
    return torch._C._ForceDispatchKeyGuard(included, excluded)


def _run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer: int) -> None:
    with _transforms_on():
        op.attention(layer, query, key, value, output)


def _run_mla(query: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, output: torch.Tensor, layer: int) -> None:
    with _transforms_on():
        op.latent_attention(layer, query, latent, kv_b, output)


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer: int) -> None:
    return None


def _fake_mla(query: torch.Tensor, latent: torch.Tensor, kv_b: torch.Tensor, output: torch.Tensor, layer: int) -> None:
    return None


for _device in ("CPU", "CUDA"):
    _library.impl("unified_attention_with_output", _run, _device)
    _library.impl("unified_mla_attention_with_output", _run_mla, _device)
torch.library.register_fake(NAME, _fake, lib=_library)
torch.library.register_fake(MLA_NAME, _fake_mla, lib=_library)

unified_attention_with_output = torch.ops.labkit.unified_attention_with_output.default
unified_mla_attention_with_output = torch.ops.labkit.unified_mla_attention_with_output.default
