"""Cross-entropy in chunks against float64, and against what must hold exactly."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_helpers import tensor
from torch import Tensor

from minillama.model.kernels import IGNORED, LossOptions, linear_cross_entropy
from minillama.model.kernels.cross_entropy import _loss_and_gradient_

OPTIONS = [LossOptions(), LossOptions(z_loss=0.1), LossOptions(softcap=2.0), LossOptions(0.1, 2.0)]
MODULE = sys.modules["minillama.model.kernels.cross_entropy"]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three rows, so that a few rows are several."""
    monkeypatch.setattr(MODULE, "CHUNK_NUMBERS", 1)
    monkeypatch.setattr(MODULE, "CHUNK_ROWS", 3)


def draw_targets(n: int, n_vocab: int) -> Tensor:
    targets = torch.randint(n_vocab, (n,), generator=torch.Generator().manual_seed(5))
    targets[2::7] = IGNORED
    return targets


def exact(
    x: Tensor, weight: Tensor, targets: Tensor, options: LossOptions = OPTIONS[0]
) -> tuple[Tensor, Tensor]:
    """The equations, and nothing else, over the rows that count."""
    counted = targets != IGNORED
    logits = x[counted] @ weight.T
    if options.softcap:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    top = logits.amax(-1, keepdim=True) if len(logits) else logits[:, :1]
    log_z = (logits - top).exp().sum(-1).log() + top[:, 0]
    loss = (log_z - logits[torch.arange(len(logits)), targets[counted]]).sum()
    return loss + options.z_loss * log_z.square().sum(), loss


def with_gradients(
    function: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    weight: Tensor,
    *args: object,
    scale: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    objective, loss = function(x, weight, *args)
    (scale * objective).backward()
    assert x.grad is not None
    assert weight.grad is not None
    return objective.detach(), loss.detach(), x.grad, weight.grad


# ------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize(
    ("n_vocab", "n"), [(2, 1), (2, 65), (17, 5), (17, 300), (513, 64), (513, 300), (33_000, 3)]
)
@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients_are_those_of_float64(
    kernels: str, n_vocab: int, n: int, options: LossOptions
) -> None:
    targets = draw_targets(n, n_vocab)
    for dtype in (torch.float32, torch.float64):
        x, weight = tensor(n, 7).to(dtype), tensor(n_vocab, 7, seed=1).to(dtype)
        ours = with_gradients(linear_cross_entropy, x, weight, targets, options)
        true = with_gradients(exact, x.double(), weight.double(), targets, options)
        tolerance = 64 * torch.finfo(dtype).eps
        for got, want in zip(ours, true, strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
        sums = linear_cross_entropy(x, weight, targets, options)
        torch.testing.assert_close(sums, ours[:2], rtol=tolerance, atol=0)
        assert not sums[1].requires_grad


def test_a_vocabulary_of_more_than_one_chunk(kernels: str) -> None:
    x, weight, targets = tensor(300, 5), tensor(4001, 5, seed=1), draw_targets(300, 4001)
    ours = with_gradients(linear_cross_entropy, x, weight, targets)
    torch.testing.assert_close(ours, with_gradients(exact, x, weight, targets))


@settings(deadline=None)
@given(
    n=st.integers(0, 20),
    dim=st.integers(1, 9),
    n_vocab=st.integers(1, 70),
    options=st.sampled_from(OPTIONS),
    ignored=st.lists(st.integers(0, 20)),
    strided=st.booleans(),
)
def test_any_shape_and_strides(
    n: int, dim: int, n_vocab: int, options: LossOptions, ignored: list[int], strided: bool
) -> None:
    x, weight = tensor(dim, n).T, tensor(n_vocab, 2 * dim, seed=1)[:, ::2]
    targets = (torch.arange(2 * n) * 7 % n_vocab)[::2]
    targets[[place for place in ignored if place < n]] = IGNORED
    if not strided:
        x, weight, targets = x.contiguous(), weight.contiguous(), targets.contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "CHUNK_NUMBERS", 1)
        patch.setattr(MODULE, "CHUNK_ROWS", 3)
        ours = with_gradients(linear_cross_entropy, x, weight, targets, options)
    torch.testing.assert_close(ours, with_gradients(exact, x, weight, targets, options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernels: str, dtype: torch.dtype, small_chunks: None) -> None:
    x, weight = tensor(20, 8).to(dtype), tensor(33, 8, seed=1).to(dtype)
    targets = draw_targets(20, 33)
    ours = with_gradients(linear_cross_entropy, x, weight, targets)
    true = with_gradients(exact, x.double(), weight.double(), targets)
    for got, want, kind in zip(ours, true, [torch.float32] * 2 + [dtype] * 2, strict=True):
        assert got.dtype == kind
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want, rtol=4 * eps, atol=8 * eps)


