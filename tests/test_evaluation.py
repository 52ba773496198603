import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillama.config import ModelConfig
from minillama.errors import ConfigError, DataError
from minillama.evaluation import evaluate
from minillama.model.transformer import Transformer

VOCAB, WINDOW = 29, 8

MODEL = Transformer(
    ModelConfig(
        vocab_size=VOCAB,
        dim=16,
        n_layers=1,
        n_heads=2,
        ffn_dim=16,
        max_seq_len=WINDOW,
        init="fan_in",
        tie_embeddings=False,
    )
).double()


def ids(n, seed=0):
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def sum_by_hand(tokens, seq_len):
    """Every id but the first once, in windows that begin at 0, seq_len, 2·seq_len, …"""
    total = 0.0
    for start in range(0, len(tokens) - 1, seq_len):
        window = tokens[start : start + seq_len + 1]
        log_p = MODEL(window[None, :-1])[0].log_softmax(-1)
        for t, target in enumerate(window[1:].tolist()):
            total -= log_p[t, target].item()
    return total


@given(st.integers(2, 60), st.integers(1, WINDOW), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_it_equals_the_sum_by_hand_whatever_the_sizes(n, seq_len, batch_size):
    tokens = ids(n, seed=n)
    total = sum_by_hand(tokens, seq_len)
    result = evaluate(MODEL, tokens, n_bytes=3 * n, seq_len=seq_len, batch_size=batch_size)
    assert result.keys() == {"loss", "perplexity", "bits_per_byte", "n_tokens"}
    assert result["n_tokens"] == n - 1
    assert result["loss"] == pytest.approx(total / (n - 1), rel=1e-10)
    assert result["perplexity"] == pytest.approx(math.exp(total / (n - 1)), rel=1e-9)
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / (3 * n), rel=1e-10)


@pytest.mark.parametrize("n", [2, WINDOW, WINDOW + 1, WINDOW + 2, 5 * WINDOW + 4])
def test_it_does_not_depend_on_the_batch_size(n):
    results = [evaluate(MODEL, ids(n), batch_size=size)["loss"] for size in (1, 2, 3, 16, 1000)]
    assert results == pytest.approx([results[0]] * 5, rel=1e-12)


def test_the_window_at_the_end_counts_though_it_is_short():
    tokens = ids(2 * WINDOW + 1)
    longer = torch.cat((tokens, ids(3, seed=1)))
    whole, more = evaluate(MODEL, tokens), evaluate(MODEL, longer)
    assert (whole["n_tokens"], more["n_tokens"]) == (2 * WINDOW, 2 * WINDOW + 3)
    tail = more["loss"] * more["n_tokens"] - whole["loss"] * whole["n_tokens"]
    assert tail == pytest.approx(sum_by_hand(longer[2 * WINDOW :], WINDOW), rel=1e-9)


def test_windows_are_as_long_as_the_models_context_unless_told():
    tokens = ids(50)
    assert evaluate(MODEL, tokens) == evaluate(MODEL, tokens, seq_len=WINDOW)
    assert evaluate(MODEL, tokens)["loss"] != evaluate(MODEL, tokens, seq_len=3)["loss"]


def test_bits_per_byte_need_the_bytes():
    assert evaluate(MODEL, ids(20))["bits_per_byte"] is None


def test_a_model_that_guesses_has_the_perplexity_of_its_vocabulary():
    model = Transformer(ModelConfig(vocab_size=VOCAB, dim=8, n_heads=2, max_seq_len=WINDOW))
    model.embed.weight.data.zero_()
    result = evaluate(model, ids(100), n_bytes=99)
    assert result["perplexity"] == pytest.approx(VOCAB, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(math.log2(VOCAB), rel=1e-5)


def test_any_row_of_integers_will_do(tmp_path):
    tokens = ids(40)
    expected = evaluate(MODEL, tokens)
    file = tmp_path / "tokens.bin"
    tokens.numpy().astype(np.uint16).tofile(file)
    for same in (
        np.memmap(file, dtype=np.uint16, mode="r"),
        tokens.numpy(),
        tokens.int(),
        tokens.tolist(),
        tuple(tokens.tolist()),
        torch.stack((tokens, tokens), 1)[:, 0],
        tokens.numpy().astype(np.uint8)[::-1][::-1],
    ):
        assert evaluate(MODEL, same) == expected


def test_it_leaves_gradients_mode_and_random_numbers_alone():
    MODEL.zero_grad()
    state = torch.get_rng_state()
    for training in (True, False):
        MODEL.train(training)
        evaluate(MODEL, ids(40))
        assert MODEL.training == training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in MODEL.parameters())
    assert torch.is_grad_enabled()
    # What was made in inference mode is not left behind for a later backward pass to trip over.
    MODEL.loss(ids(8)[None], ids(8)[None]).backward()
    MODEL.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_works_in_every_dtype(dtype):
    model = Transformer(MODEL.config).to(dtype)
    reference = Transformer(MODEL.config)
    tokens = ids(40)
    assert evaluate(model, tokens)["loss"] == pytest.approx(
        evaluate(reference, tokens)["loss"], rel=0.02
    )


@pytest.mark.parametrize(
    "tokens",
    [[], [3], torch.zeros(0, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long), "text", None],
    ids=str,
)
def test_nothing_to_predict_is_refused(tokens):
    with pytest.raises(DataError, match="nothing to predict"):
        evaluate(MODEL, tokens)


def test_fractions_are_no_ids():
    with pytest.raises(DataError, match="float64 tokens"):
        evaluate(MODEL, np.linspace(0, 1, 9))


@pytest.mark.parametrize("wrong", [-1, VOCAB, 10**6])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    tokens = ids(100)
    tokens[90] = wrong
    with pytest.raises(DataError, match=rf"tokens 80 to 99 .* vocabulary of {VOCAB}"):
        evaluate(MODEL, tokens, batch_size=5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": WINDOW + 1}, "seq_len = 9 is above the model's max_seq_len = 8"),
        ({"seq_len": 0}, "seq_len = 0: must be at least 1"),
        ({"seq_len": -3}, "seq_len = -3: must be at least 1"),
        ({"batch_size": 0}, "batch_size = 0: must be at least 1"),
        ({"batch_size": -1}, "batch_size = -1: must be at least 1"),
        ({"n_bytes": 0}, "n_bytes = 0: must be at least 1"),
        ({"n_bytes": -5}, "n_bytes = -5: must be at least 1"),
    ],
    ids=str,
)
def test_a_size_out_of_its_range_is_refused(arguments, message):
    with pytest.raises(ConfigError) as error:
        evaluate(MODEL, ids(20), **arguments)
    assert message in str(error.value)


def test_a_loss_beyond_numbers_is_reported_as_it_is():
    model = Transformer(MODEL.config)
    model.lm_head.weight.data *= 1e5
    result = evaluate(model, ids(20))
    assert result["loss"] > 700
    assert result["perplexity"] == math.inf
    model.lm_head.weight.data.fill_(math.nan)
    result = evaluate(model, ids(20), n_bytes=20)
    assert all(math.isnan(result[key]) for key in ("loss", "perplexity", "bits_per_byte"))
