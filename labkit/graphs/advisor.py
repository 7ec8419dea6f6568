"""How well a list of capture sizes suits some traffic, and the list of k sizes that suits it best. Pure.

Traffic is a histogram: how many steps had how many tokens. `Fit` says what counts, `advise` what is minimised.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.errors import ConfigError
from labkit.graphs.sizes import DEFAULT_CAP, pad_to

if TYPE_CHECKING:
    from labkit.engine.report import StepReport

#: Tokens of a step → number of such steps.
Traffic = Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a list of capture sizes serves a histogram.

    steps: all of them, `covered` of them with a graph; the others are above the largest size and run eagerly.
    real_tokens: what all steps asked for. padded_tokens: what was computed on top; an eager step is not padded.
    """

    sizes: tuple[int, ...]
    steps: int
    covered: int
    real_tokens: int
    padded_tokens: int

    @property
    def coverage(self) -> float:
        """Share of the steps that have a graph."""
        return self.covered / self.steps

    @property
    def waste(self) -> float:
        """Share of padding among all tokens that run, those of eager steps included.

        A list that covers less pads less, so two lists are compared at equal coverage only.
        """
        return self.padded_tokens / (self.real_tokens + self.padded_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            **dataclasses.asdict(self), "sizes": list(self.sizes), "coverage": self.coverage, "waste": self.waste,
        }  # fmt: skip


def fit(traffic: Traffic, sizes: Sequence[int]) -> Fit:
    """Count padding and coverage of `traffic` under `sizes` (ascending): the engine's own rule, `pad_to`.

    Raises:
        ConfigError: the histogram is empty or holds something that is no count.
    """
    counts = check_traffic(traffic)
    placed = [(n, count, pad_to(n, sizes)) for n, count in counts.items()]
    return Fit(
        tuple(sizes),
        sum(counts.values()),
        sum(count for _, count, size in placed if size is not None),
        sum(n * count for n, count in counts.items()),
        sum((size - n) * count for n, count, size in placed if size is not None),
    )


def advise(traffic: Traffic, k: int, max_size: int = DEFAULT_CAP) -> Fit:
    """At most k sizes with the least padding for `traffic`.

    Every step of up to `max_size` tokens must be covered, so the largest size is the largest such step: without that
    rule the best list would be one that serves nothing. Steps above it stay eager and show in `coverage`. Among the
    lists that cover so much, the padded tokens Σ count · (size − tokens) are minimal, and with them the waste. Fewer
    than k sizes come back only where each observed number of tokens has a size of its own and nothing is padded.

    Sizes are observed numbers of tokens: any other size could be lowered to the next observed one and pad less. Over
    these, n₁ < n₂ < …, the least padding with j sizes of which the last is n_b is the minimum over a < b of the least
    padding with j − 1 sizes up to n_a, plus what n_a₊₁ … n_b lose when they run as n_b. The best a never falls when b
    grows, so each half of the b's needs to look at one side of the middle one's a only: k · m · log m steps for m
    observed numbers, with whole numbers throughout.

    Raises:
        ConfigError: k is below 1, the histogram is no histogram, or all of it is above `max_size`.
    """
    if k < 1:
        raise ConfigError(f"advice on {k} sizes", "a list has at least one size", "Ask for 1 or more.")
    counts = check_traffic(traffic)
    tokens = sorted(n for n in counts if n <= max_size)
    if not tokens:
        raise ConfigError(
            "advice on capture sizes",
            f"every step of this traffic has more than {max_size} tokens, the largest size that may be captured",
            "Raise max_cudagraph_capture_size.",
        )
    steps = [0, *itertools.accumulate(counts[n] for n in tokens)]
    total = [0, *itertools.accumulate(n * counts[n] for n in tokens)]

    def padding(a: int, b: int) -> int:
        """Padded tokens when the observed numbers a … b − 1 run in a size of the last of them."""
        return tokens[b - 1] * (steps[b] - steps[a]) - (total[b] - total[a])

    # least[b]: with the sizes placed so far, for the first b observed numbers. cut[j][b]: where its last size begins.
    least: list[float] = [0, *[math.inf] * len(tokens)]
    cut: list[list[int]] = []
    for _ in range(min(k, len(tokens))):
        before, least, best = least, [math.inf] * (len(tokens) + 1), [0] * (len(tokens) + 1)
        pending = [(1, len(tokens), 0, len(tokens) - 1)]
        while pending:
            low, high, left, right = pending.pop()
            if low > high:
                continue
            b = (low + high) // 2
            least[b], best[b] = min((before[a] + padding(a, b), a) for a in range(left, min(b - 1, right) + 1))
            pending += [(low, b - 1, left, best[b]), (b + 1, high, best[b], right)]
        cut.append(best)
    sizes, b = [], len(tokens)
    for best in reversed(cut):
        sizes.append(tokens[b - 1])
        b = best[b]
    return fit(counts, sizes[::-1])


