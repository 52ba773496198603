"""The decoder gives the logits of a forward pass over the whole sequence, on each of its paths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minillama import ModelConfig, Transformer
from minillama.model.decoding import Decoder
from minillama.model.kv_cache import KVCache

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
