"""Attention to the cache against float64, and against causal attention over the whole."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import tensor
from torch import Tensor

from minillama.model.kernels import (
    causal_attention,
    decode_attention,
    decode_attention_reference,
)
from minillama.model.rope import RotaryEmbedding, Rotation

HEADS = [(1, 1), (2, 1), (4, 2), (6, 6), (6, 1)]


def rotation_at(positions: Tensor, dim: int, dtype: torch.dtype) -> Rotation:
    rotation: Rotation = RotaryEmbedding(dim, 256)(positions, dtype)
    return rotation


def turn(x: Tensor, rotation: Rotation, row: int) -> Tensor:
    """Turn (…, K) by the one rotation of this row, as complex numbers."""
    cos, sin = (y.double().reshape(-1, x.shape[-1] // 2) for y in rotation)
    row = row if len(cos) > 1 else 0
    first, second = x.chunk(2, dim=-1)
    pairs = torch.complex(first, second) * torch.complex(cos[row], sin[row])
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def exact(
    qkv: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, length: int, pad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One row and one head at a time, in float64; returns y and the cache."""
    qkv, keys, values = qkv.double(), keys.double().clone(), values.double().clone()
    batch, n_kv_heads, _, dim = keys.shape
    n_heads = qkv.shape[2] - 2 * n_kv_heads
    y = torch.zeros(batch, 1, n_heads, dim, dtype=torch.float64)
    for b in range(batch):
        keys[b, :, length] = turn(qkv[b, 0, n_heads : n_heads + n_kv_heads], rotation, b)
        values[b, :, length] = qkv[b, 0, n_heads + n_kv_heads :]
        first = 0 if pad is None else min(int(pad[b]), length)
        for head in range(n_heads):
            kv = head // (n_heads // n_kv_heads)
            scores = keys[b, kv, first : length + 1] @ turn(qkv[b, 0, head], rotation, b)
            weights = (scores / math.sqrt(dim)).softmax(-1)
            y[b, 0, head] = weights @ values[b, kv, first : length + 1]
    return y, keys, values


