"""The questions of chapter 05. Refuses to ask for numbers."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="05.recap",
    question="One request decodes alone, with a long context. What does a kernel for decodes do that one for prompts "
    "does not need?",
    options=(
        ("It skips a part of the keys.", False, "Then the result would be another one. Every key is read."),
        (
            "It shares the keys of one request among several programs, and merges their results.",
            True,
            "One query row gives one tile of work for each KV head, and that fills a few SMs. Cutting the keys makes "
            "more; merging needs the log-sum-exp of each part.",
        ),
        (
            "It keeps the whole matrix of scores.",
            False,
            "With one query that matrix is one row. Neither kind of kernel stores it.",
        ),
    ),
)

TRANSFER = Quiz(
    id="05.transfer",
    question="A new model has attention sinks. On an H200 the server starts with <code>attention_backend='FLASHINFER'"
    "</code> in its configuration, and refuses. What should it do?",
    options=(
        (
            "Take FLASH_ATTN silently: it is first in the order and has sinks.",
            False,
            "Then the configuration says one thing and another runs. Who measures that server is fooled.",
        ),
        (
            "Stop, say that FLASHINFER has no sinks here, and name the backends that have.",
            True,
            "A choice by name works or is refused. The reason and the list of those that can serve are what somebody "
            "needs to mend the configuration.",
        ),
        (
            "Run FLASHINFER without sinks: a small difference in the scores.",
            False,
            "Sinks are part of the model. Leaving them out gives other text, and nobody would be told.",
        ),
    ),
    items=("B5",),
    kind="transfer",
)

SELF_CHECK = Quiz(
    id="05.self",
    question="Three machines, one model with head size 128 in float16, all libraries installed: an A100, a T4 and an "
    "MI300X. Which backends does labkit take?",
    options=(
        (
            "FLASH_ATTN, TORCH_SDPA, TRITON_ATTN",
            True,
            "FlashAttention needs sm_80, and the A100 has it. On a T4 torch's own call is tried before Triton, which "
            "emits no tensor-core instruction for sm_75. On AMD the order begins with TRITON_ATTN, which is not "
            "written for CUDA. (Nobody has run labkit on AMD: this follows from the rules.)",
        ),
        (
            "FLASH_ATTN on all three: it is the fastest",
            False,
            "It needs an NVIDIA GPU of sm_80 or newer. A T4 is sm_75, an MI300X is AMD's.",
        ),
        (
            "FLASHINFER, XFORMERS, TRITON_ATTN",
            False,
            "FLASHINFER is first on data-centre Blackwells (sm_10x) only. XFORMERS is in no order, and needs sm_80 for "
            "pages, too.",
        ),
    ),
    items=("A2",),
    kind="self-check",
)

QUIZZES = (RECAP, TRANSFER, SELF_CHECK)
