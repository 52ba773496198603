import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillama.config import ModelConfig
from minillama.model.kv_cache import KVCache
from minillama.model.transformer import Transformer

VOCAB, LENGTH = 23, 14


def build(n_kv_heads=2, seed=0, max_seq_len=LENGTH, **norm):
    return Transformer(
        ModelConfig(
            vocab_size=VOCAB,
            dim=16,
            n_layers=2,
            n_heads=4,
            n_kv_heads=n_kv_heads,
            ffn_dim=24,
            max_seq_len=max_seq_len,
            init="fan_in",
            norm=norm,
        ),
        seed=seed,
    )


def ids(*shape, seed=0):
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


MODEL = build()


@torch.no_grad()
def read_in_chunks(model, tokens, sizes, **options):
    cache = KVCache(model.config, tokens.shape[0], tokens.shape[1], **options)
    logits = [model(chunk, cache) for chunk in tokens.split(sizes, dim=1)]
    assert cache.length == tokens.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    "model",
    [
        build(n_kv_heads=4),
        build(n_kv_heads=2),
        build(n_kv_heads=1),
        build(qk_norm="head"),
        build(qk_norm="full", placement="reordered"),
        build(placement="hybrid"),
        build(placement="post", kind="layernorm", embed_norm=True),
    ],
    ids=["MHA", "GQA", "MQA", "qk head", "qk full", "hybrid", "post"],
)
def test_cached_decoding_equals_the_full_forward_at_every_position(model):
    tokens = ids(3, LENGTH)
    one_by_one = read_in_chunks(model, tokens, [1] * LENGTH)
    torch.testing.assert_close(one_by_one, model(tokens), rtol=1e-5, atol=1e-5)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_chunks_of_a_prompt_give_the_logits_of_the_whole(sizes, seed):
    sizes = [size for place, size in enumerate(sizes) if sum(sizes[: place + 1]) <= LENGTH]
    tokens = ids(2, sum(sizes), seed=seed)
    torch.testing.assert_close(
        read_in_chunks(MODEL, tokens, sizes), MODEL(tokens), rtol=1e-5, atol=1e-5
    )


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 99), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_unequal_prompts_in_a_batch_give_the_logits_of_each_alone(lengths, seed, chunk):
    longest = max(lengths)
    new = ids(len(lengths), 3, seed=seed + 1)
    prompts = [ids(n, seed=seed + row) for row, n in enumerate(lengths)]
    padded = torch.stack(
        [torch.nn.functional.pad(p, (longest - len(p), 0), value=VOCAB - 1) for p in prompts]
    )
    tokens = torch.cat((padded, new), dim=1)
    total = longest + 3
    sizes = [chunk] * (total // chunk) + [total % chunk] * (total % chunk > 0)
    pad = torch.tensor([longest - n for n in lengths])
    together = read_in_chunks(MODEL, tokens, sizes, pad_B=pad)
    assert together.isfinite().all()
    for row, prompt in enumerate(prompts):
        alone = MODEL(torch.cat((prompt, new[row]))[None])[0]
        torch.testing.assert_close(together[row, pad[row] :], alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_that_are_kept_go_on_as_before():
    prompts, next_ids = ids(3, 4), ids(3, 2, seed=1)
    pad = torch.tensor([0, 2, 1])

    def read(rows_after):
        cache = KVCache(MODEL.config, 3, 6, pad_B=pad)
        MODEL(prompts, cache)
        cache.keep(rows_after)
        return MODEL(next_ids[rows_after], cache)

    everything = read([0, 1, 2])
    for rows in ([0], [2, 1], [1, 2]):
        torch.testing.assert_close(read(rows), everything[rows], rtol=1e-5, atol=1e-5)


def test_positions_count_from_behind_the_padding():
    cache = KVCache(MODEL.config, 2, 8, pad_B=torch.tensor([0, 3]))
    assert cache.positions(5).tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]]
    cache.advance(5)
    assert cache.positions(2).tolist() == [[5, 6], [2, 3]]
    assert KVCache(MODEL.config, 2, 8, pad_B=torch.tensor([0, 0])).positions(3).tolist() == [
        0,
        1,
        2,
    ]


def test_the_mask_shows_a_row_what_is_its_own():
    cache = KVCache(MODEL.config, 2, 8, pad_B=torch.tensor([0, 2]))
    mask = cache.mask(3)
    assert mask.shape == (2, 1, 3, 3)
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    # Padding sees itself, for a softmax over nothing is not a number; nothing real sees padding.
    assert mask[1, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    cache.advance(3)
    assert cache.mask(1)[:, 0].int().tolist() == [[[1, 1, 1, 1]], [[0, 0, 1, 1]]]


def test_no_mask_is_made_where_attention_needs_none():
    cache = KVCache(MODEL.config, 2, 8)
    assert cache.mask(4) is None
    cache.advance(4)
    assert cache.mask(1) is None
    assert cache.mask(2).int().tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]


def test_the_last_position_of_the_context_is_read_and_none_beyond():
    tokens = ids(1, LENGTH + 1)
    cache = KVCache(MODEL.config, 1, LENGTH + 5)
    MODEL(tokens[:, :LENGTH], cache)
    assert cache.length == LENGTH
    with pytest.raises(ValueError, match=f"{LENGTH + 1} positions are more than max_seq_len"):
        MODEL(tokens[:, LENGTH:], cache)
    assert cache.length == LENGTH


def test_a_cache_has_room_for_its_key_value_heads_alone():
    cache = KVCache(MODEL.config, 3, 5, dtype=torch.bfloat16)
    assert cache.k_LBGSK.shape == cache.v_LBGSK.shape == (2, 3, 2, 5, 4)
    assert cache.k_LBGSK.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_holds_the_models_dtype(dtype):
    model = build().to(dtype)
    tokens = ids(2, LENGTH)
    logits = read_in_chunks(model, tokens, [5] + [1] * (LENGTH - 5), dtype=dtype)
    assert logits.dtype == dtype
    atol = 0.1 if dtype != torch.float64 else 1e-10
    torch.testing.assert_close(logits, model(tokens), rtol=0, atol=atol)
