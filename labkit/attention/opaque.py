"""Attention as one opaque operator of torch: what torch.compile sees in place of it. Refuses to know backends.

`labkit::unified_attention_with_output(query, key, value, output!, layer)` writes K and V into the paged cache and
attends. The compiler knows only that it fills `output`; caches, metadata and backend come from the forward context at
call time, so nothing of one step is baked into compiled code. Registered through `torch.library.Library`: a custom_op
costs ten times as much per call.
"""

from __future__ import annotations

import torch

from labkit.attention import op

NAME = "labkit::unified_attention_with_output"

_library = torch.library.Library("labkit", "FRAGMENT")
_library.define(
    "unified_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor(a!) output, int layer) -> ()"
)


# The dispatcher switches these off below it. A backend that compiles at its first call traces a mask with them.
_TRANSFORMS = (
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode,
    torch._C.DispatchKey.FuncTorchBatched,
)


def _run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer: int) -> None:
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for transform in _TRANSFORMS:
        excluded = excluded.remove(transform)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        op.attention(layer, query, key, value, output)


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer: int) -> None:
    return None


_library.impl("unified_attention_with_output", _run, "CPU")
_library.impl("unified_attention_with_output", _run, "CUDA")
torch.library.register_fake(NAME, _fake, lib=_library)

unified_attention_with_output = torch.ops.labkit.unified_attention_with_output.default
