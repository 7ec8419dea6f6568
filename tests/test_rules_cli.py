"""`labkit modes` and `labkit sizes`: every input of the rules can be asked for, and the answers say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.attention.interface import AttentionCGSupport as Tier
from labkit.cli import main
from labkit.config import CUDAGraphMode as Mode
from labkit.graphs.advisor import TRAFFIC, advise, fit
from labkit.graphs.modes import resolve
from labkit.graphs.sizes import default_capture_sizes

ROOT = Path(__file__).resolve().parents[1]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["--breakable"], {"breakable": True}),
        (["--breakable", "--query-len", "3", "--tier", "UNIFORM_SINGLE_TOKEN_DECODE"],
         {"breakable": True, "query_len": 3, "tier": Tier.UNIFORM_SINGLE_TOKEN_DECODE}),
        (["--compiled", "--no-split"], {"compiled": True, "split": False}),
        (["--compiled", "--split", "--pooling"], {"compiled": True, "pooling": True}),
        (["--no-compiled", "--no-breakable", "--no-pooling", "--requested", "piecewise"],
         {"requested": Mode.PIECEWISE}),
        (["--tier", "NEVER", "--attention-backend", "xformers"], {"tier": Tier.NEVER, "backend": "XFORMERS"}),
    ],
)  # fmt: skip
def test_modes_asks_everything_that_the_rule_takes(capsys, words, options) -> None:
    mode, trail = resolve(
        **{"requested": Mode.FULL_AND_PIECEWISE, "tier": Tier.ALWAYS, "compiled": False, **options}
    )  # fmt: skip
    code, data = run(capsys, "modes", *words)
    assert code == 0 and (data["resolved"], data["trail"]) == (mode.name, trail)
    assert [one["downgrade"] for one in data["avoid"]] == trail[1:-1]
    assert all(one["change"] and one["cost"] for one in data["avoid"])


def test_modes_says_what_a_downgrade_costs_and_on_which_machine(capsys) -> None:
    words = ["modes", "--requested", "FULL_DECODE_ONLY", "--tier", "NEVER", "--model", "qwen3-0.6b", "--batch", "30"]
    _, data = run(capsys, *words)
    (one,) = data["avoid"]
    assert "as long in NONE as in FULL (qwen3-0.6b, TRITON_ATTN, batch 32" in one["cost"] and "RECORDED" in one["cost"]
    assert one["costs"][0]["ratio"] > 1 and "H200" in one["costs"][0]["provenance"]
    assert one["cost"] in say(capsys, *words) and "to avoid it: Take" in say(capsys, *words)
    _, data = run(capsys, *words[:-4], "--model", "llama-3.1-70b")
    assert data["avoid"][0]["cost"] == "not measured"
    same = [run(capsys, *words[:-4], "--model", m)[1]["avoid"] for m in ("SmolLM2-135M-instruct", "smollm2-135m")]
    assert same[0] == same[1]


def test_modes_without_a_downgrade_says_nothing_of_one(capsys) -> None:
    _, data = run(capsys, "modes", "--breakable")
    assert data["avoid"] == [] and data["resolved"] == "FULL_AND_PIECEWISE"
    assert "avoid" not in say(capsys, "modes", "--breakable")


def test_modes_without_numpy_says_that_no_recording_was_read(user_env) -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from labkit.cli import main; main(['modes', '--tier', 'NEVER', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=user_env, capture_output=True, text=True)
    data = json.loads(done.stdout)
    assert {one["cost"] for one in data["avoid"]} == {"not measured"} and "numpy" in data["notes"][0]


def test_c27_sizes_names_decode_batches_without_a_graph(capsys) -> None:
    """The report behind it: 12 sequences and 1, 2, 4, 8 leave 9 to 12 without a graph, silently."""
    words = ["sizes", "--max-num-seqs", "12", "--cudagraph-capture-sizes"]
    (note,) = run(capsys, *words, "1,2,4,8")[1]["notes"]
    assert "max_num_seqs=12" in note and "up to 12 tokens: those above 8 have no graph" in note
    assert note in say(capsys, *words, "1,2,4,8")
    assert run(capsys, *words, "1,2,4,8,12")[1]["notes"] == []
    for seqs in ("1", "2", "3", "12", "50", "256"):
        assert run(capsys, "sizes", "--max-num-seqs", seqs)[1]["notes"] == []
    assert "up to 24 tokens" in run(capsys, *words, "12", "--query-len", "2")[1]["notes"][0]


def test_sizes_for_built_in_traffic(capsys) -> None:
    default = default_capture_sizes(256, 8192)
    for name, traffic in TRAFFIC.items():
        code, data = run(capsys, "sizes", "--traffic", name, "--advise", "8")
        assert code == 0 and data["sizes"] == default and data["padding"]["3"] == 4
        assert data["fit"] == fit(traffic, default).as_dict()
        assert data["advice"] == {"k": 8, **advise(traffic, 8).as_dict()}
        assert [one["name"] for one in data["compared"]] == ["this list", "its first 8", "powers of two"]
        assert data["traffic"]["origin"] == "synthetic"
    out = say(capsys, "sizes", "--traffic", "chat", "--advise", "4")
    assert "Traffic: chat, synthetic, 10,000 steps" in out
    assert "cudagraph_capture_sizes for it: 22, 27, 32, 44" in out


def test_sizes_for_a_file_under_the_limits_of_the_engine(capsys, tmp_path) -> None:
    file = tmp_path / "steps.json"
    file.write_text('{"3": 10, "5": 2, "700": 4}')
    code, data = run(capsys, "sizes", "--traffic", str(file), "--cudagraph-capture-sizes", "4,8", "--advise", "2")
    assert code == 0 and data["fit"]["padded_tokens"] == 10 * 1 + 2 * 3 and data["fit"]["coverage"] == 12 / 16
    assert data["advice"]["sizes"] == [3, 5] and data["advice"]["waste"] == 0
    assert "4 steps are above 5 tokens and stay eager" in say(capsys, "sizes", "--traffic", str(file), "--advise", "2")
    for words, top in (
        (["--gpu", "B200", "--max-num-seqs", "1024"], 700), (["--max-cudagraph-capture-size", "4"], 3),
        (["--max-num-batched-tokens", "4", "--max-num-seqs", "4"], 3),
    ):  # fmt: skip
        _, data = run(capsys, "sizes", "--traffic", str(file), "--advise", "3", *words)
        assert data["advice"]["sizes"][-1] == top
    lines = tmp_path / "lines.txt"
    lines.write_text("3\n" * 10 + "5\n5\n" + "700\n" * 4)
    assert (
        run(capsys, "sizes", "--traffic", str(lines))[1]["fit"]
        == run(capsys, "sizes", "--traffic", str(file))[1]["fit"]
    )


@pytest.mark.parametrize(
    ("words", "why", "remedy"),
    [
        (["--advise", "4"], "none was named", "chat, bursty, mixed"),
        (["--traffic", "nowhere.json"], "No such file", "chat, bursty, mixed"),
        (["--traffic", "chat", "--advise", "0"], "0 is below 1", ""),
        (["--traffic", "FILE"], "'x', which is no number", "one number of tokens per line"),
        (["--traffic", "chat", "--advise", "2", "--max-cudagraph-capture-size", "1"], "more than 1 tokens", "Raise"),
    ],
)
def test_sizes_refuses_with_a_sentence(capsys, tmp_path, words, why, remedy) -> None:
    (tmp_path / "file").write_text("x")
    code, data = run(capsys, "sizes", *[str(tmp_path / "file") if w == "FILE" else w for w in words])
    assert code == 2 and why in data["error"]["why"] and remedy in data["error"]["try"]
