"""Gradients that are themselves differentiated, inside a model, against torch.func in float64.

torch.func takes none of the kernels, so it is an independent reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from minillama.config import ModelConfig
from minillama.model.transformer import Transformer

Function = Callable[[Transformer, Tensor], Tensor]


def loss(model: Transformer, tokens: Tensor) -> Tensor:
    return model.loss(tokens[:, :-1], tokens[:, 1:], z_loss=1e-2)


def logits(model: Transformer, tokens: Tensor) -> Tensor:
    return model(tokens).square().mean()


class Call(torch.nn.Module):
    """A function of a model as a module, for functional_call."""

    def __init__(self, model: Transformer, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, tokens: Tensor) -> Tensor:
        return self.function(self.model, tokens)


def relative_error(got: Tensor, want: Tensor) -> float:
    got = got.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-12))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("function", [loss, logits])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ffn_dim", [64, 72])  # one kernel for the whole MLP; SwiGLU's kernel
def test_first_and_second_gradients(
    kernels: str, ffn_dim: int, tied: bool, dtype: torch.dtype, function: Function
) -> None:
    config = ModelConfig(
        vocab_size=40, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=ffn_dim,
        max_seq_len=16, tie_embeddings=tied, logit_softcap=20.0, init="fan_in",
    )  # fmt: skip
    model = Transformer(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 40, (2, 13), generator=generator)
    weights = dict(model.named_parameters())
    directions = {
        name: torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for name, weight in weights.items()
    }

    exact = Call(Transformer(config).double(), function)
    exact.model.load_state_dict({name: w.detach().double() for name, w in weights.items()})

    def value(weights: dict[str, Tensor]) -> Tensor:
        named = {f"model.{name}": weight for name, weight in weights.items()}
        result: Tensor = functional_call(exact, named, (tokens,))
        return result

    with sdpa_kernel(SDPBackend.MATH):  # the only one with a second derivative
        want, want_second = torch.func.jvp(
            torch.func.grad(value), ({n: w.detach().double() for n, w in weights.items()},),
            (directions,),
        )  # fmt: skip

    rtol = 1e-4 if dtype is torch.float32 else 1e-10
    with contextlib.nullcontext() if kernels == "compiled" else sdpa_kernel(SDPBackend.MATH):
        output = function(model, tokens)
    plain = torch.autograd.grad(output, list(weights.values()), retain_graph=True)
    first = torch.autograd.grad(output, list(weights.values()), create_graph=True)
    along = sum((g * directions[n].to(dtype)).sum() for n, g in zip(weights, first, strict=True))
    assert isinstance(along, Tensor)
    second = torch.autograd.grad(along, list(weights.values()))
    for name, *gradients in zip(weights, plain, first, second, strict=True):
        wanted = want[name], want[name], want_second[name]
        for got, true in zip(gradients, wanted, strict=True):
            assert relative_error(got, true) < rtol, name


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("function", [loss, logits])
def test_forward_mode_agrees_with_reverse_mode(kernels: str, function: Function) -> None:
    config = ModelConfig(vocab_size=40, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=16)
    call = Call(Transformer(config, seed=0).double(), function)
    weights = dict(call.named_parameters())
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 40, (2, 9), generator=generator)
    tangents = {
        name: torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        for name, weight in weights.items()
    }

    def value(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(call, weights, (tokens,))

    gradients = torch.func.grad(value)(weights)
    want = sum((gradients[name] * tangents[name]).sum() for name in weights)
    _, got = torch.func.jvp(value, (weights,), (tangents,))
    torch.testing.assert_close(got, want)
    _, product = torch.func.jvp(torch.func.grad(value), (weights,), (tangents,))
    _, back = torch.func.vjp(torch.func.grad(value), weights)
    torch.testing.assert_close(product, back(tangents)[0])  # the Hessian is symmetric
