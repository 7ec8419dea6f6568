"""The kernels between matrix products and the cache write, in the interpreter, against formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch

from labkit.models import kernels
from labkit.paging import cache_write

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # silu(−10⁴) is meant to be 0
]

DTYPES = [torch.float32, torch.float16]
HEADS = [(9, 3, 64), (4, 2, 80), (2, 1, 96), (6, 6, 32)]  # query heads, KV heads, head size


def close(got: torch.Tensor, exact: torch.Tensor) -> None:
    """Within two roundings of the dtype."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=2 * eps, atol=2 * eps)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float = 100.0) -> torch.Tensor:
    """Complex multiplication by e^(i · position · frequency): an independent way to say what rotation is."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(len(positions), half).double(), positions.double()[:, None] * frequency)[:, None]
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat([z.real, z.imag], -1)


def table(positions: int, head_size: int, theta: float = 100.0) -> torch.Tensor:
    half = head_size // 2
    angle = torch.outer(torch.arange(positions).double(), theta ** (-torch.arange(half, dtype=torch.float64) / half))
    return torch.cat([angle.cos(), angle.sin()], -1).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [576, 64, 2048, 100])
def test_rms_norm(size: int, dtype: torch.dtype, launches: list[str]) -> None:
    x, weight = torch.randn(5, size, dtype=dtype), torch.randn(size, dtype=dtype)
    before = x.clone()
    got = kernels.rms_norm(x, weight, 1e-5)
    assert launches == ["rms_norm_kernel"] and torch.equal(x, before) and got.is_contiguous()
    close(got, normed(x, weight, 1e-5))
    tiny = torch.full((1, size), 1e-4, dtype=dtype)  # eps counts here
    close(kernels.rms_norm(tiny, weight, 1e-5), normed(tiny, weight, 1e-5))


def test_rms_norm_of_heads_inside_a_fused_projection() -> None:
    fused, weight = torch.randn(3, 8, 64), torch.randn(64)
    for heads in (slice(0, 5), slice(5, 7)):
        close(kernels.rms_norm(fused[:, heads], weight, 1e-6), normed(fused[:, heads], weight, 1e-6))
    assert kernels.rms_norm(torch.empty(0, 64), weight, 1e-6).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_is_one_launch_and_updates_the_stream(dtype: torch.dtype, launches: list[str]) -> None:
    x, residual, weight = (torch.randn(5, 576).to(dtype) for _ in range(3))
    weight = weight[0].contiguous()
    total = x + residual  # rounded to the dtype, as transformers' residual stream is
    got, stream = kernels.add_rms_norm(x.clone(), residual, weight, 1e-5)
    assert launches == ["rms_norm_kernel"]
    assert stream is residual and torch.equal(stream, total)
    close(got, normed(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemmas_norm_multiplies_by_one_more_and_rounds_once(dtype: torch.dtype) -> None:
    """A weight below half precision's step at 1 still counts: 1 + weight is never stored."""
    x, residual, weight = torch.randn(5, 96).to(dtype), torch.randn(5, 96), (torch.randn(96) * 1e-4).to(dtype)
    plus = 1 + weight.double()
    close(kernels.rms_norm(x, weight, 1e-6, True), normed(x, plus, 1e-6))
    got, stream = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6, True)
    close(got, normed(residual + x.float(), plus, 1e-6))
    assert torch.equal(stream, residual + x.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: "x".join(map(str, h)))
def test_rotary_in_place_on_views(heads: tuple[int, int, int], dtype: torch.dtype, launches: list[str]) -> None:
    num_heads, kv, size = heads
    fused = torch.randn(4, num_heads + 2 * kv, size).to(dtype)
    before, positions = fused.clone(), torch.tensor([0, 3, 40, 7])
    kernels.rotary_(fused[:, :num_heads], fused[:, num_heads : num_heads + kv], positions, table(64, size))
    assert launches == ["rotary_kernel"]
    both = num_heads + kv
    close(fused[:, :both], rotated(before[:, :both], positions))
    assert torch.equal(fused[:, both:], before[:, both:]), "V must not turn"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1536, 96])
def test_silu_and_mul(size: int, dtype: torch.dtype, launches: list[str]) -> None:
    x = (torch.randn(3, 2 * size) * 4).to(dtype)
    got = kernels.silu_and_mul(x)
    gate, up = x.double().chunk(2, -1)
    close(got, gate * torch.sigmoid(gate) * up)
    assert launches == ["silu_and_mul_kernel"]
    extreme = torch.tensor([[-1e4, 1e4, 1.0, 1.0]], dtype=dtype)
    assert kernels.silu_and_mul(extreme).tolist() == [[0.0, torch.tensor(1e4, dtype=dtype).item()]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_and_mul(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 2 * 1536) * 4).to(dtype)
    gate, up = x.double().chunk(2, -1)
    close(kernels.gelu_tanh_and_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up)
    extreme = torch.tensor([[-100.0, 100.0, 1.0, 1.0]], dtype=dtype)
    assert kernels.gelu_tanh_and_mul(extreme).tolist() == [[0.0, 100.0]]


