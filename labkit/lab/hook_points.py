"""Every place where a learner's function can stand in for the engine's own: what it is given, when, and by whom.

The engine has no hooks: while a function is plugged in, the name under which the engine finds its own is bound to one
that asks both. Refuses to know how; `hooks_batch` and `hooks_model` do.
"""

from __future__ import annotations

from labkit.lab.hook import EACH_STEP, START_UP, Hook
from labkit.lab.hooks_batch import (
    install_block_hash,
    install_default_capture_sizes,
    install_dispatch,
    install_pad_to,
    install_slot_mapping,
    own_block_hash,
    own_default_capture_sizes,
    own_dispatch,
    own_pad_to,
    own_slot_mapping,
)
from labkit.lab.hooks_model import (
    NUM_PARTS,
    install_choose_num_splits,
    install_merge,
    install_pieces,
    install_why_not,
    merge_states,
    own_choose_num_splits,
    own_pieces,
    own_why_not,
)
from labkit.lab.hooks_replay import install_replay, own_replay

HOOKS: dict[str, Hook] = {
    hook.name: hook
    for hook in (
        Hook(
            "slot_mapping",
            "slot_mapping(block_ids, start, n, block_size) -> list of n slots",
            EACH_STEP,
            "StepInputs.fill asks it for every chunk of two tokens or more; a decode's one slot is computed in line. "
            "A slot outside of the request's blocks is not written.",
            own_slot_mapping,
            install_slot_mapping,
        ),
        Hook(
            "block_hash",
            "block_hash(parent, token_ids) -> bytes",
            EACH_STEP,
            "The prefix cache asks it once for every full block of a request. It compares tokens as well, so a wrong "
            "hash costs hits and never changes text.",
            own_block_hash,
            install_block_hash,
        ),
        Hook(
            "default_capture_sizes",
            "default_capture_sizes(max_num_seqs, max_num_batched_tokens, cap) -> list of sizes",
            START_UP,
            "The plan asks it where no list of sizes is given.",
            own_default_capture_sizes,
            install_default_capture_sizes,
        ),
        Hook(
            "pad_to",
            "pad_to(num_tokens, sizes) -> a size, or None",
            EACH_STEP,
            "The dispatcher keeps the answers in a table, one for each number of tokens; here it asks at each look.",
            own_pad_to,
            install_pad_to,
        ),
        Hook(
            "dispatch",
            "dispatch(num_tokens, is_uniform_decode, decode_graphs, mixed_graphs) -> (mode, size); "
            "graphs map a size to its mode",
            EACH_STEP,
            "The runner asks its dispatcher once in each step. ('NONE', num_tokens) runs eagerly.",
            own_dispatch,
            install_dispatch,
        ),
        Hook(
            "replay",
            "replay(graph, inputs) -> list of results; graph has input, output and launch(), inputs: arrays",
            EACH_STEP,
            "The engine asks it in each step that runs a FULL graph, with one input: the step's token ids. graph.input "
            "and graph.output are the engine's own buffers, shown as numpy arrays, and hold what the last replay left "
            "in them.",
            own_replay,
            install_replay,
        ),
        Hook(
            "merge",
            "merge(out_a, lse_a, out_b, lse_b) -> (out, lse), numpy arrays [..., head_size] and [...]",
            EACH_STEP,
            "The engine merges splits inside its kernels, where nothing can be put in their place. TORCH_SDPA attends "
            f"in one go; while a merge is plugged in, its keys are cut into {NUM_PARTS} parts, and the merge puts the "
            "parts together. Not inside a captured CUDA graph.",
            lambda: merge_states,
            install_merge,
        ),
        Hook(
            "choose_num_splits",
            "choose_num_splits(programs, num_sms, max_seq_len, block_n, requested, limit) -> number of splits",
            EACH_STEP,
            "TRITON_ATTN asks it when it plans a step, and keeps the answer for each shape; here it asks every time. "
            "Other backends choose inside their libraries. What a CUDA graph has recorded stays as it was.",
            own_choose_num_splits,
            install_choose_num_splits,
        ),
        Hook(
            "why_not",
            "why_not(capabilities, spec, platform) -> list of reasons, empty where the backend can serve",
            START_UP,
            "The selector asks it for one backend after another. Words are free; whether there are any is compared.",
            own_why_not,
            install_why_not,
        ),
        Hook(
            "pieces",
            "pieces(ops, splitting_ops) -> list of lists of operators, in order, each splitting operator alone",
            START_UP,
            "The compiled pass is cut by it, with compilation_mode='VLLM_COMPILE'. The compile cache is left alone "
            "meanwhile, so everything is compiled.",
            own_pieces,
            install_pieces,
        ),
    )
}