def draw(
    batch: int, heads: tuple[int, int], dim: int, capacity: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = tensor(batch, 1, heads[0] + 2 * heads[1], dim).to(dtype)
    keys = tensor(batch, heads[1], capacity, dim, seed=1).to(dtype)
    return qkv, keys, tensor(batch, heads[1], capacity, dim, seed=2).to(dtype)


# ---------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("length", [0, 1, 2, 7, 15, 16, 17, 33, 100, 129])
@pytest.mark.parametrize("dim", [2, 6, 16, 24, 48, 80])
def test_values_are_those_of_float64(kernels: str, length: int, dim: int) -> None:
    heads = HEADS[(length + dim // 2) % len(HEADS)]
    for dtype in (torch.float32, torch.float64):
        for pad, room in ((None, 1), (torch.tensor([0, length // 2, length]), 5)):
            qkv, keys, values = draw(3, heads, dim, length + room, dtype)
            positions = torch.tensor([length])
            if pad is not None:
                positions = (positions - pad)[:, None]
            rotation = rotation_at(positions, dim, dtype)
            want, *want_cache = exact(qkv, rotation, keys, values, length, pad)
            old = keys.clone(), values.clone()
            y = decode_attention(qkv, rotation, keys, values, length, pad)
            assert y.dtype == dtype
            tolerance = 64 * torch.finfo(dtype).eps
            torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance)
            for cache, true, before in zip((keys, values), want_cache, old, strict=True):
                torch.testing.assert_close(cache.double(), true, rtol=tolerance, atol=tolerance)
                others = torch.arange(length + room) != length
                assert torch.equal(cache[:, :, others], before[:, :, others])
            assert torch.equal(values[:, :, length], qkv[:, 0, heads[0] + heads[1] :])


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(0, 3),
    length=st.integers(0, 20),
    room=st.integers(1, 3),
    half=st.integers(1, 20),
    n_kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    strided=st.booleans(),
    padded=st.booleans(),
)
def test_any_shape_and_strides(
    batch: int,
    length: int,
    room: int,
    half: int,
    n_kv_heads: int,
    group: int,
    strided: bool,
    padded: bool,
) -> None:
    dim, heads = 2 * half, (n_kv_heads * group, n_kv_heads)
    qkv, keys, values = draw(batch, heads, dim, 2 * (length + room), torch.float64)
    qkv, keys, values = qkv.transpose(2, 3).contiguous().transpose(2, 3), keys[:, :, ::2], values
    values = values[:, :, ::2]
    if not strided:
        qkv, keys, values = qkv.contiguous(), keys.contiguous(), values.contiguous()
    pad = torch.arange(2 * batch)[::2].clamp(max=length) if padded else None
    rotation = rotation_at(torch.tensor([length]), dim, torch.float64)
    want, *want_cache = exact(qkv, rotation, keys, values, length, pad)
    y = decode_attention(qkv, rotation, keys, values, length, pad)
    torch.testing.assert_close([y, keys, values], [want, *want_cache])


def test_equals_causal_attention_over_the_whole(kernels: str) -> None:
    for dtype in (torch.float32, torch.float64):
        for heads in HEADS:
            qkv = tensor(2, 40, heads[0] + 2 * heads[1], 24).to(dtype)
            rotation = rotation_at(torch.arange(40), 24, dtype)
            whole = causal_attention(qkv, rotation, *heads)
            keys, values = torch.zeros(2, 2, heads[1], 43, 24, dtype=dtype)
            for t in range(40):
                here = rotation_at(torch.tensor([t]), 24, dtype)
                y = decode_attention(qkv[:, [t]], here, keys, values, t, None)
                torch.testing.assert_close(y[:, 0], whole[:, t])


def test_half_precision_and_autocast_are_torchs(kernels: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        qkv, keys, values = draw(2, (4, 2), 6, 9, dtype)
        rotation = rotation_at(torch.tensor([8]), 6, dtype)
        mine, other = (keys.clone(), values.clone()), (keys.clone(), values.clone())
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            y = decode_attention(qkv, rotation, *mine, 8, None)
            want = decode_attention_reference(qkv, rotation, *other, 8, None)
        assert y.dtype == want.dtype
        assert torch.equal(y, want)
        assert torch.equal(mine[0], other[0])


def test_sizes_that_do_not_fit_never_reach_the_kernel(kernels: str) -> None:
    qkv, keys, values = draw(3, (4, 2), 6, 9, torch.float64)
    rotation = rotation_at(torch.tensor([8]), 6, torch.float64)
    two = rotation_at(torch.tensor([[8], [7]]), 6, torch.float64)
    for args in (
        (qkv[:2], rotation, keys, values, 8, None),
        (qkv, two, keys, values, 8, None),
        (qkv[..., :4], rotation, keys, values, 8, None),
        (qkv, rotation, keys, values, 8, torch.tensor([0, 1])),
    ):
        with pytest.raises(ValueError, match="must be qkv"):
            decode_attention(*args)
    pad = torch.tensor([0, 3, 8])
    y = decode_attention(qkv, rotation, keys, values, 8, pad)
    assert torch.equal(y[2, 0], values[2, :, 8].repeat_interleave(2, dim=0))
    same = decode_attention(qkv, rotation, keys, values, 8, pad.int())
    torch.testing.assert_close(same, y)


# ----------------------------------------------------------------------------- exact properties


def test_padding_and_what_comes_later_change_nothing(kernels: str) -> None:
    pad = torch.tensor([0, 3, 17])
    rotation = rotation_at((20 - pad)[:, None], 24, torch.float32)
    results = []
    for other in (0.0, 1e30):
        qkv, keys, values = draw(3, (4, 2), 24, 30, torch.float32)
        for row, n in enumerate(pad.tolist()):
            for cache in (keys, values):
                cache[row, :, :n] = other
                cache[row, :, 20:] = other
        results.append(decode_attention(qkv, rotation, keys, values, 20, pad))
    assert torch.equal(*results)


def test_rows_of_a_batch_do_not_see_each_other(kernels: str) -> None:
    pad = torch.tensor([0, 3, 17])
    rotation = rotation_at((20 - pad)[:, None], 24, torch.float32)
    qkv, keys, values = draw(3, (4, 2), 24, 30, torch.float32)
    whole = decode_attention(qkv, rotation, keys, values, 20, pad)
    for row in range(3):
        only = [row]
        here = Rotation(rotation.cos[only], rotation.sin[only])
        cache = keys[only], values[only]
        alone = decode_attention(qkv[only], here, *cache, 20, pad[only])
        if kernels == "compiled":
            assert torch.equal(alone[0], whole[row])
        else:
            torch.testing.assert_close(alone[0], whole[row])


def test_the_same_to_the_bit_on_any_number_of_threads(
    kernels: str, threads: Callable[[int], None]
) -> None:
    rotation = rotation_at(torch.tensor([250]), 48, torch.float32)
    results = []
    for n in (1, 1, 2, 2, 3):
        threads(n)
        qkv, keys, values = draw(4, (6, 2), 48, 256, torch.float32)
        results.append((decode_attention(qkv, rotation, keys, values, 250, None), keys, values))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            if kernels == "compiled":
                assert torch.equal(got, want)
            else:
                torch.testing.assert_close(got, want)


# ------------------------------------------------------------------------------- hostile numbers


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["key", "value", "query"])
def test_what_is_not_a_number_reaches_the_output(kernels: str, number: float, part: str) -> None:
    qkv, keys, values = draw(2, (1, 1), 24, 30, torch.float32)
    place = {"key": keys[0, 0, 5], "value": values[0, 0, 5], "query": qkv[0, 0, 0]}[part]
    place[3] = number
    rotation = rotation_at(torch.tensor([20]), 24, torch.float32)
    want = exact(qkv, rotation, keys, values, 20, None)[0]
    y = decode_attention(qkv, rotation, keys, values, 20, None)
    assert torch.equal(y.isnan(), want.isnan())
    torch.testing.assert_close(y[1].double(), want[1], rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow(kernels: str) -> None:
    qkv, keys, values = draw(2, (2, 1), 24, 30, torch.float64)
    qkv[:, :, :3] *= 100
    keys *= 100  # scores of some 10⁴
    rotation = rotation_at(torch.tensor([20]), 24, torch.float64)
    want = exact(qkv, rotation, keys, values, 20, None)[0]
    y = decode_attention(qkv, rotation, keys, values, 20, None)
    torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-9)
    qkv, keys, values = qkv.float() * 1e8, keys.float() * 1e8, values.float()
    assert (
        decode_attention(
            qkv, rotation_at(torch.tensor([20]), 24, torch.float32), keys, values, 20, None
        )
        .isfinite()
        .all()
    )


# ----------------------------------------------------------------------------- differentiation


def test_a_gradient_goes_through_torch(kernels: str) -> None:
    qkv, keys, values = draw(2, (2, 1), 4, 6, torch.float64)
    rotation = rotation_at(torch.tensor([4]), 4, torch.float64)

    def function(qkv: Tensor) -> Tensor:
        return decode_attention(qkv, rotation, keys.clone(), values.clone(), 4, None)

    assert torch.autograd.gradcheck(function, (qkv.requires_grad_(),))
