"""Which token is chosen, how often, and what has no part in it. References are loops over plain Python numbers."""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from labkit.config import SamplingParams
from labkit.engine import sampler as module
from labkit.engine.sampler import Sampler, splitmix64, stream_key, uniform
from labkit.errors import LabkitError
from labkit.scheduling.request import Request

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
INF, NAN = math.inf, math.nan


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def request(output=(), arrival=0, eos=(), **params):
    """A request with that many output tokens, or with those."""
    output = [0] * output if isinstance(output, int) else list(output)
    params.setdefault("max_tokens", 1000)
    return Request("r", [1], SamplingParams(**params), eos, arrival, output)


def sample(logits, requests, device="cpu", seed=0):
    logits = torch.as_tensor(logits, device=device)
    logits = logits if logits.is_floating_point() else logits.float()
    before = logits.clone()
    out = Sampler(logits.shape[1], device, max(len(requests), 1), seed).sample(logits, requests)
    assert torch.equal(logits.nan_to_num(12345.0), before.nan_to_num(12345.0)), "the logits were written to"
    assert len(out.token_ids) == len(out.logprobs) == len(out.errors) == len(requests)
    return out


def tokens(logits, requests, device="cpu", seed=0):
    out = sample(logits, requests, device, seed)
    assert out.errors == [None] * len(requests)
    return out.token_ids


def reference_probabilities(row, temperature=1.0, top_k=0, top_p=1.0):
    """Loops over Python floats: softmax at a temperature, the k most likely, of those the fewest that reach p."""
    largest = max(row)
    weights = [math.exp((x - largest) / temperature) for x in row]
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    ranked = ranked[: top_k or len(row)]
    total, kept, mass = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        kept.append(i)
        mass += weights[i]
        if mass >= top_p * total:
            break
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(row))], kept


def chi_square_p_value(observed, expected):
    """Probability of counts at least this far from the expected ones, if these are right."""
    bins = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    statistic = sum((o - e) ** 2 / e for o, e in bins)
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_greedy_takes_the_largest_logit(device, dtype, num_rows):
    logits = torch.randn(num_rows, 301, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
    expected = [max(range(301), key=lambda i: (row[i], -i)) for row in logits.tolist()]
    assert tokens(logits, [request()] * num_rows, device) == expected


def test_of_equal_logits_greedy_takes_the_lowest_id(device):
    assert tokens([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]], [request()] * 2, device) == [1, 0]


