"""Compiled pieces against the model's own forward, at every number of tokens; the cache, whole, broken and moved."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from labkit.attention import op, registry
from labkit.attention.interface import AttentionSpec
from labkit.engine import compiled as compiled_module
from labkit.engine.compiled import CompiledModel, compile_model
from labkit.engine.inputs import StepInputs
from labkit.graphs import compile_cache
from labkit.graphs.compile_cache import CompileCache, cache_key
from labkit.models.decoder import Decoder
from labkit.models.random_weights import fill_random
from labkit.models.shapes import SHAPES
from labkit.paging.kv_cache import KVCache

CPU = torch.device("cpu")
EXACT = 4


def make(name: str) -> Decoder:
    decoder = Decoder(SHAPES[name], dtype=torch.float32)
    fill_random(decoder, seed=1)
    return decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Three layers whose feed-forward parts are of three widths: five classes of pieces, none shared wrongly."""
    decoder = Decoder(dataclasses.replace(SHAPES["tiny-qwen3"], num_layers=3), dtype=torch.float32)
    fill_random(decoder, seed=1)
    hidden, generator = decoder.config.hidden_size, torch.Generator().manual_seed(3)
    layer = decoder.layers[1]
    layer.mlp.gate_up = torch.randn(2 * 48, hidden, generator=generator) * 0.1
    layer.mlp.down = torch.randn(hidden, 48, generator=generator) * 0.1
    return decoder


@pytest.fixture(scope="module")
def made(decoder: Decoder, folder: Path) -> CompiledModel:
    return compile_model(decoder, compile_sizes=[EXACT], cache=CompileCache(folder))


def check(decoder: Decoder, made: CompiledModel, num_tokens: int) -> None:
    """One request's prefill through both, over a cache of its own."""
    config = decoder.config
    spec = AttentionSpec(config.num_heads, config.num_kv_heads, config.head_size, "float32", 4)
    backend = registry.load("TORCH_SDPA")(spec, CPU)
    generator = torch.Generator().manual_seed(num_tokens)
    outputs = []
    for forward in (decoder.forward, made.forward):
        inputs, kv = StepInputs(64, 4, 20, 4, CPU), KVCache.allocate(config, 21, 4, torch.float32, CPU)
        view = inputs.fill_dummy(num_tokens, 1, num_tokens, num_tokens)
        view.token_ids.copy_(torch.randint(0, 500, (num_tokens,), generator=generator.manual_seed(num_tokens)))
        view.positions.copy_(torch.arange(num_tokens))
        view.metadata.slot_mapping.copy_(torch.arange(4, 4 + num_tokens))
        view.metadata.block_table.copy_(torch.arange(1, 21)[None])
        backend.prepare(view.metadata)
        context = op.ForwardContext(backend, view.metadata, kv.key_caches, kv.value_caches, config.head_size**-0.5)
        with torch.inference_mode(), op.forward_context(context):
            outputs.append(forward(view.token_ids, view.positions).clone())
    ours, theirs = outputs[1], outputs[0]
    assert ours.shape == theirs.shape == (num_tokens, config.hidden_size)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max(), f"{num_tokens} tokens"


def test_c35_one_code_serves_every_number_of_tokens(decoder: Decoder, made: CompiledModel) -> None:
    """1 included, which a compiler likes to take for a constant; nothing is traced or compiled again."""
    before = dict(torch._dynamo.utils.counters["stats"]), dict(torch._dynamo.utils.counters["inductor"])
    for num_tokens in (1, 2, 3, EXACT, 5, 17, 34, 64):
        check(decoder, made, num_tokens)
    after = dict(torch._dynamo.utils.counters["stats"]), dict(torch._dynamo.utils.counters["inductor"])
    assert after == before


def test_classes_of_their_own_where_widths_differ(made: CompiledModel) -> None:
    """Pieces 0…3: the first, two middles of different width, the last; fusion saves kernels in each."""
    assert [p.cls for p in made.forward.program.pieces] == [0, 1, 2, 3]
    assert [c.pieces for c in made.report.classes] == [1, 1, 1, 1]
    for c in made.report.classes:
        assert 0 < c.kernels_after < c.kernels_before and "def call" in c.code
        assert set(made.forward.classes[c.index].exact) == {EXACT}
    assert not made.report.from_cache and made.report.saved


