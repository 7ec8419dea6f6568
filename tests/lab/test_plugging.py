"""A learner's function in the engine: it is called, a right one changes nothing, a wrong one is caught or shows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from labkit import LLM, SamplingParams
from labkit.engine.report import StepReport
from labkit.errors import ConfigError
from labkit.graphs import compile_cache, pieces
from labkit.lab import plug
from labkit.lab.hook import START_UP
from labkit.lab.hook_points import HOOKS

PROMPTS = [list(range(3, 24)), [7, 7, 9, 1, 300], list(range(40, 51))]
SMALL = {
    "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 60,
    "block_size": 4, "attention_backend": "TORCH_SDPA",
}  # fmt: skip
Ran = tuple[list[tuple[int, ...]], list[StepReport]]


def ran(llm: LLM, prompts: list[list[int]] = PROMPTS, tokens: int = 8) -> Ran:
    """Token ids of every prompt, and the reports of all steps."""
    ids = [
        llm.add_request(list(p), SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)) for p in prompts
    ]
    found: dict[str, tuple[int, ...]] = {}
    reports = []
    while llm.has_unfinished:
        reports.append(llm.step())
        found |= {out.request_id: out.token_ids for out in reports[-1].outputs}
    return [found[i] for i in ids], reports


def look(reports: list[StepReport]) -> list[tuple[str, int]]:
    return [(r.mode, r.size) for r in reports]


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with LLM("tiny-llama", **SMALL, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(engine: LLM) -> Ran:
    return ran(engine)


# --- right answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in HOOKS if n not in ("block_hash", "choose_num_splits", "pieces")])
def test_a_right_function_is_called_and_changes_nothing(engine: LLM, plain: Ran, name: str) -> None:
    with plug(**{name: HOOKS[name].own()}, llm=engine) as plugged:
        ours = ran(engine)
    assert plugged.calls[name] > 0 and plugged.ok, plugged
    assert ours[0] == plain[0] and look(ours[1]) == look(plain[1])
    assert repr(plugged).endswith("all as the engine's own")
    assert look(ran(engine)[1]) == look(plain[1])


def test_the_engine_is_left_as_it_was(engine: LLM) -> None:
    """Every bound name is the engine's own again, after an error inside too."""
    from labkit.attention import interface, sdpa, triton_attn
    from labkit.engine import inputs, plan
    from labkit.graphs.dispatcher import GraphDispatcher
    from labkit.paging import block_hash

    def names() -> list[Any]:
        return [
            inputs.slot_mapping, plan.default_capture_sizes, GraphDispatcher.dispatch, block_hash.block_hash,
            interface.check_capabilities, sdpa.TorchSDPABackend._sdpa, triton_attn.choose_num_splits,
            triton_attn.TritonAttentionBackend.plan, pieces.split, pieces.split_module,
            compile_cache.CompileCache.load, compile_cache.CompileCache.save,
        ]  # fmt: skip

    before = names()
    with pytest.raises(RuntimeError, match="inside"), plug(**{n: h.own() for n, h in HOOKS.items()}):
        assert names() != before
        raise RuntimeError("inside")
    assert names() == before


# --- wrong answers ---------------------------------------------------------------------------------------------------


