"""The questions of chapter 04. Refuses to ask for a number that no cell shows."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="04.recap",
    question="Before we begin: two programs attended to the first and to the second half of a request's keys. What "
             "has each of them to hand on, so that the two results can be merged?",
    options=(
        ("Its result alone: the mean of the two is attention over all keys.", False,
         "A half with larger scores has to count more. In chapter 03 the mean turned the engine's text into nonsense."),
        ("Its result, and the logarithm of its sum of exponentials.", True,
         "With it each part is weighted by the share of all exponentials that it has."),
        ("All of its scores.", False, "That is the matrix which nobody wants to store. One number for each query is "
                                      "enough."),
    ),
)  # fmt: skip

TRANSFER = Quiz(
    id="04.transfer",
    kind="transfer",
    items=("B2",),
    question="A server runs a model with 8 KV heads on a GPU with 132 multiprocessors. At 4 in the morning one user "
             "chats, with 60,000 tokens of context; at noon 64 users do, with 2,000 each. When does splitting the "
             "keys help?",
    options=(
        ("At 4 in the morning: 8 programs leave most of the GPU idle. At noon there are 512 programs without any "
         "split.", True,
         "Splits are for calls with little else to do in parallel. At noon they would only add partial results and a "
         "merge."),
        ("At noon: there are 128,000 tokens of KV to read, more than twice as many.", False,
         "There is more to read, but there are also enough programs to read it with all of the GPU."),
        ("Always: a split halves the keys of each program.", False,
         "It also doubles the programs. Where they do not all fit at once, nothing is won, and the merge costs extra."),
        ("Never, since FlashAttention is exact already.", False, "Both are exact. Splitting is about who reads which "
              "keys."),
    ),
)  # fmt: skip

SELF_CHECK = Quiz(
    id="04.selfcheck",
    kind="self-check",
    items=("B2",),
    question="What does a kernel for prompts do in parallel, and what does one for lone decodes?",
    options=(
        ("Prompts: tiles of queries and heads. Lone decodes: heads, and parts of the keys, merged at the end.", True,
         "A prompt has hundreds of query tiles. A decode has one for each KV head, so that its keys are what can be "
         "cut."),
        ("Prompts: parts of the keys. Decodes: tiles of queries.", False, "A decode has one query. There is nothing "
              "to tile."),
        ("Both: one program for each request, whatever it brings.", False,
         "A prompt of thousands of tokens would then be computed by one multiprocessor."),
        ("Prompts run on tensor cores, decodes on the CPU.", False,
         "Both run on the GPU. A decode waits for its memory, and the kernel's task is to ask for enough at once."),
    ),
)  # fmt: skip

QUIZZES = (RECAP, TRANSFER, SELF_CHECK)
