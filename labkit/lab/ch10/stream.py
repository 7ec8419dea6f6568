"""A stream of batches, as a reader types it: `4d, 3d+20p, 1d`. Refuses to know how a batch runs."""

from __future__ import annotations

import dataclasses
import re

from labkit.errors import ConfigError

_PART = re.compile(r"(\d+)\s*([dp])")
LONGEST = 24


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step: `decodes` requests with one token each, and chunks of prompts with so many tokens each."""

    decodes: int
    chunks: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.decodes + sum(self.chunks)

    @property
    def num_reqs(self) -> int:
        return self.decodes + len(self.chunks)

    @property
    def is_uniform_decode(self) -> bool:
        """Whether every request decodes."""
        return not self.chunks

    def __str__(self) -> str:
        parts = [f"{self.decodes}d"] if self.decodes else []
        return "+".join([*parts, *(f"{n}p" for n in self.chunks)])


def parse(text: str, max_num_seqs: int, max_tokens: int) -> tuple[Batch, ...]:
    """Batches between commas; `3d` is three decodes, `20p` a chunk of a prompt with 20 tokens.

    Raises:
        ConfigError: naming every part that is no batch, or does not fit the limits.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    found = [_batch(word) for word in words]
    wrong = [f"{word!r} is no batch" for word, batch in zip(words, found, strict=True) if batch is None]
    batches = [batch for batch in found if batch is not None]
    wrong += [f"{b} has {b.num_tokens} tokens, at most {max_tokens}" for b in batches if b.num_tokens > max_tokens]
    wrong += [f"{b} has {b.num_reqs} requests, at most {max_num_seqs}" for b in batches if b.num_reqs > max_num_seqs]
    if len(words) > LONGEST:
        wrong.append(f"these are {len(words)} steps, at most {LONGEST}")
    if wrong or not batches:
        raise ConfigError("the stream", "; ".join(wrong) or "has no batch", "Write for example 4d, 3d+20p, 1d.")
    return tuple(batches)


def _batch(word: str) -> Batch | None:
    parts = [_PART.fullmatch(part.strip()) for part in word.split("+")]
    if not all(parts):
        return None
    counts = [(int(part[1]), part[2]) for part in parts if part is not None]
    if any(n < 1 for n, _ in counts):
        return None
    return Batch(sum(n for n, kind in counts if kind == "d"), tuple(n for n, kind in counts if kind == "p"))
