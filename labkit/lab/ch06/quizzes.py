"""The questions of chapter 06. Refuses to ask for numbers."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="06.recap",
    question="You ask for <code>attention_backend='FLASH_ATTN'</code> on a T4. What does labkit do?",
    options=(
        (
            "It refuses when the engine is made, and names the reason and the backends that can serve.",
            True,
            "A choice by name works or is refused, with every condition that fails.",
        ),
        ("It takes the next backend in the order.", False, "Only an automatic choice goes on to the next one."),
        ("It starts, and fails in the first step.", False, "Conditions are checked before anything is built."),
    ),
)

TRANSFER = Quiz(
    id="06.transfer",
    question="A batch of 5 tokens runs in a graph of 8, so that three rows are padding; their slot is −1. Somebody "
             "writes the kernel as <code>cache[slot] = kv</code> for all 8 rows, with no test. What happens?",
    options=(
        ("An error: −1 is no index.", False, "It is one in Python: the last entry. In a kernel it is an address before "
         "the first one."),
        (
            "No error. Three rows are written to a slot that may be another request's, and its text changes, perhaps "
            "much later.",
            True,
            "In Python −1 is the last slot of the last block. Whoever owns that block reads the K and V of padding. "
            "That is why every path must skip slot −1.",
        ),
        ("Nothing: rows of padding are dropped afterwards.", False, "Their outputs are dropped. What was written to "
              "the cache stays."),
    ),
    items=("B4",),
    kind="transfer",
)  # fmt: skip

SELF_CHECK = Quiz(
    id="06.self",
    question="A scheduler fills each step with decodes and a chunk of a prompt, up to one token budget. Why does it "
    "need attention kernels that take such a batch?",
    options=(
        (
            "Because otherwise each mixed step is cut in two again, or padded to a rectangle that is mostly waste.",
            True,
            "One call with offsets and lengths (or two that a backend makes by itself) computes what is needed and "
            "nothing else. Without it, what the scheduler gained is lost in attention.",
        ),
        (
            "Because the other layers cannot run decodes and prompts together.",
            False,
            "They can: a matrix product or a norm looks at each token by itself, and asks nobody whose it is.",
        ),
        (
            "Because decodes and prompts need different weights.",
            False,
            "All tokens go through the same weights. That one reading of them serves all is why steps are mixed.",
        ),
    ),
    items=("A4",),
    kind="self-check",
)

QUIZZES = (RECAP, TRANSFER, SELF_CHECK)