def test_autocast(kernels: str, small_chunks: None) -> None:
    x, weight, targets = tensor(20, 8).float(), tensor(33, 8, seed=1).float(), draw_targets(20, 33)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = with_gradients(linear_cross_entropy, x, weight, targets)
    true = with_gradients(exact, x.double(), weight.double(), targets)
    for got, want in zip(ours, true, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=0.03, atol=0.06)


# --------------------------------------------------------------------------------- odd targets


@pytest.mark.parametrize("target", [17, -1, -101, 2**40])
@pytest.mark.parametrize("place", [0, 7])
def test_a_target_out_of_range_is_refused(
    kernels: str, small_chunks: None, target: int, place: int
) -> None:
    x, weight = tensor(8, 3).requires_grad_(), tensor(17, 3, seed=1).requires_grad_()
    targets = torch.arange(8)
    targets[place] = target
    with pytest.raises(IndexError, match="target"):
        linear_cross_entropy(x, weight, targets)
    with pytest.raises(IndexError, match="target"):
        linear_cross_entropy(x.detach(), weight.detach(), targets)
    assert x.grad is None
    logits = tensor(8, 17)
    before = logits.clone()
    with pytest.raises(IndexError, match="target"):
        _loss_and_gradient_(logits, targets, 0.0, True)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_targets_of_another_dtype_are_refused(kernels: str, dtype: torch.dtype) -> None:
    targets = torch.zeros(4, dtype=dtype)
    with pytest.raises(TypeError, match=r"targets are torch\..*; convert them to torch.int64"):
        linear_cross_entropy(tensor(4, 5), tensor(7, 5), targets)


@pytest.mark.parametrize("n", [0, 8])
@pytest.mark.parametrize("options", OPTIONS)
def test_where_no_target_counts_the_loss_is_0(
    kernels: str, small_chunks: None, n: int, options: LossOptions
) -> None:
    targets = torch.full((n,), IGNORED)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, weight = tensor(n, 3).to(dtype), tensor(17, 3, seed=1).to(dtype)
        for part in with_gradients(linear_cross_entropy, x, weight, targets, options):
            assert part.isfinite().all()
            assert not part.any()


def test_what_is_ignored_may_be_no_number(kernels: str) -> None:
    logits, targets = tensor(3, 40), torch.tensor([1, IGNORED, 2])
    want = F.cross_entropy(logits, targets, reduction="none")
    for number in (math.nan, math.inf, -math.inf):
        spoiled = logits.clone()
        spoiled[1, 5:] = number
        loss, log_z = _loss_and_gradient_(spoiled, targets, 0.1, True)
        torch.testing.assert_close(loss, want)
        assert log_z[1] == 0
        assert not spoiled[1].any()


# ------------------------------------------------------------------------------- hostile numbers


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n_vocab", [3, 16, 17, 40])
def test_what_is_not_a_number_gives_what_torch_gives(
    kernels: str, number: float, n_vocab: int
) -> None:
    logits = tensor(2 * n_vocab + 1, n_vocab)
    at = torch.arange(n_vocab)
    logits[at, at] = number  # of another token than the target
    logits[n_vocab + at, at] = number  # of the target
    targets = torch.cat(((at + 1) % n_vocab, at, torch.tensor([0])))
    learning = logits.clone().requires_grad_()
    want = F.cross_entropy(learning, targets, reduction="none")
    want.sum().backward()
    loss, _ = _loss_and_gradient_(logits, targets, 0.0, True)
    assert learning.grad is not None
    if kernels == "compiled":
        torch.testing.assert_close(loss, want.detach(), equal_nan=True)
        torch.testing.assert_close(logits, learning.grad, equal_nan=True)
    else:  # torch.logsumexp takes an infinite sum for infinite, its cross_entropy for NaN
        assert torch.equal(loss.isfinite(), want.isfinite())
        assert torch.equal(logits.isfinite().all(-1), learning.grad.isfinite().all(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_logits_do_not_overflow(kernels: str, dtype: torch.dtype, size: float) -> None:
    logits = (size * tensor(9, 40)).to(dtype)
    targets = draw_targets(9, 40)
    learning = logits.double().clone().requires_grad_()
    want = F.cross_entropy(learning, targets, reduction="none")
    want.sum().backward()
    loss, _ = _loss_and_gradient_(logits, targets, 0.0, True)
    assert logits.isfinite().all()
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), learning.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [2, 32])
def test_the_exponential_is_right_to_the_last_bits(
    kernels: str, dtype: torch.dtype, place: int
) -> None:
    if kernels == "plain":
        pytest.skip("the plain version rounds the exponent")
    lowest, rtol = (-87.0, 2e-7) if dtype == torch.float32 else (-708.0, 1e-15)
    x = torch.linspace(lowest, 0, 100_003, dtype=torch.float64).to(dtype)
    logits = torch.full((len(x), 35), -math.inf, dtype=dtype)
    logits[:, 0], logits[:, place] = 0, x
    _loss_and_gradient_(logits, torch.ones(len(x), dtype=torch.int64), 0.0, True)
    ratio = logits[:, place].double() / logits[:, 0].double()  # the sum cancels
    roundings = torch.finfo(dtype).eps
    torch.testing.assert_close(ratio, x.double().exp(), rtol=rtol + roundings, atol=0)


