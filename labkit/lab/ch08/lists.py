"""Lists of capture sizes and traffic as a learner chooses or types them. Refuses to know sources and widgets."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import ConfigError
from labkit.graphs.advisor import TRAFFIC, Fit, advise, powers_of_two
from labkit.graphs.sizes import default_capture_sizes
from labkit.lab.fields import Choice, Control, Number, Text
from labkit.lab.settings import parse_sizes

DEFAULT, POWERS, ADVICE, CUSTOM = "default", "powers of two", "advice", "custom"
TYPED = "typed"
BUDGET = 8192
#: Tokens of a step at most, where they are typed.
MOST = 2048
#: What is drawn of the best lists.
KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: Tokens → steps, as pairs: plain values that a file can hold.
Pairs = tuple[tuple[int, int], ...]


def traffic_controls(values: Mapping[str, Any], presets: Sequence[str]) -> list[Control]:
    """Which traffic, and where it is typed, the box for it."""
    options = [(f"{name} (synthetic)", name) for name in presets] + [("typed", TYPED)]
    chosen = values.get("traffic") if values.get("traffic") in (*presets, TYPED) else options[0][1]
    found: list[Control] = [Choice("traffic", "Traffic", options, chosen, help="How many steps have how many tokens.")]
    if chosen == TYPED:
        found.append(Text("steps", "Steps", "13, 100:20, 520", parse_traffic,
                          help="Tokens of each step, or tokens:steps."))  # fmt: skip
    return found


def parse_traffic(text: str) -> Pairs:
    """ "13, 100:20, 520" as ((13, 1), (100, 20), (520, 1)).

    Raises:
        ConfigError: every word that is neither a number of tokens nor tokens:steps is named.
    """
    counts: collections.Counter[int] = collections.Counter()
    wrong = []
    for word in [w for w in re.split(r"[,;\s]+", text.strip()) if w]:
        found = re.fullmatch(r"(\d+)(?::(\d+))?", word)
        if not found or not 1 <= int(found[1]) <= MOST or int(found[2] or 1) < 1:
            wrong.append(repr(word))
        else:
            counts[int(found[1])] += int(found[2] or 1)
    if wrong or not counts:
        raise ConfigError(
            f"steps {text.strip()!r}", f"{', '.join(wrong) or 'nothing'} cannot be read",
            f"Write tokens from 1 to {MOST:,}, or tokens:steps, like 13, 100:20.",
        )  # fmt: skip
    return tuple(sorted(counts.items()))


def traffic_of(values: Mapping[str, Any]) -> dict[int, int]:
    """The histogram that is chosen or typed."""
    return dict(values["steps"]) if values["traffic"] == TYPED else dict(TRAFFIC[values["traffic"]])


def list_controls(values: Mapping[str, Any], largest: int = 2048) -> list[Control]:
    """Which list, and what it depends on: a control that does nothing for a list is not there."""
    options = [("the default", DEFAULT), ("powers of two", POWERS), ("the advisor's", ADVICE), ("typed", CUSTOM)]
    chosen = values.get("list") if values.get("list") in (DEFAULT, POWERS, ADVICE, CUSTOM) else DEFAULT
    found: list[Control] = [Choice("list", "Sizes", options, chosen, help="Where the list of capture sizes is from.")]
    if chosen == CUSTOM:
        parse = functools.partial(some_sizes, most=largest)
        return [*found, Text("sizes", "Typed", "1, 2, 4, 8, 16, 32, 64, 128, 256", parse,
                             help="Numbers of tokens, each a graph of its own.")]  # fmt: skip
    if chosen == ADVICE:
        found.append(Number("k", "How many", 1, 64, 8, help="The advisor's list has at most so many sizes."))
    if chosen == DEFAULT:
        found.append(Number("max_num_seqs", "max_num_seqs", 1, 1024, 256, help="Requests that may run at a time."))
    found.append(Choice("max_size", "Largest size", [(str(n), n) for n in (64, 128, 256, 512, 1024)], 512,
                        help="max_cudagraph_capture_size; 512 by default, 1024 on data-centre Blackwell."))  # fmt: skip
    return found


def some_sizes(text: str, most: int) -> tuple[int, ...]:
    """Sizes as typed, at least one; ConfigError names every wrong part."""
    found = parse_sizes(text, most)
    if found is None:
        raise ConfigError("capture sizes ''", "the list is empty", "Type one size or more, like 1, 2, 4, 8.")
    return found


def sizes_of(values: Mapping[str, Any], traffic: Mapping[int, int]) -> list[int]:
    """The list of capture sizes that is chosen or typed."""
    if values["list"] == CUSTOM:
        return list(values["sizes"])
    largest = int(values["max_size"])
    if values["list"] == POWERS:
        return [size for size in powers_of_two(largest) if size <= largest]
    if values["list"] == ADVICE:
        return list(advised(tuple(traffic.items()), int(values["k"]), largest).sizes)
    return default_capture_sizes(int(values["max_num_seqs"]), BUDGET, cap=largest)


@functools.lru_cache(maxsize=512)
def advised(traffic: Pairs, k: int, largest: int) -> Fit:
    """The advisor's best list; kept, since a curve asks for many."""
    return advise(dict(traffic), k, largest)
