"""What a kernel is for, read from its name: matrix product, attention, norm, … Refuses to know when it ran.

Names are those of labkit's Triton kernels, torch, cuBLAS and CUTLASS, FlashAttention, FlashInfer, xFormers and
Inductor. A name says nothing certain: what no rule knows is "other".
"""

from __future__ import annotations

import re

from labkit.measure.spans import ROLES

#: First match counts. FlashInfer and FlashAttention build on CUTLASS, so a library's name alone decides nothing.
_RULES = tuple(
    (re.compile(pattern, re.IGNORECASE), role)
    for pattern, role in (
        (r"^mem(cpy|set)(\d+_|\b)", "copy"),
        (r"rms_?norm|layer_?norm|rowwisemoments|::norm::", "norm"),
        (r"write_kv|rotary|rope|append_?paged|reshape_and_cache|::pos_enc", "rope_cache"),
        (r"log_?soft_?max|::sampling::|arg_?max|maxops|top_?k|radix|sort|multinomial|cumsum|scan_", "sampling"),
        (r"silu|gelu|swiglu|act_and_mul|::activation::", "activation"),
        (
            r"fmha|flash(?!infer)|sdpa|attention|merge_splits|gather_pages|merge_?states?|soft_?max|prepare_varlen|"
            r"batch(prefill|decode)|single(prefill|decode)|flex_",
            "attention",
        ),
        (r"moe_(gate_up|down|grouped)", "gemm"),  # of experts
        (r"gemm|gemv|nvjet|split_?k|cutlass|cublas|xmma|dot_kernel|(?<![a-z])(add|b)?mm(?![a-z])", "gemm"),
        (r"embedding|index_?select|vectorized_gather|gather_kernel", "embedding"),
        (r"copy|fillfunctor|fill_kernel|catarray", "copy"),
    )
)
#: Inductor puts the names of what it fused into the kernel's: `triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3`.
_INDUCTOR = re.compile(r"^(?:triton|cpp)_(?:(poi|red|per|for|tem|mm)_)?(?:fused_)?(\w*?)(?:_\d+)?$")
_FUSED = (
    (r"flex|attention", "attention"),
    (r"(?:^|_)(?:add|b|scaled_)?mm(?:_|$)", "gemm"),
    (r"rsqrt|rms_norm|layer_norm", "norm"),
    (r"silu|gelu|sigmoid", "activation"),
    (r"(?=.*mul)(?=.*sub)(?=.*(split|cat|slice|chunk))", "rope_cache"),
    (r"embedding", "embedding"),
    (r"argmax|(?:^|_)max(?:_|$)|sort|cumsum|exponential", "sampling"),
)
_MOVES = re.compile(r"^(?:_to_copy|copy_?|clone|cat|view|split|slice|fill|zeros?|full|expand|t|transpose|_)+$")


def role_of(name: str) -> str:
    """The role of a kernel, copy or fill of this name, one of ROLES. Never "graph", which is a call of the host.

    A fused kernel does several things; it has the role of the most telling one: a norm with a residual addition is a
    norm, a rotation with a norm before it as well.
    """
    fused = _INDUCTOR.match(name)
    if fused:
        return _fused_role(fused[2], fused[1] or "")
    for pattern, role in _RULES:
        if pattern.search(name):
            return role
    return "other"


def _fused_role(ops: str, form: str) -> str:
    for pattern, role in _FUSED:
        if re.search(pattern, ops):
            return role
    if form == "mm":
        return "gemm"
    return "copy" if ops and _MOVES.match(ops) else "other"


def short_name(name: str) -> str:
    """A kernel's name without template arguments, parameters and namespaces, for tables and hover texts.

    `void at::native::vectorized_elementwise_kernel<4, …>(int, …)` gives `vectorized_elementwise_kernel`.
    """
    if name.startswith(("Memcpy", "Memset")):
        return name
    text, depth = name.removeprefix("void ").replace("(anonymous namespace)::", ""), 0
    out: list[str] = []
    for letter in text:
        if letter == "(" and not depth and out:
            break
        depth += (letter in "<(") - (letter in ">)")
        if not depth and letter not in ">)":
            out.append(letter)
    return "".join(out).strip().split("::")[-1].strip() or name


__all__ = ["ROLES", "role_of", "short_name"]