def powers_of_two(up_to: int) -> list[int]:
    """1, 2, 4, … until `up_to` is covered: what one would take without looking at the traffic."""
    return [1 << i for i in range((up_to - 1).bit_length() + 1)]


# --- traffic -------------------------------------------------------------------------------------------------------


def traffic_of(reports: Iterable[StepReport]) -> dict[int, int]:
    """The histogram of steps that ran; idle ones left out."""
    return dict(sorted(collections.Counter(r.num_tokens for r in reports if r.num_tokens).items()))


def read_traffic(text: str, name: str = "the traffic") -> dict[int, int]:
    """The histogram in a file's text: a JSON object `{"tokens": count}`, or one number of tokens per line.

    Raises:
        ConfigError: neither, or something in it is no count.
    """
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(name, f"is no JSON ({error})", 'Write an object such as {"1": 40, "8": 3}.') from None
        wrong = [key for key in data if not key.strip().isdecimal()]
        if wrong:
            raise ConfigError(name, f"has the key {wrong[0]!r}, which is no number of tokens", _FORM)
        found: collections.Counter[int] = collections.Counter()
        for key, count in data.items():
            if not _is_whole(count, 0):
                raise ConfigError(name, f"counts {count!r} steps of {key} tokens", _FORM)
            found[int(key)] += count
        return check_traffic(found, name)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if not line.isdecimal():
            raise ConfigError(name, f"has a line {line[:40]!r}, which is no number of tokens", _FORM)
    return check_traffic(collections.Counter(map(int, lines)), name)


_FORM = 'Write one number of tokens per line, or a JSON object {"tokens": steps}.'


def check_traffic(traffic: Traffic, name: str = "the traffic") -> dict[int, int]:
    """The histogram without empty counts, by tokens; ConfigError where it is none."""
    for n, count in traffic.items():
        if not _is_whole(n, 1) or not _is_whole(count, 0):
            raise ConfigError(name, f"counts {count!r} steps of {n!r} tokens", "Both are whole numbers, tokens ≥ 1.")
    counts = {n: traffic[n] for n in sorted(traffic) if traffic[n]}
    if not counts:
        raise ConfigError(name, "has no step in it", _FORM)
    return counts


def _is_whole(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _poisson(mean: float, steps: int) -> dict[int, int]:
    """About `steps` steps whose number of requests is Poisson, as it is where each is served as soon as it comes."""
    return {n: round(steps * math.exp(n * math.log(mean) - mean - math.lgamma(n + 1))) for n in range(1, int(4 * mean))}


def _sum(*parts: Traffic) -> dict[int, int]:
    found: collections.Counter[int] = collections.Counter()
    for part in parts:
        found.update(part)
    return {n: found[n] for n in sorted(found) if found[n]}


#: Synthetic histograms of about 10,000 steps each, computed and not recorded from any service.
#:
#: chat: decodes of requests that arrive at random at a steady rate and are never queued; the number of them at a time
#: is then Poisson, here with a mean of 24 (the M/G/∞ queue).
#: bursty: the same with two rates, quiet (mean 3) for 70 % of the steps and a burst (mean 90) for the rest.
#: mixed: chunked prompts under a budget of 256 tokens a step. Most steps are decodes alone (mean 16); a step with a
#: chunk is filled up to the budget, and the last chunk of a prompt has any length, so its step any number of tokens.
TRAFFIC: dict[str, dict[int, int]] = {
    "chat": _sum(_poisson(24, 10_000)),
    "bursty": _sum(_poisson(3, 7000), _poisson(90, 3000)),
    "mixed": _sum(_poisson(16, 7000), {256: 1320}, {n: 7 for n in range(16, 256)}),
}
