"""Hook points of what runs: reasons, splits and their merge, the cut at attention. Refuses to judge answers.

`install_x(ask)` binds the name under which the engine finds its own function; `own_x()` is a correct answer in the form
that is plugged in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from labkit.config import SPLITTING_OPS
from labkit.lab.hook import Ask, bound, whole

# --- attention -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def install_why_not(ask: Ask) -> Iterator[None]:
    from labkit.attention import interface

    own = interface.check_capabilities

    def asked(cap: Any, spec: Any, platform: Any, preferred_block_size: int | None = None) -> list[interface.Reason]:
        expected = own(cap, spec, platform, preferred_block_size)
        said = [str(reason) for reason in expected]

        def usable(reasons: Any) -> str:
            return "" if isinstance(reasons, list | tuple) else "reasons are a list of sentences, empty for none"

        def same(a: Any, b: Any) -> bool:  # words are the learner's own; whether the backend may serve is not
            return isinstance(b, list | tuple) and bool(a) == bool(b)

        answer = ask((cap, spec, platform), said, usable, same)
        if bool(answer) == bool(said):
            return expected
        return [interface.Reason(str(reason), "look at your why_not") for reason in answer]

    with bound(interface, "check_capabilities", asked):
        yield


def own_why_not() -> Callable[..., Any]:
    from labkit.attention.interface import check_capabilities

    return lambda capabilities, spec, platform: [str(r) for r in check_capabilities(capabilities, spec, platform)]


@contextlib.contextmanager
def install_choose_num_splits(ask: Ask) -> Iterator[None]:
    from labkit.attention import triton_attn
    from labkit.attention.kernels.tiles import MAX_SPLITS

    own = triton_attn.choose_num_splits

    def asked(
        programs: int, num_sms: int, max_seq_len: int, block_n: int, requested: int = 0, limit: int = MAX_SPLITS
    ) -> int:
        most = max(1, min(limit, MAX_SPLITS))

        def usable(splits: Any) -> str:
            fits = whole(splits) and 1 <= splits <= most
            return "" if fits else f"{splits!r} splits: there is room for partial results of 1 to {most}"

        args = (programs, num_sms, max_seq_len, block_n, requested, limit)
        return int(ask(args, own(*args), usable))

    def plan(self: Any, metadata: Any) -> Any:  # its own keeps what was chosen once, and would not ask again
        return self._make_plan(metadata.num_reqs, metadata.num_tokens, metadata.max_query_len, metadata.max_seq_len)

    with bound(triton_attn, "choose_num_splits", asked), bound(triton_attn.TritonAttentionBackend, "plan", plan):
        yield


def own_choose_num_splits() -> Callable[..., Any]:
    from labkit.attention.kernels.tiles import choose_num_splits

    return choose_num_splits


#: Parts that the keys of TORCH_SDPA are cut into while a merge is plugged in.
NUM_PARTS = 3


def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Two partial results of the same queries over different keys, as one. Numpy; the neutral element is (0, −inf).

    Args:
        out_a, out_b: `[..., head_size]`, attention over each part of the keys.
        lse_a, lse_b: `[...]`, natural log of the sum of exponentials of that part's scores; −inf where it has no key.
    """
    import numpy as np

    top = np.maximum(lse_a, lse_b)
    safe = np.where(np.isneginf(top), 0.0, top)
    a, b = np.exp(lse_a - safe), np.exp(lse_b - safe)
    total = a + b
    some = np.where(total > 0, total, 1.0)
    out = (out_a * a[..., None] + out_b * b[..., None]) / some[..., None]
    with np.errstate(divide="ignore"):
        return out, np.log(total) + safe