SLOTS = torch.tensor([17, -1, 63, 32, 20, -1])


def expected_cache(key: torch.Tensor, blocks: int, block_size: int, heads: int, size: int) -> torch.Tensor:
    cache = torch.full((blocks, block_size, heads, size), math.nan, dtype=key.dtype)
    for row, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            cache[slot // block_size, slot % block_size] = key[row]
    return cache


@pytest.mark.parametrize("path", [cache_write.write_kv_torch, cache_write.write_kv_triton, cache_write.write_kv])
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: "x".join(map(str, h)))
def test_write_kv_hits_its_slots_and_nothing_else(path, heads: tuple[int, int, int]) -> None:  # type: ignore[no-untyped-def]
    """Slot −1 is written by nobody (−1 is the last slot of the last page in Python); inputs and caches are views."""
    num_heads, kv, size = heads
    fused = torch.randn(6, num_heads + 2 * kv, size)
    key, value = fused[:, num_heads : num_heads + kv], fused[:, num_heads + kv :]
    # A page before the caches: a kernel that writes slot −1 would land there, or outside all memory.
    both = torch.full((6, 2, 16, kv, size), math.nan)
    key_cache, value_cache = both[1:].unbind(1)
    path(key, value, key_cache, value_cache, SLOTS)
    for cache, rows in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache.nan_to_num(9.0), expected_cache(rows, 5, 16, kv, size).nan_to_num(9.0))
    assert both[0].isnan().all()


def test_write_kv_is_one_launch_and_none_for_no_tokens(launches: list[str]) -> None:
    key, cache = torch.randn(6, 2, 32), torch.zeros(5, 16, 2, 32)
    cache_write.write_kv_triton(key, key, cache, cache.clone(), SLOTS)
    assert launches == ["write_kv_kernel"]
    cache_write.write_kv_triton(key[:0], key[:0], cache, cache, SLOTS[:0])
    assert launches == ["write_kv_kernel"]
    with pytest.raises(ValueError, match="last dimension of key "):
        cache_write.write_kv_triton(key.transpose(1, 2).contiguous().transpose(1, 2), key, cache, cache, SLOTS)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda h: "x".join(map(str, h)))
def test_rotary_and_write_kv_is_one_launch(heads: tuple[int, int, int], norm: bool, launches: list[str]) -> None:
    num_heads, kv, size = heads
    fused = torch.randn(6, num_heads + 2 * kv, size)
    before, positions = fused.clone(), torch.tensor([5, 0, 9, 63, 1, 0])
    query, key, value = fused.split([num_heads, kv, kv], dim=1)
    weights = {"query_weight": torch.randn(size), "key_weight": torch.randn(size)} if norm else {}
    guarded = torch.full((2, 5, 16, kv, size), math.nan)  # as above: a page before each cache
    key_cache, value_cache = guarded[:, 1:]
    kernels.rotary_and_write_kv(
        query, key, value, positions, table(64, size), key_cache, value_cache, SLOTS, **weights, eps=1e-6
    )
    assert launches == ["rotary_kernel"]
    old_query, old_key = before[:, :num_heads].double(), before[:, num_heads : num_heads + kv].double()
    if norm:
        old_query = normed(old_query, weights["query_weight"], 1e-6)
        old_key = normed(old_key, weights["key_weight"], 1e-6)
    torch.testing.assert_close(query.double(), rotated(old_query, positions), atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(key.double(), rotated(old_key, positions), atol=2e-6, rtol=1e-6)
    assert torch.equal(value, before[:, num_heads + kv :])
    for cache, rows in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache.nan_to_num(9.0), expected_cache(rows, 4, 16, kv, size).nan_to_num(9.0))
    assert guarded[:, 0].isnan().all()


def test_wrong_tables_and_views_are_refused() -> None:
    fused = torch.randn(2, 4, 32)
    with pytest.raises(ValueError, match="cos_sin must be contiguous"):
        kernels.rotary_(fused[:, :2], fused[:, 2:], torch.tensor([0, 1]), table(8, 64))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.rms_norm(torch.randn(8, 4).T, torch.randn(8), 1e-5)