class Operations(TorchFunctionMode):
    """Writes down every call of torch that starts a kernel or a copy."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ not in ("tolist", "__get__"):  # reading a host tensor, and attributes such as shape
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_an_all_greedy_step_is_one_kernel_and_one_copy(device):
    logits = torch.randn(5, 64, device=device)
    sampler, requests = Sampler(64, device, 8), [request(3, top_k=2, top_p=0.5, min_tokens=3)] * 5
    sampler.sample(logits, requests)
    with Operations() as seen:
        sampler.sample(logits, requests)
    assert seen.names == ["max"] + ["copy_"] * (device == "cuda")


def test_results_are_plain_values_that_the_next_step_leaves_alone():
    sampler = Sampler(4, "cpu", 2)
    first = sampler.sample(torch.tensor([[0.0, 1, 2, 3], [3.0, 2, 1, 0]]), [request()] * 2)
    sampler.sample(torch.tensor([[9.0, 1, 2, 3], [3.0, 2, 9, 0]]), [request()] * 2)
    assert first.token_ids == [3, 0] and all(type(t) is int for t in first.token_ids)


# --- distributions --------------------------------------------------------------------------------------------------

ROW = [0.5, -1.0, 2.0, 1.9, 0.5, -INF, 1.0, 0.0, -3.0, 0.5]
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_k": 5},  # the cut falls between equal logits
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 1.0, "top_p": 0.75},
    {"temperature": 2.0, "top_k": 6, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.99},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_frequencies_match_brute_force_probabilities(device, params):
    n = 3000
    probabilities, kept = reference_probabilities(ROW, **params)
    drawn = tokens([ROW] * n, [request(seed=seed, **params) for seed in range(n)], device)
    assert set(drawn) <= set(kept)
    observed = [drawn.count(i) for i in range(len(ROW))]
    assert len(kept) == 1 or chi_square_p_value(observed, [p * n for p in probabilities]) > 1e-3


def test_successive_draws_of_one_request_have_the_right_frequencies():
    n = 3000
    probabilities, _ = reference_probabilities(ROW)
    drawn = tokens([ROW] * n, [request([0] * i, temperature=1.0, seed=7) for i in range(n)])
    assert chi_square_p_value([drawn.count(i) for i in range(len(ROW))], [p * n for p in probabilities]) > 1e-3
    # Nor may a draw lean on the one before it: how often the same token comes twice in a row.
    twice, same = sum(a == b for a, b in itertools.pairwise(drawn)), sum(p * p for p in probabilities)
    assert chi_square_p_value([twice, n - 1 - twice], [same * (n - 1), (1 - same) * (n - 1)]) > 1e-3


@settings(deadline=None, max_examples=50)
@given(
    st.integers(2, 400),
    st.integers(0, 2**32),
    st.floats(0.05, 20),
    st.one_of(st.just(0), st.integers(1, 500)),
    st.one_of(st.just(1.0), st.floats(0, 1)),
)
def test_each_draw_inverts_the_cumulative_distribution_at_its_own_number(vocab, seed, temperature, top_k, top_p):
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    requests = [request(n, seed=seed, temperature=temperature, top_k=top_k, top_p=top_p) for n in (0, 1, 50)]
    for row, r, token in zip(logits.tolist(), requests, tokens(logits, requests), strict=True):
        probabilities, kept = reference_probabilities(row, temperature, top_k, top_p)
        truncated = 0 < top_k < vocab or top_p < 1
        order = kept if truncated else range(vocab)
        sums = list(itertools.accumulate(probabilities[i] for i in order))
        number = uniform(stream_key(seed, 0, 0), len(r.output_token_ids))
        near = {order[min(bisect.bisect(sums, number + d), len(sums) - 1)] for d in (-1e-5, 0, 1e-5)}
        # fp32 may end the set that reaches p one token sooner or later than these loops.
        edge = {sorted(range(vocab), key=lambda i: (-row[i], i))[len(kept) % vocab]}
        assert token in near | (edge if top_p < 1 else set())


EVEN = [0.0] * 8


@pytest.mark.parametrize(
    ("row", "params", "expected"),
    [
        ([0.0, 3.0, 1.0], {"top_k": 1}, {1}),
        ([0.0, 3.0, 1.0], {"top_p": 0.0}, {1}),
        ([0.0, 3.0, 1.0], {"top_k": 2}, {1, 2}),
        ([0.0, 3.0, 1.0], {"top_k": 3}, {0, 1, 2}),
        ([0.0, 3.0, 1.0], {"top_k": 99}, {0, 1, 2}),
        ([0.0, 3.0, 1.0], {"top_p": 1.0}, {0, 1, 2}),
        ([0.0, 3.0, 1.0], {"temperature": 1e-60}, {1}),
        ([0.0, 3.0, 1.0], {"temperature": 1e-8}, {1}),
        ([0.0, 3.0, 1.0], {"temperature": 1e300}, {0, 1, 2}),
        ([0.0, 3.0, -INF], {"temperature": 1e300}, {0, 1}),
        ([0.0, 3e38, -3e38], {}, {1}),
        ([-1e30, -1e30, -3e38], {}, {0, 1}),
        ([-INF, -5.0, -INF], {}, {1}),
        ([-INF, -5.0, -INF], {"top_k": 2, "top_p": 0.9}, {1}),
        (EVEN, {}, set(range(8))),
        (EVEN, {"temperature": 1e-60}, set(range(8))),
        (EVEN, {"top_k": 1}, {0}),
        (EVEN, {"top_k": 3}, {0, 1, 2}),
        (EVEN, {"top_p": 0.0}, {0}),
        (EVEN, {"top_p": 0.5}, {0, 1, 2, 3}),
        (EVEN, {"top_p": 0.51}, {0, 1, 2, 3, 4}),
        (EVEN, {"top_k": 4, "top_p": 0.5}, {0, 1}),
    ],
    ids=str,
)
def test_c52_edges_of_the_parameters(device, row, params, expected):
    params = {"temperature": 1.0, **params}
    assert set(tokens([row] * 300, [request(seed=s, **params) for s in range(300)], device)) == expected


@pytest.mark.parametrize(
    ("number", "row", "expected"),
    [(k / 8, EVEN, k) for k in range(8)]
    + [(math.nextafter(k / 8, 0), EVEN, k - 1) for k in range(1, 9)]
    + [(0.0, [-INF, 1.0, 1.0], 1), (math.nextafter(1, 0), [1.0, 1.0, -INF], 1)],
    ids=str,
)
@pytest.mark.parametrize("truncate", [False, True])
def test_numbers_at_the_edges_between_tokens(monkeypatch, device, number, row, expected, truncate):
    monkeypatch.setattr(module, "uniform", lambda key, n: number)
    params = {"top_k": len(row) - (row is not EVEN), "top_p": 1 - 1e-9} if truncate else {}
    assert tokens([row], [request(temperature=1.0, **params)], device) == [expected]


def test_half_precision_logits_are_drawn_from_in_fp32():
    logits = (torch.randn(1, 500, generator=torch.Generator().manual_seed(0)) * 5).bfloat16().expand(2000, 500)
    requests = [request(seed=s, temperature=4.0) for s in range(2000)]
    assert tokens(logits, requests) == tokens(logits.float(), requests)


def test_top_k_above_the_vocabulary_and_top_p_one_change_no_draw():
    plain, idle = (
        [request(seed=s, temperature=1.0, **p) for s in range(50)] for p in ({}, {"top_k": 10, "top_p": 1.0})
    )
    assert tokens([ROW] * 50, plain) == tokens([ROW] * 50, idle)


# --- what has no part in a draw -------------------------------------------------------------------------------------

KINDS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_k": 7},
    {"temperature": 2.0, "top_p": 0.6},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.7},
    {"temperature": 1.0, "logprobs": 2},
    {"logprobs": 1},
    {"temperature": 1.0, "min_tokens": 5},
    {"min_tokens": 5, "top_k": 1},
]


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12),
    st.randoms(),
)
def test_c31_batch_mates_and_places_in_the_batch_have_no_part_in_a_draw(specs, random):
    logits = torch.randn(len(specs), 97, generator=torch.Generator().manual_seed(len(specs)))
    requests = [request(n, eos=(3, 5), seed=seed, **kind) for kind, n, seed in specs]
    alone = [sample(logits[i : i + 1], [r]) for i, r in enumerate(requests)]
    order = list(range(len(specs)))
    random.shuffle(order)
    together = sample(logits[order], [requests[i] for i in order])
    assert together.token_ids == [alone[i].token_ids[0] for i in order]
    for place, i in enumerate(order):
        one, many = alone[i].logprobs[0], together.logprobs[place]
        assert (one is None) == (many is None)
        if one and many:
            assert many.token_id == one.token_id and many.logprob == pytest.approx(one.logprob, abs=1e-6)


def test_passes_over_the_rows_have_no_part_in_a_draw(monkeypatch):
    logits = torch.randn(13, 50, generator=torch.Generator().manual_seed(0))
    requests = [request(i, seed=i, **KINDS[i % len(KINDS)]) for i in range(13)]
    whole = sample(logits, requests)
    for limit in (1, 100, 149):
        monkeypatch.setattr(module, "_LOGITS_PER_PASS", limit)
        assert sample(logits, requests) == whole


@pytest.mark.parametrize("kind", [*KINDS, {"temperature": 9.0, "top_k": 40}, {"logprobs": 40}], ids=str)
def test_selecting_the_best_tokens_equals_sorting_the_row(monkeypatch, kind):
    # Many equal values, both zeros and −inf among them, in both directions across the cut.
    values = torch.randint(-3, 3, (20, 90), generator=torch.Generator().manual_seed(0)).float()
    values[:, ::7], values[:, 1::7], values[:, 2::7] = -0.0, -INF, 2.0
    requests = [request(i, seed=i, **kind) for i in range(20)]
    selected = sample(values, requests)
    monkeypatch.setattr(module, "_MOST_SELECTED", 0)
    assert sample(values, requests) == selected


def model(known):
    """Logits that depend on every known token."""
    return torch.randn(1, 60, generator=torch.Generator().manual_seed(hash(tuple(known)) % 2**40))


def generate(prompt, num_tokens, interrupt=lambda r: None, **params):
    """Sample token by token; before each, `interrupt(request)` may do what it likes, and may return a new request."""
    r, sampler = request(**params), Sampler(60, "cpu", 4)
    for _ in range(num_tokens):
        r = interrupt(r) or r
        r.append_token(sampler.sample(model([*prompt, *r.output_token_ids]), [r]).token_ids[0])
    return r.output_token_ids


def test_c48_preemption_neither_repeats_nor_skips_draws():
    params = {"temperature": 1.0, "seed": 0}
    calm = generate([1, 2], 30, **params)
    assert len(set(calm)) > 10

    def recompute(r):  # everything but the tokens is thrown away and built again
        return request(list(r.output_token_ids), **params) if len(r.output_token_ids) % 3 == 2 else None

    assert generate([1, 2], 30, recompute, **params) == calm


def test_c47_a_sample_that_is_thrown_away_does_not_advance_the_draws():
    params = {"temperature": 1.0, "seed": 0}
    calm = generate([1, 2], 30, **params)
    spare = Sampler(60, "cpu", 4)
    assert generate([1, 2], 30, lambda r: spare.sample(model([9]), [r]) and None, **params) == calm


def test_c31_torchs_random_state_is_neither_read_nor_written():
    requests = [request(seed=s, temperature=1.0, top_k=5) for s in range(4)]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = tokens([ROW] * 4, requests)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert tokens([ROW] * 4, requests) == first


def texts(seed, arrival=0, engine_seed=0, n=40):
    return tuple(
        tokens([[0.0] * 50] * n, [request(i, arrival, temperature=1.0, seed=seed) for i in range(n)], seed=engine_seed)
    )


def test_c31_a_seed_fixes_the_draws_in_any_engine_and_another_seed_changes_them():
    assert texts(5) == texts(5, arrival=3, engine_seed=9)
    assert len({texts(s) for s in (0, 1, 2, 5, -1, 2**63)}) == 6


def test_without_a_seed_draws_follow_from_the_engines_seed_and_the_arrival():
    assert texts(None, 4, 7) == texts(None, 4, 7)
    assert len({texts(None, a, e) for a in range(4) for e in range(4)} | {texts(s) for s in range(8)}) == 24


def test_the_generator_is_splitmix64():
    # First outputs of the published generator for the seed 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567 + (n + 1) * 0x9E3779B97F4A7C15) for n in range(4)] == expected
    assert [uniform(1234567, n) for n in range(4)] == [(x >> 11) / 2**53 for x in expected]


# --- mixed and broken rows ------------------------------------------------------------------------------------------


def test_c52_greedy_rows_beside_drawing_rows():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    requests = [request(), request(temperature=1.0, seed=1), request(), request(temperature=1.0, seed=2, top_p=0.9)]
    together = tokens(logits, requests)
    assert together == [tokens(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)]
    assert [together[0], together[2]] == [logits[0].argmax(), logits[2].argmax()]


GOOD = [0.0, 3.0, 1.0, 2.0]
BROKEN = [
    ("NaN", [0.0, NAN, 1.0, 2.0]),
    ("NaN", [NAN] * 4),
    ("NaN", [INF, NAN, -INF, 2.0]),
    ("+inf", [0.0, INF, 1.0, 2.0]),
    ("−inf", [-INF] * 4),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("word", "row"), BROKEN, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_c52_a_broken_row_is_an_error_of_its_own_request(device, dtype, word, row, kind):
    others = [request(seed=1, **k) for k in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "logprobs": 1})]
    for good in (others[:1], others):  # all greedy, and everything
        alone = sample(torch.tensor([GOOD] * len(good), dtype=dtype), good, device)
        logits = torch.tensor([GOOD, row, *[GOOD] * (len(good) - 1)], dtype=dtype)
        out = sample(logits, [good[0], request(seed=2, **kind), *good[1:]], device)
        assert word in out.errors[1]
        assert out.token_ids[1] is None and out.logprobs[1] is None
        for before, after in zip(
            (alone.token_ids, alone.logprobs, alone.errors), (out.token_ids, out.logprobs, out.errors), strict=True
        ):
            assert after[:1] + after[2:] == before


def test_wrong_shapes_are_refused_with_a_sentence():
    sampler = Sampler(4, "cpu", 2)
    for shape, n in (((2, 4), 1), ((1, 5), 1), ((3, 4), 3)):
        with pytest.raises(LabkitError, match="one row of 4 per request and at most 2 rows"):
            sampler.sample(torch.zeros(shape), [request()] * n)


def test_a_step_in_which_nothing_samples():
    sampler, nothing = Sampler(4, "cpu", 2), torch.zeros(0, 4)
    with Operations() as seen:
        assert sampler.sample(nothing, []).token_ids == []
    assert seen.names == []


# --- min_tokens -----------------------------------------------------------------------------------------------------

PREFERS_ENDING = [0.0, 50.0, 1.0, 40.0, 45.0, -1.0]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(
    ("n", "expected"), [(0, 2), (2, 2), (3, 1), (4, 1)], ids=["first", "last forbidden", "first allowed", "later"]
)
def test_c50_min_tokens_forbids_every_eos_and_stop_id(device, n, expected, ignore_eos):
    common = {"eos": (1, 4), "stop_token_ids": (3, 999, -1), "min_tokens": 3, "ignore_eos": ignore_eos}
    assert tokens([PREFERS_ENDING], [request(n, **common)], device) == [expected]
    drawing = [request(n, temperature=0.01, seed=s, **common) for s in range(20)]
    assert tokens([PREFERS_ENDING] * 20, drawing, device) == [expected] * 20


def test_c50_min_tokens_of_one_request_leaves_the_others_alone():
    requests = [request(eos=(1,)), request(eos=(1,), min_tokens=1), request(eos=(1,))]
    assert tokens([PREFERS_ENDING] * 3, requests) == [1, 4, 1]


def test_min_tokens_passes_over_stop_ids_outside_the_vocabulary():
    # Counted from the end, or on from the end of a row, they would be tokens of somebody.
    requests = [request(), request(min_tokens=1, stop_token_ids=(-1, -2, 6, 7, 99)), request()]
    rows = [[0.0] * 5 + [9.0], [0.0, 0.0, 9.0, 0.0, 0.0, 0.0], [9.0, 8.0] + [0.0] * 4]
    assert tokens(rows, requests) == [5, 2, 0]
    assert tokens(rows[:1], [request(min_tokens=1, stop_token_ids=(-1,))]) == [5]


def test_min_tokens_that_leaves_nothing_is_an_error():
    out = sample([[-INF, 1.0, -INF], [0.0, 1.0, 2.0]], [request(eos=(1,), min_tokens=1), request()])
    assert out.token_ids == [None, 2] and "min_tokens" in out.errors[0]


# --- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 3.0, "seed": 5}, {"temperature": 0.5, "top_k": 2, "seed": 1}, {"min_tokens": 9}],
    ids=str,
)
@pytest.mark.parametrize("n", [0, 1, 5, 100])
def test_logprobs_are_those_of_the_unmodified_model(device, dtype, params, n):
    logits = (torch.randn(3, 37, generator=torch.Generator().manual_seed(n)) * 3).to(dtype)
    most_likely = logits[1].argmax().item()
    requests = [request(), request(eos=(most_likely,), logprobs=n, **params), request(logprobs=2)]
    out = sample(logits, requests, device)
    exact = torch.log_softmax(logits[1].double(), 0).tolist()
    entry = out.logprobs[1]
    assert out.logprobs[0] is None and len(out.logprobs[2].top) == 2
    assert entry.token_id == out.token_ids[1]
    assert entry.logprob == pytest.approx(exact[entry.token_id], abs=1e-5)
    ranked = sorted(range(37), key=lambda i: (-exact[i], i))[:n]
    assert [i for i, _ in entry.top] == ranked
    assert [v for _, v in entry.top] == pytest.approx([exact[i] for i in ranked], abs=1e-5)
    if "min_tokens" in params:
        assert entry.token_id != most_likely


def test_of_equal_logits_the_greedy_token_heads_the_list(device):
    entry = sample([[0.0] * 300], [request(logprobs=3)], device).logprobs[0]
    assert entry.token_id == 0 and [i for i, _ in entry.top] == [0, 1, 2]
    assert entry.logprob == pytest.approx(-math.log(300))


def test_an_impossible_token_is_no_alternative():
    entry = sample([[-INF, 1.0, 1.0, -INF]], [request(logprobs=4)]).logprobs[0]
    assert entry.top == ((1, pytest.approx(-math.log(2))), (2, pytest.approx(-math.log(2))))
