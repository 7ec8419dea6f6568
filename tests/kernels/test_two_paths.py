"""CPU and GPU run the same arithmetic: each small kernel against the torch path of `labkit.models.layers`.

The kernels of the interpreter against the operators of torch, in the forms a decoder calls them in.
"""

from __future__ import annotations

import pytest
import torch

from labkit.models import kernels, layers
from labkit.paging.cache_write import write_kv_torch

pytestmark = pytest.mark.usefixtures("interpreter")

DTYPES = [torch.float32, torch.float16]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to two roundings: a sum in another order may fall on the other side of one."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    eps = 2 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=eps, atol=eps)


def seeded(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype) -> None:
    fused, weight = seeded(3, 8, 64, dtype=dtype), seeded(64, dtype=dtype, seed=1)
    for x in (fused[:, 2:7], fused[:, 0]):
        close(kernels.rms_norm(x, weight, 1e-6), layers.rms_norm(x, weight, 1e-6))
        close(kernels.rms_norm(x, weight, 1e-6, True), layers.rms_norm(x, weight, 1e-6, True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [576, 100])
def test_add_rms_norm_with_the_decoders_fp32_residual(size: int, dtype: torch.dtype) -> None:
    """The stream is fp32 whatever the dtype of x: what x adds below half precision's last bit is kept."""
    x, weight = seeded(5, size, dtype=dtype), seeded(size, dtype=dtype, seed=1)
    residual = seeded(5, size, seed=2) * 100
    y, stream = layers.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    got, got_stream = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert got_stream.dtype == torch.float32 and torch.equal(got_stream, stream)
    assert torch.equal(got_stream, residual + x.float())
    if dtype != torch.float32:
        assert not torch.equal(got_stream, got_stream.to(dtype).float()), "the stream was rounded to the dtype of x"
    close(got, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = seeded(3, 200, dtype=dtype) * 3
    close(kernels.silu_and_mul(x), layers.silu_and_mul(x))
    # torch's 1 + tanh loses what is far below 1 where the kernel's sigmoid does not.
    eps = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(kernels.gelu_tanh_and_mul(x), layers.gelu_tanh_and_mul(x), rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (3, 1, 80)], ids=lambda h: "x".join(map(str, h)))
def test_the_fused_kernel_equals_the_separate_steps(
    heads: tuple[int, int, int], normed: bool, dtype: torch.dtype
) -> None:
    """Norms, rotation and cache write in one launch, against one operator after the other; caches are interleaved."""
    num_heads, kv, size = heads
    table = layers.rotary_table(64, layers.rotary_frequencies(size, 1e4, None))
    positions, slots = torch.tensor([5, 0, 63, 9]), torch.tensor([17, -1, 47, 2])
    weights = (seeded(size, dtype=dtype, seed=1), seeded(size, dtype=dtype, seed=2)) if normed else (None, None)

    q, k, v = seeded(4, num_heads + 2 * kv, size, dtype=dtype).split([num_heads, kv, kv], dim=1)
    if weights[0] is not None and weights[1] is not None:
        q, k = layers.rms_norm(q, weights[0], 1e-6), layers.rms_norm(k, weights[1], 1e-6)
    layers.rotary_(q, k, positions, table)
    caches = torch.full((3, 2, 16, kv, size), 7.0, dtype=dtype)
    write_kv_torch(k, v, *caches.unbind(1), slots)

    fused = seeded(4, num_heads + 2 * kv, size, dtype=dtype)
    query, key, value = fused.split([num_heads, kv, kv], dim=1)
    # A page before the caches: a kernel that writes slot −1 would land there, or outside all memory.
    guarded = torch.full((4, 2, 16, kv, size), 7.0, dtype=dtype)
    got = guarded[1:]
    kernels.rotary_and_write_kv(
        query, key, value, positions, table, *got.unbind(1), slots,
        query_weight=weights[0], key_weight=weights[1], eps=1e-6,
    )  # fmt: skip
    for a, b in ((query, q), (key, k), (value, v), (got, caches)):
        # Rotation adds two products: as many roundings more, at the size of a normed value.
        torch.testing.assert_close(a, b, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    assert (guarded[0] == 7.0).all(), "slot −1 was written"
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    assert (got.transpose(1, 2).flatten(0, 1)[untouched] == 7.0).all(), "a slot that is nobody's was written"
