"""The products against float64, at the sizes that tiles leave over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import tensor
from torch import Tensor

from minillama.model.kernels import weight_gradient
from minillama.model.kernels.library import load
from minillama.model.kernels.linear import product


def exact(grad: Tensor, x: Tensor) -> Tensor:
    return (grad.double()[:, :, None] * x.double()[:, None, :]).sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_size_of_tile(kernels: str, dtype: torch.dtype) -> None:
    for n_out in (*range(1, 8), 12, 17):
        for n_in in (*range(1, 18), 31, 32, 48, 63, 64, 65, 80, 130):
            grad, x = tensor(5, n_out).to(dtype), tensor(5, n_in, seed=1).to(dtype)
            got, true = weight_gradient(grad, x), exact(grad, x)
            assert got.dtype == dtype
            tolerance = 64 * torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), true, rtol=tolerance, atol=tolerance)
            before = tensor(n_out, n_in, seed=2).to(dtype)
            into = before.clone()
            assert weight_gradient(grad, x, into) is into
            torch.testing.assert_close(
                into.double(), before.double() + true, rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("transposed", [False, True])
def test_every_size_of_tile_of_the_other_two(kernels: str, transposed: bool) -> None:
    for n in (*range(1, 8), 12, 17):
        for n_out in (*range(1, 18), 31, 32, 48, 63, 64, 65, 80, 130):
            for n_in in (1, 5, 300):
                x = tensor(n, n_in).float()
                weight = tensor(n_in, n_out, seed=1).float() if transposed else None
                weight = tensor(n_out, n_in, seed=1).float() if weight is None else weight.t()
                true = (x.double()[:, None] * weight.double()).sum(-1)
                torch.testing.assert_close(product(x, weight).double(), true, rtol=1e-4, atol=1e-4)
    x = tensor(2, 3, 1, 20).float()[:, :, :, ::2]
    weight = tensor(7, 10, seed=1).float()
    torch.testing.assert_close(product(x, weight), x @ weight.t())
    with pytest.raises(RuntimeError):
        product(x, weight[:, :9])


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1000])
def test_rows_that_go_by_in_parts(kernels: str, n: int) -> None:
    grad, x = tensor(n, 70).float(), tensor(n, 75, seed=1).float()
    torch.testing.assert_close(
        weight_gradient(grad, x).double(), exact(grad, x), rtol=1e-4, atol=1e-4
    )


def test_long_sums_keep_what_is_small(kernels: str) -> None:
    if kernels == "plain" or not load(torch.float32).matmul_pays():
        pytest.skip("torch sums one term after another")
    grad, x = torch.full((100_000, 1), 0.1), torch.ones(100_000, 16)
    true = 100_000 * grad[0, 0].double()
    for got in (weight_gradient(grad, x), product(grad.t().contiguous(), x.t())):
        assert ((got.double() - true) / true).abs().max() < 1e-5


@settings(deadline=None)
@given(
    n=st.integers(0, 9),
    n_out=st.integers(0, 20),
    n_in=st.integers(0, 70),
    strided=st.booleans(),
    dtypes=st.sampled_from([("float32", "float32"), ("bfloat16", "float32"), ("float64",) * 2]),
)
def test_any_shape_strides_and_dtypes(
    n: int, n_out: int, n_in: int, strided: bool, dtypes: tuple[str, str]
) -> None:
    narrow, wide = (getattr(torch, name) for name in dtypes)
    grad, x = tensor(n, 2 * n_out).to(narrow), tensor(n, 2 * n_in, seed=1).to(narrow)
    grad, x = (grad[:, ::2], x[:, ::2]) if strided else (grad[:, :n_out], x[:, :n_in])
    into = tensor(n_in, n_out, seed=2).to(wide).t()  # not contiguous
    true, before = exact(grad, x), into.double().clone()
    tolerance = 16 * torch.finfo(narrow).eps
    torch.testing.assert_close(
        weight_gradient(grad, x).double(), true, rtol=tolerance, atol=tolerance
    )
    weight_gradient(grad, x, into)
    torch.testing.assert_close(into.double(), before + true, rtol=tolerance, atol=tolerance)


def test_any_number_of_threads_gives_the_same_bits(
    kernels: str, threads: Callable[[int], None]
) -> None:
    if kernels == "plain" or not load(torch.float32).matmul_pays():
        pytest.skip("torch promises no order of its sums")
    grad, x = tensor(700, 95).float(), tensor(700, 77, seed=1).float()
    weight = tensor(95, 77, seed=2).float()
    found = []
    for n in (1, 1, 2, 3, 5):
        threads(n)
        found.append([weight_gradient(grad, x), product(x, weight), product(grad, weight.t())])
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_a_number_reaches_what_it_is_multiplied_into(
    kernels: str, number: float
) -> None:
    for row, column in ((0, 0), (2, 16), (4, 18)):
        grad, x = tensor(5, 7).float(), tensor(5, 19, seed=1).float()
        x[row, column] = number
        grad[row, 3] = 0
        torch.testing.assert_close(weight_gradient(grad, x), grad.t() @ x, equal_nan=True)


def test_sizes_that_do_not_fit_are_refused(kernels: str) -> None:
    grad, x = tensor(5, 3).float(), tensor(5, 4).float()
    with pytest.raises(ValueError, match="must be dy"):
        weight_gradient(grad, x[:4])
    with pytest.raises(ValueError, match="must be dy"):
        weight_gradient(grad, x, torch.zeros(3, 5))