def one_on(block_ids, start, n, block_size):
    return [block_ids[p // block_size] * block_size + p % block_size + 1 for p in range(start, start + n)]


def next_size_always(num_tokens, sizes):
    return next((s for s in sizes if s > num_tokens), max(sizes))


def never_a_graph(num_tokens, is_uniform_decode, decode_graphs, mixed_graphs):
    return "NONE", num_tokens


def powers_of_two(max_num_seqs, max_num_batched_tokens, cap):
    return [2, 16]


def mean(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, lse_a


def refuse_all(capabilities, spec, platform):
    return [] if capabilities.name != "TORCH_SDPA" else ["pages of 4 tokens are not to my liking"]


WRONG: dict[str, Callable[..., Any]] = {
    "slot_mapping": one_on, "pad_to": next_size_always, "dispatch": never_a_graph,
    "default_capture_sizes": powers_of_two, "merge": mean,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_caught_and_undone(engine: LLM, plain: Ran, name: str) -> None:
    with plug(**{name: WRONG[name]}, llm=engine) as plugged:
        ours = ran(engine)
    socket = plugged.sockets[name]
    assert not plugged.ok and socket.undone and socket.different == 1 and socket.used == socket.calls - 1
    assert ours[0] == plain[0] and look(ours[1]) == look(plain[1])
    assert "undone at call" in repr(plugged) and socket.call.startswith(name)
    html = plugged._repr_html_()
    assert "yours" in html and "the engine" in html and "0x" not in html


@pytest.mark.parametrize("name", WRONG)
def test_a_trusted_wrong_function_shows_in_the_text_or_the_report(engine: LLM, plain: Ran, name: str) -> None:
    with plug(**{name: WRONG[name]}, trust=True, llm=engine) as plugged:
        ours = ran(engine)
    assert plugged.sockets[name].different and plugged.sockets[name].used, plugged.sockets[name].problem
    if name in ("slot_mapping", "merge"):
        assert ours[0] != plain[0]
    else:
        assert ours[0] == plain[0] and look(ours[1]) != look(plain[1])
    assert ran(engine)[0] == plain[0], "and nothing of it stays"


def test_block_hash_costs_hits_and_never_text():
    with LLM("tiny-llama", **SMALL, enforce_eager=True) as llm:
        first, _ = ran(llm, PROMPTS[:1])
        again, reports = ran(llm, PROMPTS[:1])
        hits = sum(r.num_cached_tokens for r in reports)
        assert hits == 20
        with plug(block_hash=HOOKS["block_hash"].own()) as right:
            ours, reports = ran(llm, PROMPTS[:1])
        assert right.ok and ours == first == again and sum(r.num_cached_tokens for r in reports) == hits
        with plug(block_hash=lambda parent, token_ids: bytes(token_ids)) as caught:
            ours, reports = ran(llm, PROMPTS[:1])
        assert caught.sockets["block_hash"].undone and sum(r.num_cached_tokens for r in reports) == hits
        with plug(block_hash=lambda parent, token_ids: bytes(len(token_ids)), trust=True) as trusted:
            ours, reports = ran(llm, PROMPTS[:1])
        assert ours == first and sum(r.num_cached_tokens for r in reports) < hits
        assert trusted.sockets["block_hash"].different > 1


def test_choose_num_splits_is_asked_by_triton_attn():
    """In Triton's interpreter on a CPU; the plan says how many splits were launched."""
    settings = {**SMALL, "attention_backend": "TRITON_ATTN", "block_size": 16, "num_splits": 3, "enforce_eager": True}
    prompt = [[t % 400 for t in range(34)]]
    with LLM("tiny-llama", **settings) as llm:
        plain, _ = ran(llm, prompt, 1)
        launched: list[int] = []
        backend = llm.engine.runner.backend
        make = backend._make_plan  # type: ignore[attr-defined]
        backend._make_plan = lambda *key: launched.append(make(*key).splits) or make(*key)  # type: ignore
        with plug(choose_num_splits=HOOKS["choose_num_splits"].own()) as right:
            ours, _ = ran(llm, prompt, 1)
        assert right.ok and right.calls["choose_num_splits"] > 0 and ours == plain and max(launched) > 1
        launched.clear()
        with plug(choose_num_splits=lambda programs, num_sms: 1) as caught:
            ours, _ = ran(llm, prompt, 1)
        assert caught.sockets["choose_num_splits"].undone and ours == plain and max(launched) > 1
        launched.clear()
        with plug(choose_num_splits=lambda programs, num_sms: 1, trust=True) as trusted:
            ran(llm, prompt, 1)
        assert trusted.sockets["choose_num_splits"].used and set(launched) == {1}


def test_a_wrong_why_not_changes_what_is_selected(engine: LLM, plain: Ran) -> None:
    engine.reconfigure(attention_backend="auto")
    try:
        with plug(why_not=refuse_all, llm=engine) as caught:
            assert ran(engine)[0] == plain[0]
        assert caught.sockets["why_not"].undone
        from labkit.errors import BackendError

        with pytest.raises(BackendError, match="not to my liking"), plug(why_not=refuse_all, llm=engine, trust=True):
            pass
        assert ran(engine)[0] == plain[0]
    finally:
        engine.reconfigure(attention_backend="TORCH_SDPA")


def test_pieces_cuts_what_is_compiled(tmp_path, monkeypatch):
    """The compiler itself is left out: torch's own graphs of the pieces run in its place."""
    monkeypatch.setattr(compile_cache, "default_folder", lambda: tmp_path)
    from labkit.engine import compiled as compiling
    from labkit.graphs.compiler import ClassReport, CompiledClass

    def uncompiled(cut, *args, **kwargs):
        made = [CompiledClass(piece) for piece in cut.representatives]
        return made, [ClassReport(*[0] * len(ClassReport.__dataclass_fields__)) for _ in made]

    monkeypatch.setattr(compiling.compiler, "compile_split", uncompiled)
    own = HOOKS["pieces"].own()

    def one_piece_less(ops, splitting_ops):
        out = own(ops, splitting_ops)
        return [out[0] + out[1], *out[2:]]

    def cut_in_two(ops, splitting_ops):
        out = own(ops, splitting_ops)
        return [out[0][:1], out[0][1:], *out[1:]]

    with LLM("tiny-llama", **SMALL, enforce_eager=True) as eager:
        expected, _ = ran(eager)
        for function, trust, state in (
            (own, False, "all as the engine's own"), (one_piece_less, False, "undone"),
            (one_piece_less, True, "but 1 that could not be"),
        ):  # fmt: skip
            with plug(pieces=function, trust=trust) as plugged:
                cut = compiling.split_model(eager.engine.model.decoder)
            assert plugged.calls["pieces"] == 1 and state in repr(plugged)
            assert (len(cut.program.pieces), cut.program.num_classes) == (3, 3)
    settings = {**SMALL, "compilation_mode": "VLLM_COMPILE", "cudagraph_mode": "NONE"}
    with plug(pieces=cut_in_two, trust=True) as plugged, LLM("tiny-llama", **settings) as llm:
        ours, _ = ran(llm)
        assert llm.compile_report is not None and llm.compile_report.pieces == 4, llm.notes
    assert plugged.calls["pieces"] == 1 and ours == expected
    assert list(tmp_path.iterdir()) == [], "nothing that was cut otherwise is kept"


# --- what an answer may do -------------------------------------------------------------------------------------------


def boom(*args):
    raise ValueError("not today")


def stub(block_ids, start, n, block_size):
    return ...


def empty(block_ids, start, n, block_size): ...


@pytest.mark.parametrize("function", [stub, empty, ...], ids=["ellipsis", "empty", "nothing"])
def test_a_stub_is_no_answer(engine: LLM, plain: Ran, function: Any) -> None:
    with plug(slot_mapping=function) as plugged:
        assert ran(engine)[0] == plain[0]
    assert repr(plugged) == "slot_mapping: NOT ATTEMPTED, the engine's own ran" and not plugged.ok


@pytest.mark.parametrize("trust", [False, True])
def test_an_error_is_a_card(engine: LLM, plain: Ran, trust: bool) -> None:
    with plug(slot_mapping=boom, trust=trust) as plugged:
        assert ran(engine)[0] == plain[0]
    assert repr(plugged) == "slot_mapping: undone at call 1, the engine's own ran from there"
    assert "ValueError: not today" in plugged._repr_html_()


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("slot_mapping", lambda b, s, n, size: [1.0] * n),
        ("slot_mapping", lambda b, s, n, size: [4]),
        ("slot_mapping", lambda b, s, n, size: None if n else []),
        ("pad_to", lambda n, sizes: 0),
        ("pad_to", lambda n, sizes: 1),
        ("pad_to", lambda n, sizes: None if n else 0),
        ("pad_to", lambda n, sizes: 10**6),
        ("dispatch", lambda n, decode, a, b: ("FULL", 1)),
        ("dispatch", lambda n, decode, a, b: "FULL"),
        ("dispatch", lambda n, decode, a, b: ("NONE", n + 1)),
        ("default_capture_sizes", lambda n, t, cap: []),
        ("default_capture_sizes", lambda n, t, cap: [t + 1]),
        ("merge", lambda a, b, c, d: (a, b, c)),
        ("merge", lambda a, b, c, d: (a[..., :1], b)),
        ("merge", lambda a, b, c, d: (a * float("nan"), b)),
    ],
)
def test_an_answer_that_the_engine_could_not_survive_is_never_used(
    engine: LLM, plain: Ran, name: str, answer: Any
) -> None:
    with plug(**{name: answer}, trust=True, llm=engine) as plugged:
        assert ran(engine)[0] == plain[0]
    socket = plugged.sockets[name]
    assert socket.unusable == socket.different > 0 and "cannot be used" in socket.problem, socket.line


@pytest.mark.parametrize("slot", [10**9, -2, -1])
def test_a_slot_outside_of_the_cache_is_written_by_nobody(engine: LLM, plain: Ran, slot: int) -> None:
    with plug(slot_mapping=lambda block_ids, start, n, block_size: [slot] * n, trust=True) as plugged:
        assert ran(engine)[0] != plain[0]
    assert plugged.sockets["slot_mapping"].used and ran(engine)[0] == plain[0]


def test_inputs_are_copies(engine: LLM, plain: Ran) -> None:
    def greedy(block_ids, start, n, block_size):
        out = HOOKS["slot_mapping"].own()(block_ids, start, n, block_size)
        block_ids.clear()
        return out

    with plug(slot_mapping=greedy) as plugged:
        assert ran(engine)[0] == plain[0]
    assert plugged.ok


def test_what_was_never_asked_says_when_it_would_be(engine: LLM) -> None:
    with plug(default_capture_sizes=powers_of_two) as plugged:
        ran(engine)
    assert repr(plugged) == "default_capture_sizes: not called"
    assert HOOKS["default_capture_sizes"].moment == START_UP and "reconfigure" in plugged._repr_html_()


def test_solutions_take_the_places_of_stubs(engine: LLM, monkeypatch) -> None:
    monkeypatch.setenv("LABKIT_SOLUTIONS", "1")
    with plug(slot_mapping=stub) as plugged:
        ran(engine)
    assert plugged.ok


def test_bad_names_are_sentences():
    with pytest.raises(ConfigError, match="Did you mean 'pad_to'"):
        plug(padto=copy.copy)
    with pytest.raises(ConfigError, match="no function was given"):
        plug()
    with pytest.raises(ConfigError, match="not a function"):
        plug(pad_to=3)