@contextlib.contextmanager
def install_merge(ask: Ask) -> Iterator[None]:
    import numpy as np
    import torch

    from labkit.attention.sdpa import TorchSDPABackend
    from labkit.lab.compare import close

    own = TorchSDPABackend._sdpa
    agrees = close(1e-4, 1e-5)

    def part(query: Any, keys: Any, values: Any, mask: Any, scale: float) -> tuple[Any, Any]:
        scores = (query.float() @ keys.float().transpose(-1, -2)) * scale
        scores = scores.masked_fill(~mask, -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
        return (weights @ values.float()).cpu().numpy(), lse.cpu().numpy()

    def asked(self: Any, query: Any, keys: Any, values: Any, mask: Any, scale: float) -> Any:
        if query.is_cuda and torch.cuda.is_current_stream_capturing():  # nothing may come to the host there
            return own(self, query, keys, values, mask, scale)
        bounds = np.linspace(0, keys.shape[-2], NUM_PARTS + 1).astype(int)
        spans = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a]
        mask = mask.expand(*query.shape[:-1], keys.shape[-2])
        parts = [part(query, keys[..., s, :], values[..., s, :], mask[..., s], scale) for s in spans]
        out, lse = parts[0]
        for other in parts[1:]:
            shapes = out.shape, lse.shape

            def usable(answer: Any, shapes: tuple[Any, Any] = shapes) -> str:
                if not isinstance(answer, list | tuple) or len(answer) != 2:
                    return "an answer is a pair: the merged output and its lse"
                if tuple(np.shape(a) for a in answer) != shapes:
                    return f"the shapes must be {list(shapes[0])} and {list(shapes[1])}"
                return "" if np.isfinite(np.asarray(answer[0], dtype=float)).all() else "the output must be finite"

            args = (out, lse, *other)
            out, lse = ask(args, merge_states(*args), usable, agrees)
            out, lse = np.asarray(out, dtype=np.float32), np.asarray(lse, dtype=np.float32)
        return torch.from_numpy(out).to(query.device, query.dtype)

    with bound(TorchSDPABackend, "_sdpa", asked):
        yield


# --- pieces ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def install_pieces(ask: Ask) -> Iterator[None]:
    from labkit.graphs import compile_cache, pieces

    own_split, own_split_module = pieces.split, pieces.split_module
    cut_at: list[Sequence[str]] = []

    def split(traced: Any, splitting_ops: Sequence[str] = SPLITTING_OPS) -> Any:
        cut_at.append(splitting_ops)
        try:
            return own_split(traced, splitting_ops)
        finally:
            cut_at.pop()

    def split_module(module: Any, root: Any, part_of: Callable[[Any], int], **options: Any) -> Any:
        nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output") and not _is_getitem(n)]
        ops, cuts = [pieces._op_name(n) for n in nodes], list(cut_at[-1])
        expected = _grouped(ops, [part_of(n) for n in nodes])

        def usable(groups: Any) -> str:
            if not isinstance(groups, list | tuple) or [op for group in groups for op in group] != ops:
                return "the pieces together must be all operators, in their order"
            joined = [group for group in groups if len(group) != 1 and any(op in cuts for op in group)]
            return "a splitting operator must be alone in its piece" if joined else ""

        groups = [list(group) for group in ask((ops, cuts), expected, usable) if group]
        numbers: dict[Any, int] = {}
        at = 0
        for extra, group in enumerate(groups):
            mine = nodes[at : at + len(group)]
            at += len(group)
            known = part_of(mine[0])
            # A second piece where the engine has one gets a number of its own.
            number = known if known not in numbers.values() else 1_000_000 + extra
            numbers.update(dict.fromkeys(mine, number))

        def part(node: Any) -> int:
            return numbers[node] if node in numbers else numbers.get(node.args[0], part_of(node))

        return own_split_module(module, root, part, **options)

    cache = compile_cache.CompileCache
    with (
        bound(pieces, "split", split),
        bound(pieces, "split_module", split_module),
        # A pass on disk would be used without cutting anything, and one cut otherwise must not get there.
        bound(cache, "load", lambda self, key: None),
        bound(cache, "save", lambda self, *args: False),
    ):
        yield


def _is_getitem(node: Any) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _grouped(ops: Sequence[str], numbers: Sequence[int]) -> list[list[str]]:
    out: list[list[str]] = []
    for i, op in enumerate(ops):
        if i and numbers[i] == numbers[i - 1]:
            out[-1].append(op)
        else:
            out.append([op])
    return out


def own_pieces() -> Callable[..., Any]:
    def pieces(ops: Sequence[str], splitting_ops: Sequence[str]) -> list[list[str]]:
        out: list[list[str]] = [[]]
        for op in ops:
            if op in splitting_ops:
                out += [[op], []]
            else:
                out[-1].append(op)
        return [piece for piece in out if piece]

    return pieces
