"""Turns the tokens of one request into text as they arrive, and cuts it at a stop string.

Refuses to know how tokens were chosen and what else runs; it sees bytes, not a vocabulary.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from labkit.config import SamplingParams
from labkit.scheduling.stops import StopStrings


class TokenBytes(Protocol):
    """The one thing asked of a tokenizer: the bytes that a token stands for, b"" for a special token."""

    def token_bytes(self, token_id: int, /) -> bytes: ...


class Detokenizer:
    """Text of one request's output, piece by piece.

    The pieces together are exactly the decoding of the whole output: `b"".join(bytes of its tokens)` as UTF-8 with
    U+FFFD for what is not UTF-8, special tokens skipped, up to the first stop string. Nothing is shown that a later
    token could still change: a character whose last byte is missing waits for it, and so does text that may turn out
    to be the beginning of a stop string.

    Every token's bytes are decoded once, by a decoder that keeps at most three bytes between tokens. (Decoding the
    last few *tokens* again and comparing texts, as engines that only have `decode(ids)` must, cannot tell a character
    that is incomplete from a U+FFFD that the model really wrote, and then waits and re-decodes for ever.)

    Args:
        tokenizer: gives the bytes of a token.
        prompt_token_ids: not read, and named so that nobody wonders: the output is decoded by itself. A prompt that
            ends inside a character neither repeats the prompt nor lends its bytes to the output.
        params: its `stop` strings, and `min_tokens`: no match completed by an earlier token than that counts.
    """

    def __init__(self, tokenizer: TokenBytes, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        del prompt_token_ids
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStrings(params.stop)
        self._min_tokens = params.min_tokens
        self._held = ""
        self._pieces: list[str] = []
        self._num_settled = 0
        self._done = False
        self.found_stop = False
        #: Tokens read so far; the one that completed a stop string is the last of them.
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All text given out so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_ids: Sequence[int], final: bool = False) -> str:
        """Read tokens; the text they add for good.

        final: nothing follows, so whatever was held back comes out, an incomplete character as U+FFFD.
        After a stop string (`found_stop`) or a final call the text is closed: more tokens add nothing.
        """
        if self._done:
            return ""
        pieces = []
        for token_id in token_ids:
            self.num_tokens += 1
            pieces.append(self._settle(self._decoder.decode(self._tokenizer.token_bytes(token_id))))
            if self.found_stop:
                break
        if final and not self.found_stop:
            pieces.append(self._settle(self._decoder.decode(b"", final=True)))
            pieces.append(self._held)
            self._held = ""
        self._done = final or self.found_stop
        delta = "".join(pieces)
        if delta:
            self._pieces.append(delta)
        return delta

    def _settle(self, new: str) -> str:
        """Take over decoded text; return as much of what is not shown yet as no stop string can claim any more."""
        match = self._stops.feed(new, may_stop=self.num_tokens >= self._min_tokens)
        unseen = self._held + new
        if match:
            self.found_stop = True
            keep, self._held = match.start - self._num_settled, ""
        else:
            keep = len(unseen) - self._stops.num_held
            self._held = unseen[keep:]
        self._num_settled += keep
        return unseen[:keep]
