"""The questions of chapter 03. Refuses to ask for a number that no cell shows."""

from __future__ import annotations

from labkit.lab.quiz import Quiz

RECAP = Quiz(
    id="03.recap",
    question="Before we begin: on a GPU you read the clock, call a kernel and read the clock again, without "
    "synchronizing. What did you time?",
    options=(
        ("The kernel.", False, "The call returns as soon as the kernel is queued. It may not even have begun."),
        ("What it costs the host to start the kernel.", True,
         "The host does not wait for what it starts. To time the kernel, wait for the device, or use the device's "
         "clock."),
        ("Nothing: such a measurement is always zero.", False, "Starting a kernel takes microseconds, and those were "
         "timed."),
    ),
)  # fmt: skip

TRANSFER = Quiz(
    id="03.transfer",
    kind="transfer",
    items=("A3",),
    question="You change the attention backend of a server and nothing else, sample greedily, and compare 1,000 "
    "answers in bfloat16. In 11 of them one word differs, and everything after it. What do you conclude?",
    options=(
        ("The new backend has a bug: the same mathematics must give the same text.", False,
         "The bits of the results differ between correct backends. Where two words are almost equally likely, that "
         "decides."),
        ("Nothing yet. Look whether the two best words were nearly equal there, and compare the errors against "
         "float64.", True,
         "Rounding can turn a near tie. A bug shows as an error beyond the tolerance, or as a change where there was "
         "no tie."),
        ("The new backend is less precise, so go back.", False,
         "It may well be the more precise one: a tiled kernel keeps its scores in float32 and does not round them at "
         "all."),
    ),
)  # fmt: skip

NAMES = Quiz(
    id="03.selfcheck",
    kind="self-check",
    items=("A2",),
    question="Which list fits backends to machines as vLLM and labkit do?",
    options=(
        ("FLASH_ATTN on Ampere and Hopper; FLASHINFER first on data-centre Blackwell; TRITON_ATTN where neither loads, "
         "or on AMD; TORCH_SDPA on a CPU.", True,
         "FlashAttention has a generation of kernels for each of these architectures, FlashInfer is tried first on "
         "sm_10x, Triton's compiler makes its kernels portable, and PyTorch's own call runs everywhere. Chapter 05 "
         "traces it."),
        ("FLASH_ATTN everywhere: it is exact, so that the others are never needed.", False,
         "All of them are exact up to rounding. FLASH_ATTN needs Ampere or newer, and a build for the machine."),
        ("TRITON_ATTN on a CPU, since it is the portable one; TORCH_SDPA on Hopper for speed.", False,
         "It is the other way round: on a CPU Triton can only interpret. TORCH_SDPA gathers pages first, which costs "
         "time."),
        ("FLASHINFER for prompts, TORCH_SDPA for decodes, XFORMERS for mixed batches.", False,
         "A backend takes the whole batch, whatever is in it. It is chosen by machine, model and format, not by step."),
    ),
)  # fmt: skip

QUIZZES = (RECAP, TRANSFER, NAMES)
