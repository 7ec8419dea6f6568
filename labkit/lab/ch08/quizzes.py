"""The questions of chapter 08. Refuses to ask for a number that no cell shows."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="08.recap",
    question="Before we begin: a graph was captured for 16 tokens. A step of 13 tokens runs in it. What happens to the "
    "other 3 rows?",
    options=(
        ("The replay skips them, since they are empty.", False,
         "A replay has no arguments: it cannot know that they are. Its kernels were launched for 16 rows."),
        ("They are computed from harmless values, and the results are dropped.", True,
         "Token 0 at position 0, written to no slot of the cache. It costs what three real rows cost."),
        ("The graph is captured again for 13.", False,
         "A capture takes far longer than a step. Engines capture before they serve, and never again."),
    ),
)  # fmt: skip

TRANSFER = Quiz(
    id="08.transfer",
    kind="transfer",
    items=("A7",),
    question="A service runs with max_num_seqs = 48 and the sizes 1, 2, 4, 8, 16, 32. Under load nearly every step has "
    "33 to 48 tokens, and latency is three times that of a quiet hour. What do you look at first?",
    options=(
        ("Padding: 33 tokens in a graph of 48 waste a third.", False,
         "There is no graph of 48. These steps are not padded at all."),
        ("Misses: above 32 nothing is captured, so that the full load runs eagerly. Add 40 and 48.", True,
         "What matters most is that a step has a graph at all. The default list holds max_num_seqs for that reason."),
        ("The order of the captures: largest first.", False,
         "That decides how much memory the graphs take. It does not decide which step has one."),
        ("Memory: with more requests the KV cache is full.", False,
         "Possible, and it would show as requests that wait or are preempted, not as slow steps of 33 tokens."),
    ),
)  # fmt: skip

SELF_CHECK = Quiz(
    id="08.selfcheck",
    kind="self-check",
    items=("A7",),
    question="You double the number of capture sizes. What do you pay, and what do you get?",
    options=(
        ("Start-up time and memory for every graph; less padding in the steps whose size came closer.", True,
         "And where the old list had a close size already, nothing. That is why the traffic decides which sizes are "
         "worth it."),
        ("Nothing: graphs share one pool, so that more of them take no more memory.", False,
         "They share what their tensors need while they run. Each graph has memory of its own besides, for its nodes."),
        ("Slower steps, because the engine searches a longer list.", False,
         "A table or a bisection answers in well under a microsecond's worth of work per step."),
    ),
)  # fmt: skip

QUIZZES = (RECAP, TRANSFER, SELF_CHECK)
