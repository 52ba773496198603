"""A block by fused kernels is the block of its equation, and whatever is not plain is called."""

from __future__ import annotations

import copy

import pytest
import torch
from kernel_helpers import tensor
from torch import Tensor, nn

from minillama.config import ModelConfig
from minillama.config.norms import NormConfig
from minillama.config.placement import PLACEMENTS
from minillama.model.kernels import attention_sub_layer, library, mlp
from minillama.model.norms import RMSNorm, register_norm
from minillama.model.rope import RotaryEmbedding, Rotation
from minillama.model.transformer import Block

SUB_LAYERS = [
    "attention_input_norm",
    "attention",
    "attention.q_proj",
    "attention.k_proj",
    "attention.v_proj",
    "attention.o_proj",
    "attention_output_norm",
    "attention_residual_norm",
    "mlp_input_norm",
    "mlp",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp_output_norm",
    "mlp_residual_norm",
]


def block_of(layer: int = 1, **norm: object) -> Block:
    config = ModelConfig(
        vocab_size=8, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=16,
        norm=NormConfig.model_validate(norm),
    )  # fmt: skip
    block = Block(config, layer)
    for number, parameter in enumerate(block.parameters()):
        parameter.data.copy_(tensor(*parameter.shape, seed=number) / 4 + (parameter.ndim < 2))
    return block


def rotation(dtype: torch.dtype = torch.float32) -> Rotation:
    return RotaryEmbedding(8, 16)(torch.arange(9), dtype)


def with_gradients(block: Block, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x = tensor(2, 9, 32, seed=90).to(dtype).requires_grad_()
    y = block(x, rotation(dtype))
    y.backward(tensor(2, 9, 32, seed=91).to(dtype))
    gradients = [p.grad for p in (x, *block.parameters())]
    return [y.detach(), *(g for g in gradients if g is not None)]


def is_fused(block: Block) -> tuple[bool, bool]:
    """Return whether attention and the MLP are one kernel each, with its norm and its sum."""
    y = block(tensor(2, 9, 32).float().requires_grad_(), rotation())
    nodes, found = [y.grad_fn], []
    while nodes:
        node = nodes.pop()
        if node is not None:
            found.append(getattr(node, "how", (None,))[0])
            nodes += [before for before, _ in node.next_functions]
    return attention_sub_layer._KERNEL in found, found[0] is mlp._GATED_MLP


@pytest.fixture(autouse=True)
def _has_kernels() -> None:
    c = library.load(torch.float32)
    if c is None or not c.normed_linear_fits(dim=32):
        pytest.skip("no C compiler, or few vector registers")


@pytest.mark.parametrize("placement", list(PLACEMENTS))
@pytest.mark.parametrize("layer", [0, 2])
def test_each_placement_equals_its_equation_in_float64(placement: str, layer: int) -> None:
    block = block_of(layer, placement=placement)
    exact = copy.deepcopy(block).double()
    exact.register_forward_pre_hook(lambda *_: None)
    for module in exact.modules():  # a hook on each module: nothing is fused
        module.register_forward_hook(lambda *_: None)
    ours, true = with_gradients(block), with_gradients(exact, torch.float64)
    assert len(ours) == len(true)
    for got, want in zip(ours, true, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("norm", "fused"),
    [
        ({}, (True, True)),
        ({"placement": "scaled"}, (True, True)),
        ({"placement": "post"}, (False, False)),
        ({"placement": "peri"}, (False, False)),
        ({"placement": "rezero"}, (False, False)),
        ({"placement": "ngpt"}, (False, False)),
        ({"qk_norm": "head"}, (False, True)),
        ({"kind": "layernorm"}, (False, False)),
        ({"options": {"unit_offset": True}}, (False, False)),
        ({"options": {"partial": 0.5}}, (False, False)),
        ({"options": {"bias": True}}, (False, False)),
        ({"options": {"affine": False}}, (False, False)),
    ],
    ids=str,
)
def test_what_is_fused(norm: dict[str, object], fused: tuple[bool, bool]) -> None:
    assert is_fused(block_of(**norm)) == fused


@pytest.mark.parametrize("path", SUB_LAYERS)
def test_a_hooked_module_is_called(path: str) -> None:
    block = block_of()
    want = with_gradients(copy.deepcopy(block))
    seen: list[Tensor] = []
    module = block.get_submodule(path)
    module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for got, true in zip(with_gradients(block), want, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-4)
    assert len(seen) == 1
    assert is_fused(block) == (path.startswith("mlp"), path.startswith("attention"))


@pytest.mark.parametrize("path", SUB_LAYERS)
def test_a_replaced_module_is_called(path: str) -> None:
    block = block_of()
    want = with_gradients(copy.deepcopy(block))

    class Twice(nn.Module):
        """As an adapter: what was there, and something more."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Tensor) -> Tensor:
            y: Tensor = self.inner(*args)
            return 2 * y

    parent, _, name = path.rpartition(".")
    setattr(block.get_submodule(parent), name, Twice(block.get_submodule(path)))
    ours = with_gradients(block)
    assert not torch.allclose(ours[0], want[0], rtol=1e-2)
    assert is_fused(block) == (path.startswith("mlp"), path.startswith("attention"))


def test_a_subclass_of_the_norm_and_a_norm_of_a_user_are_called(
    scratch_registries: None,
) -> None:
    @register_norm("doubled")
    class Doubled(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    assert is_fused(block_of(kind="doubled")) == (False, False)


def test_an_evaluation_gives_the_values_of_training() -> None:
    block = block_of()
    x = tensor(8, 9, 32).float()  # more than a few rows
    with torch.no_grad():
        without = block(x, rotation())
    assert torch.equal(without, block(x, rotation()))


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    block = block_of()
    want = with_gradients(copy.deepcopy(block))
    x = tensor(2, 9, 32, seed=90).float().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(block, x, rotation(), use_reentrant=False)
    y.backward(tensor(2, 9, 32, seed=91).float())
    got = [y.detach(), x.grad, *(p.grad for p in block.parameters())]
    for ours, true in zip(got, want, strict=True):
        assert ours is not None
        assert torch.equal(ours, true)