# ----------------------------------------------------------------------------- exact properties


def test_rows_do_not_see_each_other(kernels: str) -> None:
    logits, targets = tensor(40, 123).float(), draw_targets(40, 123)
    whole = logits.clone()
    loss, log_z = _loss_and_gradient_(whole, targets, 0.1, True)
    for row in (0, 2, 39):
        alone = logits[[row]].clone()
        loss_of_row, log_z_of_row = _loss_and_gradient_(alone, targets[[row]], 0.1, True)
        for got, want in ((alone, whole), (loss_of_row, loss), (log_z_of_row, log_z)):
            if kernels == "compiled":
                assert torch.equal(got[0], want[row])
            else:
                torch.testing.assert_close(got[0], want[row])


@pytest.mark.parametrize(("rows", "n_vocab"), [(2048, 64), (101, 1001), (3, 33_000)])
def test_the_same_to_the_bit_on_any_number_of_threads(
    kernels: str, threads: Callable[[int], None], rows: int, n_vocab: int
) -> None:
    logits, targets = tensor(rows, n_vocab).float(), draw_targets(rows, n_vocab)
    results = []
    for n in (1, 1, 2, 2, 3):
        threads(n)
        grad = logits.clone()
        results.append((*_loss_and_gradient_(grad, targets, 0.1, True), grad))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            if kernels == "compiled":
                assert torch.equal(got, want)
            else:
                torch.testing.assert_close(got, want)


def test_two_runs_agree_to_the_bit(kernels: str) -> None:
    args = tensor(600, 24).float(), tensor(2500, 24, seed=1).float(), draw_targets(600, 2500)
    first, second = (with_gradients(linear_cross_entropy, *args, OPTIONS[3]) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


# ----------------------------------------------------------------------------- differentiation


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("x_learns", "w_learns"), [(True, True), (True, False), (False, True)])
def test_first_and_second_gradients(
    kernels: str, small_chunks: None, options: LossOptions, x_learns: bool, w_learns: bool
) -> None:
    x = tensor(5, 3).requires_grad_(x_learns)
    weight = tensor(7, 3, seed=1).requires_grad_(w_learns)
    targets = torch.tensor([0, 6, IGNORED, 3, 3])
    function = lambda x, w: linear_cross_entropy(x, w, targets, options)[0]  # noqa: E731
    assert torch.autograd.gradcheck(function, (x, weight))
    assert torch.autograd.gradgradcheck(function, (x, weight))


def test_the_backward_pass_can_be_run_twice(kernels: str) -> None:
    x, weight = tensor(5, 3).float().requires_grad_(), tensor(7, 3).float().requires_grad_()
    objective = 3 * linear_cross_entropy(x, weight, torch.arange(5))[0]
    first, second = (
        torch.autograd.grad(objective, (x, weight), retain_graph=True) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own use
def test_function_transforms(kernels: str) -> None:
    x, weight, targets = tensor(3, 5, 4), tensor(7, 4, seed=1), torch.tensor([0, 6, -100, 3, 3])
    function = lambda x: linear_cross_entropy(x, weight, targets, OPTIONS[3])[0]  # noqa: E731
    true = lambda x: exact(x, weight, targets, OPTIONS[3])[0]  # noqa: E731
    want = torch.stack([true(row) for row in x])
    torch.testing.assert_close(torch.func.vmap(function)(x), want)
    torch.testing.assert_close(torch.func.grad(function)(x[0]), torch.func.grad(true)(x[0]))
    direction = tensor(5, 4, seed=2)
    _, want_tangent = torch.autograd.functional.jvp(true, x[0], direction)
    value, tangent = torch.func.jvp(function, (x[0],), (direction,))
    torch.testing.assert_close((value, tangent), (want[0], want_tangent))
    weight.requires_grad_()  # as a model's is
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[0], direction)
        forward_mode = torch.autograd.forward_ad.unpack_dual(function(dual)).tangent
    torch.testing.assert_close(forward_mode, want_tangent)


# ---------------------------------------------------------------------------------------- memory

PEAK = """
import resource, torch
from minillama.model.kernels import linear_cross_entropy
torch.manual_seed(0)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def step(n):
    x, weight = torch.randn(n, 16, requires_grad=True), torch.randn(32000, 16, requires_grad=True)
    linear_cross_entropy(x, weight, torch.arange(n))[0].backward()
step(2)
before = peak()
step(2048)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_never_holds_all_logits(kernels: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120
    )
    logits_mib = 2048 * 32000 * 4 / 2**20
    assert float(done.stdout) < 0.6 * logits_mib