@pytest.fixture
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def trace(*_: object) -> None:
        raise AssertionError("a warm start traces nothing")

    monkeypatch.setattr(compiled_module, "_trace", trace)
    yield


def test_a_warm_start_reads_trace_and_code(decoder, made, folder, no_tracing) -> None:  # type: ignore[no-untyped-def]
    warm = compile_model(decoder, compile_sizes=[EXACT], cache=CompileCache(folder))
    assert warm.report.from_cache and warm.report.trace_ms == warm.report.compile_ms == 0
    assert warm.forward.program == made.forward.program
    for num_tokens in (1, EXACT, 9):
        check(decoder, warm, num_tokens)


def test_c36_a_copied_cache_works(decoder, made, folder, tmp_path, no_tracing) -> None:  # type: ignore[no-untyped-def]
    """Under another path, the original out of reach; nothing in it names a folder of this machine."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    (program,) = copy.glob("*/program.json")
    assert str(folder) not in json.dumps(json.loads(program.read_text())["program"])
    hidden = folder.rename(folder.with_name("hidden"))
    try:
        warm = compile_model(decoder, compile_sizes=[EXACT], cache=CompileCache(copy))
        check(decoder, warm, 7)
    finally:
        hidden.rename(folder)


@pytest.mark.parametrize("damage", ["truncated", "missing", "not json", "another schema"])
def test_c36_a_damaged_entry_is_one_warning_and_goes(made, folder, tmp_path, damage: str) -> None:  # type: ignore[no-untyped-def]
    shutil.copytree(folder, tmp_path / "c")
    cache = CompileCache(tmp_path / "c")
    (entry,) = (tmp_path / "c").iterdir()
    binary = sorted(entry.glob("*.bin"))[0]
    if damage == "truncated":
        binary.write_bytes(binary.read_bytes()[:-100])
    elif damage == "missing":
        binary.unlink()
    else:
        (entry / "program.json").write_text('{"program": {}}' if damage == "another schema" else "{")
    with pytest.warns(UserWarning, match="compiled anew") as caught:
        assert cache.load(entry.name) is None
    assert len(caught) == 1 and not entry.exists()
    assert cache.load(entry.name) is None, "and no second warning"


def test_c37_a_folder_that_cannot_be_written_is_one_warning(made, tmp_path) -> None:  # type: ignore[no-untyped-def]
    blocked = tmp_path / "file"
    blocked.write_text("")
    program, classes, reports = made.forward.program, made.forward.classes, made.report.classes
    with pytest.warns(UserWarning, match="was not kept") as caught:
        assert CompileCache(blocked / "sub").save("key", program, classes, reports) is False
    assert len(caught) == 1


def test_c37_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LABKIT_CACHE", raising=False)
    monkeypatch.setattr(compile_cache.Path, "home", staticmethod(no_home))
    assert compile_cache.default_folder().name == "compile"
    monkeypatch.setenv("LABKIT_CACHE", "~no-such-user/cache")
    assert compile_cache.default_folder().name == "compile"


def test_the_cache_can_be_switched_off(made, folder, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv(compile_cache.DISABLE, "1")
    (entry,) = [e for e in folder.iterdir() if not e.name.startswith(".")]
    assert CompileCache(folder).load(entry.name) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = CompileCache(tmp_path / "new").save("k", made.forward.program, made.forward.classes, [])
    assert saved is False and not (tmp_path / "new").exists()


def test_two_processes_may_save_the_same_pass(made, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The second finds the folder there: both are content, nothing half-written stays."""
    for _ in range(2):
        cache = CompileCache(tmp_path)
        assert cache.save("same", made.forward.program, made.forward.classes, made.report.classes)
    assert [e.name for e in tmp_path.iterdir()] == ["same"]


def test_the_key_names_what_the_code_depends_on(decoder: Decoder) -> None:
    base = compiled_module._factors(decoder, ("a",), (1,))
    assert cache_key(base) == cache_key(dict(reversed(base.items())))
    others = [
        compiled_module._factors(decoder, (), (1,)),
        compiled_module._factors(decoder, ("a",), (1, 2)),
        {**base, "dtype": "torch.bfloat16"},
        {**base, "code": "0"},
        {**base, "config": {**base["config"], "rope_theta": 123.0}},
        {**base, "device": {"type": "cuda", "name": "NVIDIA H200"}},
    ]
    assert len({cache_key(x) for x in [base, *others]}) == 1 + len(others)
