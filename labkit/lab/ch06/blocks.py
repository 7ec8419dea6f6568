"""Pages by hand: requests that begin alike, moment by moment, over labkit's own scheduler and block pool. No times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.config import SamplingParams
from labkit.figures.blocks import BLANK, CACHED, NULL, USED
from labkit.lab.fields import Choice, Control, Number, Toggle
from labkit.lab.runs import Context, Outcome, simulated
from labkit.paging.block_hash import block_hash
from labkit.paging.block_pool import NULL_BLOCK, BlockPool
from labkit.scheduling.request import Request
from labkit.scheduling.scheduler import Scheduler, SchedulerLimits

POOL = "block pool of labkit"
NUM_BLOCKS = 14
COLUMNS = [
    ("moment", "moment"), ("in_use", "blocks in use"), ("shared", "of them shared"), ("cached", "cached"),
    ("blank", "blank"), ("computed", "prompt tokens computed"), ("found", "prompt tokens found"),
]  # fmt: skip
MOMENTS = ("A has run", "B has run, too", "A has ended", "both have ended", "C has run, with A's prompt")


class BlocksSource:
    """A, then B with a common beginning, then C, which asks what A asked."""

    kind, label = "SIMULATED", POOL

    def controls(self, values: Mapping[str, Any]) -> Sequence[Control]:
        longest = min(values.get("a", 10), values.get("b", 9))
        return [
            Choice("block_size", "Page size", [(f"{n} tokens", n) for n in (4, 2, 8)], help="Tokens in a block."),
            Number("a", "Prompt of A", 2, 16, 10, unit="tokens", help="Tokens in A's prompt."),
            Number("b", "Prompt of B", 2, 16, 9, unit="tokens", help="Tokens in B's prompt."),
            Number("common", "In common", 0, longest, min(8, longest), unit="tokens",
                   help="How many of them are the same, from the first on."),
            Toggle("caching", "Prefix caching", True, help="enable_prefix_caching: full blocks are found by content."),
            Choice("moment", "Moment", [(word, i) for i, word in enumerate(MOMENTS)], 1,
                   help="How far the story has come."),
        ]  # fmt: skip

    def cost(self, values: Mapping[str, Any]) -> str:
        return "Run moves numbers of blocks about; nothing is computed."

    def explain(self, values: Mapping[str, Any]) -> Sequence[str]:
        whole = values["common"] // values["block_size"]
        found = min(whole, (values["b"] - 1) // values["block_size"])
        return [
            f"{values['common']} common tokens fill {whole} block{'s' * (whole != 1)} of {values['block_size']}. "
            f"B can share {found if values['caching'] else 0}: only full blocks, and its last token is always computed."
        ]

    def run(self, values: Mapping[str, Any], context: Context) -> Outcome:
        story = _Story(values)
        for step in range(values["moment"] + 1):
            story.go(step)
        made = simulated(POOL, block_size=values["block_size"], blocks=NUM_BLOCKS)
        data, row = story.data(), story.row(MOMENTS[values["moment"]])
        return Outcome(data, row, story.summary(), made, None, story.notes())


class _Story:
    """What happens up to a moment. prompts: by name; the tokens of A and B are equal up to `common`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.block_size, caching = values["block_size"], values["caching"]
        self.pool = BlockPool(NUM_BLOCKS, self.block_size, caching)
        limits = SchedulerLimits(3, 64, 64, self.block_size, enable_prefix_caching=caching, prefill_first=True)
        self.scheduler = Scheduler(limits, self.pool)
        common = list(range(100, 100 + min(values["common"], values["a"], values["b"])))
        a = common + list(range(200, 200 + values["a"] - len(common)))
        self.prompts = {"A": a, "B": common + list(range(300, 300 + values["b"] - len(common))), "C": a}
        self.requests: dict[str, Request] = {}
        self.held: dict[int, str] = {}

    def go(self, step: int) -> None:
        if step in (0, 1, 4):
            self._serve({0: "A", 1: "B", 4: "C"}[step])
        else:
            self.scheduler.finish("A" if step == 2 else "B", "stop")

    def _serve(self, name: str) -> None:
        """One step for the newcomer's whole prompt; the others' decodes rest, they would not change the picture."""
        request = Request(name, self.prompts[name], SamplingParams(max_tokens=8, ignore_eos=True))
        self.scheduler.add(request)
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.commit(step, [7])
        self.requests[name] = request
        for i, block in enumerate(request.block_ids):
            tokens = self.prompts[name][i * self.block_size : (i + 1) * self.block_size]
            self.held[block] = f"{len(tokens)}/{self.block_size}"

    def data(self) -> dict[str, Any]:
        """Every block with its state and owners, and the block table of every request that runs."""
        users: dict[int, list[str]] = {}
        tables = {name: list(r.block_ids) for name, r in self.requests.items() if not r.finished}
        for name, blocks in tables.items():
            for block in blocks:
                users.setdefault(block, []).append(name)
        states, owners, findable = [], [], self._findable()
        for block in range(NUM_BLOCKS):
            cached = block in findable
            states.append(NULL if block == NULL_BLOCK else USED if block in users else CACHED if cached else BLANK)
            owners.append("".join(users.get(block, [])))
        return {
            "blocks": list(range(NUM_BLOCKS)), "states": states, "owners": owners,
            "fills": [self.held.get(b, "") if states[b] in (USED, CACHED) else "" for b in range(NUM_BLOCKS)],
            "tables": tables, "ref_counts": list(self.pool.ref_counts),
        }  # fmt: skip

    def _findable(self) -> set[int]:
        """Blocks that a request with one of these prompts would find, in use or not."""
        found = set()
        for prompt in self.prompts.values():
            parent, hash = None, None
            for begin in range(0, len(prompt) - self.block_size + 1, self.block_size):
                tokens = prompt[begin : begin + self.block_size]
                hash = block_hash(hash, tokens)
                parent = self.pool.lookup(hash, tokens, parent)
                if parent is None:
                    break
                found.add(parent.block_id)
        return found

    def row(self, moment: str) -> dict[str, Any]:
        state = self.pool.state
        found = sum(r.num_cached_tokens for r in self.requests.values())
        prompts = sum(len(self.prompts[name]) for name in self.requests)
        shared = sum(count > 1 for count in self.pool.ref_counts)
        return {
            "moment": moment, "in_use": state.in_use, "shared": shared, "cached": state.cached, "blank": state.blank,
            "computed": prompts - found, "found": found,
        }  # fmt: skip

    def summary(self) -> str:
        state, newest = self.pool.state, list(self.requests)[-1]
        request = self.requests[newest]
        found = request.num_cached_tokens
        shared = sum(count > 1 for count in self.pool.ref_counts)
        first = f"{state.in_use} blocks are in use"
        first += f", {shared} of them by two requests at once" if shared else ""
        first += f"; {state.cached} are free and still found by their content" if state.cached else ""
        if newest == "A":
            why = "Nobody ran before A, so that nothing was found"
        elif found:
            length = len(self.prompts[newest])
            why = f"{newest} computed {length - found} of its {length} prompt tokens, since the other {found} lay in "
            why += "blocks that were there already"
        elif not self.pool.enable_prefix_caching:
            why = f"{newest} computed all of its tokens, since full blocks are not looked up"
        else:
            why = f"{newest} found nothing: no full block of its beginning was there"
        return f"{first}. {why}."

    def notes(self) -> tuple[str, ...]:
        out = []
        for name, request in self.requests.items():
            if not request.finished:
                start = request.num_cached_tokens
                slots = [request.block_ids[p // self.block_size] * self.block_size + p % self.block_size
                         for p in range(start, len(self.prompts[name]))]  # fmt: skip
                out.append(f"{name}: block table {request.block_ids}; its computed tokens went to slots {slots}.")
        return (*out, "Block 0 is the null block: nobody gets it, and unused entries of every table point there.")
