"""When a request is over: end-of-sequence ids, stop ids, lengths, stop strings.

Refuses to know torch, logits and how tokens become text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from labkit.scheduling.request import Request


def ending_token_ids(request: Request) -> frozenset[int]:
    """Every id that could end the request: all end-of-sequence ids of the model and the request's own stop ids.

    A model may name several end-of-sequence ids (one closes a turn, one closes the text); leaving one out lets a chat
    run on, so this is always their union. The sampler forbids these ids while `min_tokens` is not reached.
    """
    return frozenset(request.eos_token_ids) | frozenset(request.params.stop_token_ids)


def finish_reason(request: Request, token_id: int, max_model_len: int) -> str | None:
    """Why the request ends with its newest token, or None when it goes on.

    Call it after `token_id` was appended: it is `request.output_token_ids[-1]` and counts towards every length.

    * "stop": an end-of-sequence id (unless `ignore_eos`) or one of `stop_token_ids`, once the output has at least
      `min_tokens` tokens. A stop id that is also an end-of-sequence id stops under `ignore_eos` too.
    * "length": the output has `max_tokens` tokens, or prompt and output together have `max_model_len`.

    Stopping wins over length: the token at `max_tokens` that is an end-of-sequence id gives "stop".
    """
    params, num_output = request.params, len(request.output_token_ids)
    if num_output >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return "stop"
        if not params.ignore_eos and token_id in request.eos_token_ids:
            return "stop"
    if num_output >= params.max_tokens or len(request.prompt_token_ids) + num_output >= max_model_len:
        return "length"
    return None


class StopMatch(NamedTuple):
    """A stop string in the text: characters `start` up to `end`, counted from the beginning of the output."""

    start: int
    end: int


class StopStrings:
    """Looks for stop strings in a text that arrives in pieces.

    The match that is *completed* first wins, and of those completed by the same character the longest. So the answer
    depends on the text alone and never on where the pieces were cut, which "the match that starts first" would not:
    with "abcd" and "bc", a reader who has seen "abc" has to decide.

    One Knuth-Morris-Pratt automaton per string: every character is looked at once, however long the text.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(dict.fromkeys(strings))
        self._failure = [_failure_table(s) for s in self._strings]
        self._matched = [0] * len(self._strings)
        self._length = 0

    @property
    def num_held(self) -> int:
        """How many characters at the end of the text may begin a stop string. Show only what is before them."""
        return max(self._matched, default=0)

    def feed(self, text: str, may_stop: bool = True) -> StopMatch | None:
        """Read on through `text`; the first match, or None. What follows a match is not read.

        may_stop: False while the request still owes `min_tokens`; matches completed by this piece are passed over.
        """
        if not self._strings:
            self._length += len(text)
            return None
        for char in text:
            self._length += 1
            longest = 0
            for i, string in enumerate(self._strings):
                n, failure = self._matched[i], self._failure[i]
                while n and string[n] != char:
                    n = failure[n]
                if string[n] == char:
                    n += 1
                if n == len(string):
                    longest = max(longest, n)
                    n = failure[n]
                self._matched[i] = n
            if longest and may_stop:
                return StopMatch(self._length - longest, self._length)
        return None


def _failure_table(string: str) -> list[int]:
    """For each n, the length of the longest proper prefix of `string` that is also a suffix of `string[:n]`."""
    table = [0, 0]
    for char in string[1:]:
        n = table[-1]
        while n and string[n] != char:
            n = table[n]
        table.append(n + 1 if string[n] == char else 0)
    return table
