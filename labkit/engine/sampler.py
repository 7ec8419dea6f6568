"""Chooses the next token of every request that samples in a step, from one row of logits each.

Refuses to know the model, the scheduler and what ends a request. It runs outside every graph and touches no random
state of torch: a draw is a pure function of a seed and a position.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from labkit.engine.report import TokenLogprob
from labkit.errors import LabkitError
from labkit.scheduling.stops import ending_token_ids

if TYPE_CHECKING:
    from labkit.scheduling.request import Request

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
#: Probabilities relative to the most likely token are counted in units of 2⁻⁴⁰. See `Sampler`.
_UNITS = float(1 << 40)
#: Rows that draw are worked on in passes of at most this many logits, so that temporaries stay below 300 MB.
_LOGITS_PER_PASS = 1 << 23
#: Up to so many best tokens are selected; for more, the whole row is sorted.
_MOST_SELECTED = 1024


def splitmix64(state: int) -> int:
    """64 well-mixed bits from a 64-bit counter (the output function of SplitMix64; Steele, Lea and Flood, 2014)."""
    z = state & _MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return z ^ (z >> 31)


@functools.lru_cache(maxsize=4096)
def stream_key(seed: int | None, engine_seed: int, arrival_index: int) -> int:
    """Which stream of random numbers a request reads, as 64 bits.

    A request with a seed (taken modulo 2⁶⁴) reads the stream of that seed, in any engine. One without reads a stream
    that follows from the engine's seed and the request's place in the order of arrival: the same program run again
    gives the same text, and two requests of one run differ.
    """
    if seed is not None:
        return splitmix64(seed + _GOLDEN)
    return splitmix64(splitmix64(splitmix64(engine_seed) ^ _GOLDEN) + (arrival_index + 1) * _GOLDEN)


def uniform(key: int, n: int) -> float:
    """Number `n` of a stream, in [0, 1), a multiple of 2⁻⁵³. Reading it changes nothing: ask twice, get it twice."""
    return (splitmix64(key + (n + 1) * _GOLDEN) >> 11) * 2.0**-53


@dataclasses.dataclass(frozen=True)
class SampledTokens:
    """What one step sampled, one entry per row. Plain values, never views of buffers.

    A row that cannot be sampled has no token and a sentence in `errors`; the other rows are not touched by it.
    """

    token_ids: list[int | None]
    logprobs: list[TokenLogprob | None]
    errors: list[str | None]


class Sampler:
    """Greedy, temperature, top-k and top-p sampling with one random stream per request.

    **Order.** `min_tokens` forbids every id that could end the request (all end-of-sequence ids and `stop_token_ids`);
    temperature; top-k, exactly k tokens, of equal logits the lower ids; top-p over what top-k left, the smallest set
    of most likely tokens that reaches p, never empty. Temperature 0 is the largest logit, of equal ones the lowest id,
    and nothing else: such a row is never divided, and top-k and top-p cannot change it.

    **Draws.** Token n of a request is picked by `uniform(stream_key(...), n)` and its own row of logits. Batch-mates,
    chunks of the prefill, preemption and padding have no part in it. To keep even rounding out, probabilities are
    whole numbers: exp((logit − largest) / temperature) in units of 2⁻⁴⁰. Sums of whole numbers are exact in any order,
    and the order in which a GPU adds up a row depends on how many rows there are. A token below 2⁻⁴⁰ of the most
    likely one is never drawn. CPU and GPU differ by the last bit of `exp` only.

    **Log-probabilities** are natural logarithms of the softmax of the logits as the model gave them, in fp32: before
    `min_tokens`, temperature, top-k and top-p.

    When every row is greedy and asks for nothing more, a step costs one kernel and one copy into pinned memory.

    Args:
        vocab_size: width of a row.
        device: where the logits are.
        max_num_seqs: most rows in a step.
        seed: the engine's seed, for requests without their own.
    """

    def __init__(self, vocab_size: int, device: torch.device | str, max_num_seqs: int, seed: int = 0) -> None:
        self.vocab_size, self.max_num_seqs, self.seed = vocab_size, max_num_seqs, seed
        self.device = torch.device(device)
        # Token ids (8 bytes a row) and largest logits (up to 8) share one buffer, so that one copy fetches both.
        self._buffer = torch.zeros(16 * max_num_seqs, dtype=torch.uint8, device=self.device)
        on_gpu = self.device.type == "cuda"
        self._host = torch.zeros_like(self._buffer, device="cpu", pin_memory=True) if on_gpu else self._buffer
        self._views: dict[tuple[int, torch.dtype], tuple[torch.Tensor, ...]] = {}

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> SampledTokens:
        """One token per row.

        Args:
            logits: `[num_rows, vocab_size]`, any float dtype; only read.
            requests: the request of each row. Its `output_token_ids` do not hold the token yet.

        Raises:
            LabkitError: the logits do not have one row per request.
        """
        num_rows = len(requests)
        if logits.shape != (num_rows, self.vocab_size) or num_rows > self.max_num_seqs:
            raise LabkitError(
                f"sampling {num_rows} requests from logits of shape {tuple(logits.shape)}",
                f"there must be one row of {self.vocab_size} per request and at most {self.max_num_seqs} rows",
                "Pass the rows of the requests that sample, without padding.",
            )
        if not num_rows:
            return SampledTokens([], [], [])
        ids, largest, host_ids, host_largest = self._views_for(num_rows, logits.dtype)
        if _all_plain(requests):
            torch.max(logits, dim=1, out=(largest, ids))
            self._fetch()
            return _collect(host_ids, host_largest, [None] * num_rows)

        allowed = self._forbid_ending(logits, requests)
        torch.max(allowed, dim=1, out=(largest, ids))
        for rows, num_ranked in self._passes(requests):
            self._draw(allowed, largest, ids, [requests[i] for i in rows], rows, num_ranked)
        logprobs = self._logprobs(logits, ids, requests)
        self._fetch()
        return _collect(host_ids, host_largest, logprobs)

    def _views_for(self, num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Token ids int64 `[num_rows]` and largest logits `[num_rows]`, on the device and on the host."""
        key = (num_rows, dtype)
        if key not in self._views:
            views = []
            for buffer in (self._buffer, self._host):
                ids, largest = buffer.split(8 * self.max_num_seqs)
                views += [ids.view(torch.int64)[:num_rows], largest.view(dtype)[:num_rows]]
            self._views[key] = tuple(views)
        return self._views[key]

    def _fetch(self) -> None:
        """Bring ids and largest logits to the host. Waits for this stream only: others may be capturing."""
        if self._host is not self._buffer:
            self._host.copy_(self._buffer, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        """A small host tensor, sent without waiting."""
        if self.device.type != "cuda":
            return values.to(self.device)
        return values.pin_memory().to(self.device, non_blocking=True)

    def _forbid_ending(self, logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
        """The logits with −inf where a request must not end yet; the very same tensor when there is no such row."""
        flat = [
            row * self.vocab_size + token_id
            for row, request in enumerate(requests)
            if len(request.output_token_ids) < request.params.min_tokens
            for token_id in ending_token_ids(request)
            if 0 <= token_id < self.vocab_size
        ]
        if not flat:
            return logits
        allowed = logits.clone(memory_format=torch.contiguous_format)
        allowed.view(-1).index_fill_(0, self._to_device(torch.tensor(flat)), -math.inf)
        return allowed

    def _passes(self, requests: Sequence[Request]) -> Iterator[tuple[list[int], int]]:
        """Rows that draw, in groups that fit one pass, with the number of best tokens to rank for them.

        Zero where neither top-k nor top-p is on: such a row is never sorted, a sampler's most expensive work.
        """
        ranked = {}
        for row, request in enumerate(requests):
            params = request.params
            if params.temperature:
                ranked[row] = self.vocab_size if params.top_p < 1 else 0
                if 0 < params.top_k < self.vocab_size:
                    ranked[row] = params.top_k
        step = max(1, _LOGITS_PER_PASS // self.vocab_size)
        # Apart, so that no row is ranked further than it needs: none, a selection, the whole row.
        for low, high in ((0, 0), (1, _MOST_SELECTED), (_MOST_SELECTED + 1, self.vocab_size)):
            rows = [row for row, n in ranked.items() if low <= n <= high]
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                yield part, max(ranked[row] for row in part)

    def _draw(
        self,
        logits: torch.Tensor,
        largest: torch.Tensor,
        ids: torch.Tensor,
        requests: Sequence[Request],
        rows: list[int],
        num_ranked: int,
    ) -> None:
        """Replace `ids` of some rows by draws. `largest` is the largest logit of every row of `logits`.

        num_ranked: how many of the most likely tokens top-k and top-p need to see; 0 when all these rows have neither.
        """
        table = []
        for row, request in zip(rows, requests, strict=True):
            p = request.params
            key = stream_key(p.seed, self.seed, request.arrival_index)
            # fp32 has no 1e-60 or 1e60; at these ends the choice is already the largest logit or an even one.
            temperature = min(max(p.temperature, 1e-30), 1e30)
            top_k = min(p.top_k or self.vocab_size, num_ranked)
            table.append((uniform(key, len(request.output_token_ids)), temperature, p.top_p, top_k - 1, row))
        numbers = self._to_device(torch.tensor(table, dtype=torch.float64).t().contiguous()).unsqueeze(2)
        draw, temperatures, top_p = numbers[0], numbers[1].float(), numbers[2]

        # Without a gap in the rows a slice does, and no row is copied.
        gapless = rows[-1] - rows[0] == len(rows) - 1
        where = slice(rows[0], rows[-1] + 1) if gapless else numbers[4, :, 0].long()
        chosen, order = logits[where], None
        if num_ranked:
            chosen, order = _best(chosen, num_ranked)
        # Largest logit first: the difference is 0 there, so no temperature, however small, can overflow.
        weights = torch.sub(chosen.float(), largest[where].float().unsqueeze(1)).div_(temperatures).exp_()
        sums = weights.mul_(_UNITS).long().cumsum(1)
        total = sums[:, -1:]
        if order is not None:
            last = numbers[3].long()
            enough = sums.gather(1, last).double().mul_(top_p).ceil_().long()
            last = torch.minimum(torch.searchsorted(sums, enough), last)
            total = sums.gather(1, last)
        target = torch.minimum(draw.mul(total.double()).long(), total - 1)
        # A row of NaN or −inf has no meaning here, but must stay inside the vocabulary.
        rank = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
        ids[where] = (rank if order is None else order.gather(1, rank)).squeeze(1)

    def _logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor, requests: Sequence[Request]
    ) -> list[TokenLogprob | None]:
        out: list[TokenLogprob | None] = [None] * len(requests)
        wanted = [(row, n) for row, r in enumerate(requests) if (n := r.params.logprobs) is not None]
        step = max(1, _LOGITS_PER_PASS // self.vocab_size)
        for start in range(0, len(wanted), step):
            part = wanted[start : start + step]
            rows = self._to_device(torch.tensor([row for row, _ in part]))
            logp = torch.log_softmax(logits[rows], dim=1, dtype=torch.float32)
            picked = ids[rows]
            best, best_ids = _best(logp, min(max(n for _, n in part), self.vocab_size))
            columns = (picked, logp.gather(1, picked.unsqueeze(1)).squeeze(1), best, best_ids)
            for (row, n), token_id, value, values, token_ids in zip(part, *(c.tolist() for c in columns), strict=True):
                pairs = zip(token_ids[:n], values[:n], strict=True)
                # An impossible token is no alternative.
                out[row] = TokenLogprob(token_id, value, tuple((i, v) for i, v in pairs if v > -math.inf))
        return out


def _best(values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The n largest values of each row of `[rows, width]` and where they are, largest first, of equals the first.

    `torch.topk` returns equal values in any order, and another one on another device. So what it gets has no equals:
    64-bit keys, the value above (as the integer that sorts like it), the place from the right below.
    """
    if n > _MOST_SELECTED:
        ordered, places = torch.sort(values, dim=1, descending=True, stable=True)
        return ordered[:, :n], places[:, :n]
    width = values.shape[1]
    bits = (values.float() + 0.0).view(torch.int32)  # −0.0 + 0.0 is 0.0, so that the two are equal
    sortable = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (sortable.long() << 32) | torch.arange(width - 1, -1, -1, device=values.device)
    places = width - 1 - (torch.topk(keys, n, dim=1).values & 0xFFFFFFFF)
    return values.gather(1, places), places


def _all_plain(requests: Sequence[Request]) -> bool:
    """Whether the largest logit of every row is all that is asked for. One loop: this runs in every step."""
    for request in requests:
        params = request.params
        if params.temperature or params.logprobs is not None or len(request.output_token_ids) < params.min_tokens:
            return False
    return True


def _collect(ids: torch.Tensor, largest: torch.Tensor, logprobs: list[TokenLogprob | None]) -> SampledTokens:
    """Plain values from the host's buffers. The largest logit of a row tells whether the row means anything."""
    token_ids, values = ids.tolist(), largest.tolist()
    errors: list[str | None] = [None] * len(values)
    if not math.isfinite(sum(values)):  # NaN and infinities survive a sum
        errors = [None if math.isfinite(value) else _explain(value) for value in values]
        token_ids = [None if e else i for i, e in zip(token_ids, errors, strict=True)]
        logprobs = [None if e else lp for lp, e in zip(logprobs, errors, strict=True)]
    return SampledTokens(token_ids, logprobs, errors)


def _explain(largest: float) -> str:
    if largest == -math.inf:
        return (
            "No token can be chosen: every logit is −inf. If min_tokens is set, it forbids all end-of-sequence ids and "
            "stop_token_ids, and the model left nothing else."
        )
    what = "NaN" if math.isnan(largest) else "+inf"
    return (
        f"No token can be chosen: the model's logits contain {what}. Weights or KV cache hold a value that is not "
        "finite, or the dtype overflowed; try dtype='float32'."
    )
