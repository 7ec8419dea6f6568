"""The card of two runs: what a learner's function changes shows, and the shared engine is left as it was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from labkit.errors import ConfigError
from labkit.lab.engine_room import EngineRoom
from labkit.lab.hook_points import HOOKS
from labkit.lab.plugged_run import run_plugged
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def room():
    made = EngineRoom()
    made.prepare("tiny-llama", lambda *args: None, max_num_seqs=8, max_model_len=128, num_gpu_blocks_override=90)
    yield made
    made.close()


def test_a_right_function_keeps_the_text_and_the_settings(room):
    before = room.llm.engine.asked
    ran = run_plugged(slot_mapping=HOOKS["slot_mapping"].own(), room=room)
    assert ran.same_text and ran.plugged.ok and repr(ran).endswith("all as the engine's own; the same text")
    assert ran.alone.ways == ran.ours.ways and ran.ours.cached_tokens > 0
    assert room.llm.engine.asked == before
    assert repr(run_plugged(slot_mapping=HOOKS["slot_mapping"].own(), room=room)) == repr(ran)


def test_a_trusted_wrong_one_changes_text_or_steps_or_hits(room):
    def one_on(block_ids, start, n, block_size):
        return [block_ids[p // block_size] * block_size + p % block_size + 1 for p in range(start, start + n)]

    ran = run_plugged(slot_mapping=one_on, trust=True, room=room)
    assert ran.same_text is False and "other text" in repr(ran) and "with yours" in ran.html
    eager = run_plugged(dispatch=lambda n, decode, a, b: ("NONE", n), trust=True, room=room)
    assert eager.same_text and eager.ours.ways != eager.alone.ways
    hashed = run_plugged(block_hash=lambda parent, ids: bytes(len(ids)), trust=True, room=room)
    assert hashed.same_text and hashed.ours.cached_tokens < hashed.alone.cached_tokens
    refused = run_plugged(why_not=lambda cap, spec, platform: ["no"], trust=True, room=room)
    assert refused.ours is None and "the engine refused" in repr(refused) and "cannot go on" in refused.html
    assert run_plugged(slot_mapping=HOOKS["slot_mapping"].own(), room=room).same_text


def test_a_stub_and_a_bad_name(room):
    def slot_mapping(block_ids, start, n, block_size):
        return ...

    ran = run_plugged(slot_mapping=slot_mapping, room=room)
    assert repr(ran) == "slot_mapping: NOT ATTEMPTED, the engine's own ran; the same text"
    with pytest.raises(ConfigError, match="no such point"):
        run_plugged(slots=slot_mapping, room=room)


def test_without_an_engine_it_says_so():
    code = (
        "import tests.lab.without_torch\nfrom labkit.lab import run_plugged\n"
        "ran = run_plugged(pad_to=lambda n, sizes: n)\n"
        "assert repr(ran) == 'pad_to: not run, no engine here' and 'torch' in ran.html and ran.same_text is None"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
