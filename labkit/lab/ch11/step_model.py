"""A decode step in numpy with eight parts, one of which is wrong: the switchboard without an engine.

A tiny transformer reads a prompt and then one token at a time, in float64, so that a right part agrees with the plain
way to its last digits. Each part has a plain way and a fast one; the fast one of the culprit has a bug that such
kernels have had. Refuses to be fast, and to have weights that mean anything.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from labkit.lab.ch11.parts import Part, culprit, switched_off
from labkit.lab.fields import Choice, Control, Number, Toggle
from labkit.lab.runs import Context, Outcome, simulated
from labkit.measure.provenance import Provenance

Array = npt.NDArray[np.float64]

PARTS: tuple[Part, ...] = (
    Part("norm", "norm, fused with the residual", "-cc.custom_ops"),
    Part("rotation", "rotation, fused with the cache write", "-cc.custom_ops"),
    Part("activation", "activation, fused with the product", "-cc.custom_ops"),
    Part("replay", "the graph's input buffers", "-cc.cudagraph_mode=NONE"),
    Part("merge", "attention: merge of the splits", "--attention-backend"),
    Part("prefix", "blocks from the prefix cache", "--no-enable-prefix-caching"),
    Part("kv", "keys and values in 8 bits", "--kv-cache-dtype auto"),
    Part("sampler", "log-probabilities of the sampler", "another sampler"),
)
FUSED, GRAPHS = ("norm", "rotation", "activation"), ("replay",)
#: What every switch takes out, by its value.
EFFECTS: dict[str, dict[Any, tuple[str, ...]]] = {
    "level": {"eager": FUSED + GRAPHS, "no graphs": GRAPHS, "no compiler": FUSED},
    "backend": {"TORCH_SDPA": ("merge",)},
    **{f"plain_{key}": {True: (key,)} for key in ("norm", "rotation", "activation", "prefix", "kv", "sampler")},
}
LEVELS = (
    ("as it is served", "served"), ("cudagraph_mode NONE", "no graphs"), ("compilation mode NONE", "no compiler"),
    ("--enforce-eager", "eager"),
)  # fmt: skip
CASES = 8
VOCAB, HIDDEN, HEADS, LAYERS, PROMPT, STEPS = 48, 32, 4, 2, 12, 10
SIZE = HIDDEN // HEADS
#: Differences up to this are rounding; every bug makes a larger one.
TOLERANCE = 1e-9


class ModelSwitches:
    """The switchboard over the step in numpy."""

    kind, label = "SIMULATED", "a step in numpy"

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        return [
            Number("case", "Case", 1, CASES, 1, help="Each case has another wrong part."),
            Choice("level", "Graphs and compiler", LEVELS, help="The compiler makes the fused kernels; eager has "
                                                                "neither them nor graphs."),
            Choice("backend", "Attention", [("FLASH_ATTN", "FLASH_ATTN"), ("TORCH_SDPA", "TORCH_SDPA")],
                   help="FLASH_ATTN splits the keys and merges; TORCH_SDPA attends in one go."),
            Toggle("plain_norm", "plain norm", help="custom_ops: the norm as separate operations."),
            Toggle("plain_rotation", "plain rotation", help="custom_ops: rotation and cache write apart."),
            Toggle("plain_activation", "plain activation", help="custom_ops: the activation by itself."),
            Toggle("plain_prefix", "no prefix caching", help="Every block is computed, none is found."),
            Toggle("plain_kv", "keys and values in full", help="No 8-bit cache."),
            Toggle("plain_sampler", "plain sampler", help="Log-probabilities as the definition says."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run computes ten steps twice, in the plain way and with these switches: at once."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        off = switched_off(values, EFFECTS)
        return [out_of_play(off, PARTS)]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        off, case = switched_off(values, EFFECTS), int(values["case"])
        wrong_part = culprit(PARTS, case)
        bug = "" if wrong_part in off else wrong_part
        plain, got = log_probabilities(case, ""), log_probabilities(case, bug)
        difference = [float(np.abs(a - b).max()) for a, b in zip(plain, got, strict=True)]
        made = simulated("step in numpy", case=case, layers=LAYERS, hidden=HIDDEN, prompt=PROMPT, steps=STEPS)
        return test_outcome(case, off, PARTS, difference, max(difference) > TOLERANCE, made,
                            "largest difference of a log-probability")  # fmt: skip


def out_of_play(off: Sequence[str], parts: Sequence[Part]) -> str:
    """Which parts a test takes out, as a sentence."""
    if not off:
        return "Nothing is turned: all parts are in play."
    names = [part.label for part in parts if part.key in off]
    return f"Out of play: {'; '.join(names)}."


def test_outcome(
    case: int,
    off: Sequence[str],
    parts: Sequence[Part],
    difference: Sequence[float],
    wrong: bool,
    made: Provenance,
    unit: str,
    notes: Sequence[str] = (),
) -> Outcome:
    """What one test hands to the panel, from either source."""
    names = [part.label for part in parts if part.key in off]
    turned = f"{len(names)} of {len(parts)} parts" if names else "nothing"
    if wrong:
        cleared = f"What was off is cleared: {'; '.join(names)}." if names else "All parts are suspects."
        summary = f"Case {case}, {turned} off: the answer is WRONG. {cleared}"
    else:
        among = f"The culprit is among what was off: {'; '.join(names)}."
        summary = f"Case {case}, {turned} off: the answer is RIGHT. {among}"
    values = {
        "case": case, "turned": turned, "wrong": wrong, "wrong_word": "✗ wrong" if wrong else "✓ right",
        "error": max(difference, default=0.0), "unit": unit,
    }  # fmt: skip
    data = {"off": list(off), "parts": [[p.key, p.label, p.switch] for p in parts], "difference": list(difference),
            "unit": unit}  # fmt: skip
    return Outcome(data, values, summary, made, None, tuple(notes))


# --- the step --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2 * CASES + 2)
def log_probabilities(case: int, bug: str) -> tuple[Array, ...]:
    """Of the whole vocabulary after each of STEPS decode steps, the same tokens read whatever the bug."""
    rng = np.random.default_rng(case)
    weights = _weights(rng)
    tokens = rng.integers(0, VOCAB, PROMPT + STEPS)
    cache = [([], []) for _ in range(LAYERS)]  # type: list[tuple[list[Array], list[Array]]]
    out = []
    for at, token in enumerate(tokens):
        # A graph reads its buffers; one that nobody copied into still holds the position of the step before.
        position = at - 1 if bug == "replay" and at >= PROMPT else at
        hidden = _step(weights, int(token), position, cache, bug)
        if at == PROMPT - 1 and bug == "prefix":
            # A block of four tokens that is found twice. (Blocks in another order would change nothing: attention is a
            # sum over keys that carry their positions in them.)
            for keys, values in cache:
                keys[0:4], values[0:4] = keys[4:8], values[4:8]
        if at >= PROMPT:
            out.append(_log_softmax(weights["embed"] @ hidden / np.sqrt(HIDDEN), bug))
    return tuple(out)


def _weights(rng: np.random.Generator) -> dict[str, Any]:
    def matrix(rows: int, columns: int) -> Array:
        return rng.normal(size=(rows, columns)) / np.sqrt(columns)

    layers = [
        {"qkv": matrix(3 * HIDDEN, HIDDEN), "o": matrix(HIDDEN, HIDDEN), "gate": matrix(2 * HIDDEN, HIDDEN),
         "up": matrix(2 * HIDDEN, HIDDEN), "down": matrix(HIDDEN, 2 * HIDDEN)} for _ in range(LAYERS)
    ]  # fmt: skip
    return {"embed": rng.normal(size=(VOCAB, HIDDEN)), "layers": layers}


def _step(weights: dict[str, Any], token: int, position: int, cache: Any, bug: str) -> Array:
    residual: Array = weights["embed"][token].copy()
    for layer, (keys, values) in zip(weights["layers"], cache, strict=True):
        q, k, v = np.split(layer["qkv"] @ _norm(residual, bug), 3)
        q = _rotate(q.reshape(HEADS, SIZE), position)
        # Fused with the write, the rotation of a key took the place of the next token.
        k = _rotate(k.reshape(HEADS, SIZE), position + (bug == "rotation"))
        v = v.reshape(HEADS, SIZE)
        if bug == "kv":  # 8 bits with the scale of the keys for the values
            v = np.round(v * 127 / np.abs(k).max()).clip(-127, 127) * np.abs(k).max() / 127
        keys.append(k)
        values.append(v)
        residual = residual + layer["o"] @ _attend(q, np.stack(keys, 1), np.stack(values, 1), bug).reshape(-1)
        x = _norm(residual, bug)
        gate, up = layer["gate"] @ x, layer["up"] @ x
        residual = residual + layer["down"] @ (_silu(gate, bug) * up)
    return _norm(residual, bug)


def _norm(x: Array, bug: str) -> Array:
    # One that divides by the padded width of its tile is off by a constant factor.
    width = len(x) + (8 if bug == "norm" else 0)
    scaled: Array = x / np.sqrt((x * x).sum() / width + 1e-6)
    return scaled


def _rotate(x: Array, position: int) -> Array:
    angles = position / 10_000 ** (np.arange(SIZE // 2) * 2 / SIZE)
    a, b = x[:, : SIZE // 2], x[:, SIZE // 2 :]
    return np.concatenate((a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)), axis=1)


def _attend(q: Array, keys: Array, values: Array, bug: str) -> Array:
    """One query per head over all keys, in two splits that are merged. keys, values: [heads, tokens, size]."""
    scores = np.einsum("hd,htd->ht", q, keys) / np.sqrt(SIZE)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    half = max(1, scores.shape[1] // 2)
    parts = [(weights[:, :half], values[:, :half]), (weights[:, half:], values[:, half:])]
    sums = [w.sum(axis=1, keepdims=True) for w, _ in parts]
    outs = [np.einsum("ht,htd->hd", w, v) for w, v in parts]
    if bug == "merge" and scores.shape[1] > 1:  # each part divided by its own sum, then their mean
        mean: Array = (outs[0] / sums[0] + outs[1] / sums[1]) / 2
        return mean
    merged: Array = (outs[0] + outs[1]) / (sums[0] + sums[1])
    return merged


def _silu(x: Array, bug: str) -> Array:
    slope = 1.702 if bug == "activation" else 1.0  # the constant belongs to another activation
    gated: Array = x / (1 + np.exp(-slope * x))
    return gated


def _log_softmax(logits: Array, bug: str) -> Array:
    # The vocabulary is padded to a multiple of 64; the padding must not count.
    padded = np.zeros(-len(logits) % 64) if bug == "sampler" else np.zeros(0)
    top = logits.max()
    out: Array = logits - top - np.log(np.exp(np.concatenate((logits, padded)) - top).sum())
    return out
