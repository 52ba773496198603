"""The decoder gives the logits of a forward pass over the whole sequence, on each of its paths."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from minillama import ModelConfig, Transformer
from minillama.model.decoding import Decoder
from minillama.model.kv_cache import KVCache
from minillama.model.norms import RMSNorm
from minillama.sampling import generate

PLAIN = {"vocab_size": 37, "dim": 24, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 40}
LENGTH = 21


def build(dtype: torch.dtype = torch.float32, **changes: object) -> Transformer:
    model = Transformer(ModelConfig.model_validate(PLAIN | {"max_seq_len": 64} | changes), seed=1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(
                weight.shape, generator=torch.Generator().manual_seed(weight.numel())
            )
    return model.to(dtype)


def read_all(model: Transformer, tokens: list[int]) -> tuple[torch.Tensor, Decoder]:
    cache = KVCache(model.config, 1, LENGTH, dtype=model.embed.weight.dtype)
    decoder = Decoder(model, cache)
    return torch.cat([decoder.read([token]).clone() for token in tokens]), decoder


@pytest.mark.parametrize(
    ("changes", "in_one_call"),
    [
        ({}, True),
        ({"n_kv_heads": 4, "tie_embeddings": False}, True),
        ({"n_kv_heads": 1, "ffn_dim": 41, "embed_scale": "fixed"}, True),
        ({"embed_scale": "learned", "logit_softcap": 3.0}, True),
        ({"norm": {"options": {"unit_offset": True}, "eps": 1e-3}}, True),
        ({"norm": {"options": {"affine": False}}}, True),
        ({"norm": {"options": {"partial": 0.5}}}, False),
        ({"norm": {"options": {"bias": True}}}, False),
        ({"norm": {"kind": "layernorm"}}, False),
        ({"norm": {"placement": "peri"}}, False),
        ({"norm": {"placement": "post"}}, False),
        ({"norm": {"placement": "scaled"}}, False),
        ({"norm": {"qk_norm": "head"}}, False),
        ({"norm": {"v_norm": True}}, False),
        ({"norm": {"placement": "keel"}}, False),
        ({"norm": {"placement": "ngpt", "kind": "l2norm"}}, False),
        ({"attention_gate": "head"}, False),
        ({"attention_gate": "element", "norm": {"qk_norm": "head", "v_norm": True}}, False),
        ({"norm": {"embed_norm": True}}, False),
        ({"norm": {"final_norm": False}}, False),
    ],
)
@pytest.mark.parametrize("n_threads", [1, 2])
@torch.no_grad()
def test_one_by_one_as_the_whole(
    changes: dict[str, object], in_one_call: bool, n_threads: int, threads: Callable[[int], None]
) -> None:
    model = build(torch.float64, **changes)
    tokens = torch.randint(37, (LENGTH,), generator=torch.Generator().manual_seed(0))
    threads(n_threads)
    logits, decoder = read_all(model, tokens.tolist())
    torch.testing.assert_close(logits, model(tokens[None])[0], rtol=1e-10, atol=1e-10)
    if Decoder(build(), KVCache(model.config, 1, 1))._fused is not None:  # there is a compiler
        assert (decoder._fused is not None) == in_one_call


@pytest.mark.parametrize("lengths", [[3, 3], [1, 9, 4], [5] * 8, [1 + r % 7 for r in range(19)]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_rows_of_a_batch_are_read_as_the_whole_of_each(
    kernels: str, dtype: torch.dtype, lengths: list[int], threads: Callable[[int], None]
) -> None:
    threads(2)
    model, longest, n_more = build(dtype, n_heads=6, n_kv_heads=3), max(lengths), 6
    tokens = torch.randint(
        37, (len(lengths), longest + n_more), generator=torch.Generator().manual_seed(0)
    )
    pad_B = longest - torch.tensor(lengths)
    cache = KVCache(model.config, len(lengths), longest + n_more, pad_B=pad_B, dtype=dtype)
    model(tokens[:, :longest], cache)
    decoder = Decoder(model, cache)
    assert (decoder._fused is not None) == (kernels == "compiled")
    tolerance = 1e-5 if dtype is torch.float32 else 1e-11
    for step in range(n_more):
        logits_BV = decoder.read(tokens[:, longest + step].tolist())
        for row, pad in enumerate(pad_B.tolist()):
            want_V = model(tokens[row : row + 1, pad : longest + step + 1])[0, -1]
            torch.testing.assert_close(logits_BV[row], want_V, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_a_model_that_is_watched_or_changed_is_read_as_it_is() -> None:
    tokens = list(range(5))
    model = build()
    seen = []
    hook = model.blocks[1].mlp.down_proj.register_forward_hook(lambda *args: seen.append(1))
    read_all(model, tokens)
    assert len(seen) == len(tokens)
    hook.remove()
    model.blocks[0].attention.o_proj = torch.nn.Linear(24, 24)
    logits, decoder = read_all(model, tokens)
    assert decoder._fused is None
    torch.testing.assert_close(logits, model(torch.tensor([tokens]))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["", "embed", "lm_head", "blocks.1.attention", "blocks.0.mlp"])
@torch.no_grad()
def test_a_module_with_a_forward_of_its_class_is_read_as_it_is(name: str) -> None:
    model = build(torch.float64, tie_embeddings=False)
    module = model.get_submodule(name)
    parent: type[torch.nn.Module] = type(module)
    method = "head" if name == "" else "forward"

    def doubled(self: torch.nn.Module, *args: object) -> torch.Tensor:
        result: torch.Tensor = getattr(parent, method)(self, *args)
        return 2 * result

    plain, _ = read_all(model, [1, 2, 3])
    module.__class__ = type("Doubled", (parent,), {method: doubled})
    logits, _ = read_all(model, [1, 2, 3])
    assert not torch.allclose(logits, plain)
    torch.testing.assert_close(logits, model(torch.tensor([[1, 2, 3]]))[0])


@pytest.mark.parametrize("rows", [1, 3, 17])
@torch.no_grad()
def test_any_number_of_threads_gives_the_same_bits(
    rows: int, threads: Callable[[int], None]
) -> None:
    model, found = build(), []
    for n_threads in (1, 2, 3):
        threads(n_threads)
        decoder = Decoder(model, KVCache(model.config, rows, LENGTH))
        read = [decoder.read([(step + row) % 37 for row in range(rows)]) for step in range(LENGTH)]
        found.append(read[-1].clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_nothing_is_read_beyond_the_cache() -> None:
    model = build()
    decoder = Decoder(model, KVCache(model.config, 1, 2))
    decoder.read([1])
    decoder.read([2])
    with pytest.raises(ValueError, match="position 2: must be below"):
        decoder.read([3])


def greedy(model: Transformer, n: int) -> list[int]:
    """Return what a model without a cache continues the ids 1, 2, 3 with."""
    ids = [1, 2, 3]
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[3:]


def test_a_norm_with_another_epsilon_is_read_as_it_is() -> None:
    model = build()
    plain = generate(model, [1, 2, 3], 8, temperature=0)
    model.final_norm = RMSNorm(PLAIN["dim"])
    model.blocks[0].mlp_input_norm.eps = 1e4
    changed = generate(model, [1, 2, 3], 8, temperature=0)
    assert changed == greedy(model, 8)
    assert changed != plain


def test_swapped_blocks_are_read_in_their_new_order() -> None:
    model = build()
    with torch.no_grad():
        for number, block in enumerate(model.blocks):
            block.mlp.up_proj.weight.mul_(3 * (number - 1))
            block.attention.v_proj.weight.mul_(10 * number)
    model.blocks = torch.nn.ModuleList(reversed(model.blocks))
    assert generate(model, [1, 2, 3], 8, temperature=0) == greedy(model, 8)


def test_blocks_that_share_a_place_in_the_cache_are_refused() -> None:
    model = build()
    model.blocks[2] = copy.deepcopy(model.blocks[0])
    greedy(model, 2)
    with pytest.raises(ValueError, match=r"attention.layer = \[0, 1, 0\], by which the cache"):
        generate(model, [1, 2, 3], 2)


@pytest.mark.parametrize("unit_offset", [False, True])
@torch.no_grad()
def test_weights_changed_in_place_between_two_tokens_count(unit_offset: bool) -> None:
    model = build(norm={"options": {"unit_offset": unit_offset}})
    _, decoder = read_all(model, [1, 2])
    watched = copy.deepcopy(model)
    watched.blocks[0].register_forward_hook(lambda *_: None)
    _, by_modules = read_all(watched, [1, 2])
    for changed in (model, watched):
        for weight in changed.parameters():
            weight.add_(torch.linspace(-1, 1, weight.shape[-1]))
    assert decoder._fused is not None
    torch.testing.assert_close(decoder.read([3]), by_modules.read([3]), rtol=1e-4, atol=1e-4)
