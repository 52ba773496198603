import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillama.config import ModelConfig
from minillama.errors import ConfigError, MinillamaError
from minillama.model.transformer import Transformer
from minillama.sampling import Sampler, generate, generate_batch, stream

VOCAB, WINDOW = 19, 12


def build(max_seq_len=WINDOW, **fields):
    config = ModelConfig(
        vocab_size=VOCAB,
        dim=16,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=24,
        max_seq_len=max_seq_len,
        init="fan_in",
        **fields,
    )
    # An untied head, or the likeliest next id would be the last one for ever.
    return Transformer(config.model_copy(update={"tie_embeddings": False}), seed=1)


MODEL = build()
PROMPT = [3, 1, 4]


def greedy_by_hand(model, prompt, n):
    """Take the likeliest id again and again with full forward passes, sliding as documented."""
    window = model.config.max_seq_len
    context, new = list(prompt)[-window:], []
    for _ in range(n):
        new.append(int(model(torch.tensor([context]))[0, -1].argmax()))
        context.append(new[-1])
        if len(context) > window:  # the newer half is read again
            context = context[len(context) // 2 :]
    return new


# ---------------------------------------------------------------- greedy, sliding, streaming


@pytest.mark.parametrize("prompt_length", [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_greedy_decoding_equals_full_passes_also_past_the_window(prompt_length):
    prompt = [i * 7 % VOCAB for i in range(prompt_length)]
    assert generate(MODEL, prompt, 40, temperature=0) == greedy_by_hand(MODEL, prompt, 40)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_a_tiny_window_slides_too(window):
    model = build(window)
    expected = greedy_by_hand(model, PROMPT, 15)
    assert generate(model, PROMPT, 15, temperature=0) == expected
    assert generate_batch(model, [PROMPT, [2]], 15, temperature=0)[0] == expected
    assert len(generate(model, PROMPT, 15, seed=0)) == 15


def test_temperature_0_is_greedy_with_any_seed_and_settings():
    expected = generate(MODEL, PROMPT, 30, temperature=0)
    assert len(set(expected)) > 3  # worth comparing
    for seed, top_k, top_p in itertools.product((0, 1, None), (0, 5), (None, 0.5)):
        assert generate(MODEL, PROMPT, 30, 0.0, top_k, top_p, seed) == expected


def test_a_tiny_temperature_is_as_good_as_greedy():
    expected = generate(MODEL, PROMPT, 30, temperature=0)
    for temperature in (1e-6, 1e-45, 5e-324):
        assert generate(MODEL, PROMPT, 30, temperature=temperature, seed=0) == expected


def test_stream_yields_what_generate_returns_as_it_comes():
    for seed, temperature in ((0, 1.0), (1, 0.7), (None, 0.0)):
        expected = generate(MODEL, PROMPT, 30, temperature=temperature, seed=seed)
        assert list(stream(MODEL, PROMPT, 30, temperature=temperature, seed=seed)) == expected
    passes = []
    hook = MODEL.final_norm.register_forward_hook(lambda *_: passes.append(1))
    tokens = stream(MODEL, PROMPT, 30, seed=0)
    first = [next(tokens), next(tokens)]
    hook.remove()
    assert len(passes) == 2  # nothing was computed ahead
    assert first == generate(MODEL, PROMPT, 2, seed=0)


def test_each_id_is_read_once():
    lengths = []
    hook = MODEL.embed.register_forward_pre_hook(lambda m, args: lengths.append(args[0].shape[1]))
    generate(MODEL, PROMPT, 6, seed=0)
    hook.remove()
    assert lengths == [3, 1, 1, 1, 1, 1]


# ---------------------------------------------------------------- batches


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=16), min_size=1, max_size=4),
    st.integers(0, 30),
)
@settings(max_examples=25, deadline=None)
def test_rows_of_a_batch_are_what_each_prompt_gives_alone(prompts, max_new_tokens):
    together = generate_batch(MODEL, prompts, max_new_tokens, temperature=0)
    assert together == [generate(MODEL, p, max_new_tokens, temperature=0) for p in prompts]


@given(
    st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=16), min_size=1, max_size=3),
    st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_row_i_draws_from_seed_plus_i(prompts, seed):
    together = generate_batch(MODEL, prompts, 20, seed=seed, top_k=5)
    for row, prompt in enumerate(prompts):
        assert together[row] == generate(MODEL, prompt, 20, seed=seed + row, top_k=5)


def test_rows_that_stop_leave_the_others_as_they_were():
    prompts = [[i, i + 1] for i in range(6)]
    free = generate_batch(MODEL, prompts, 25, temperature=0)
    stop = {free[0][3], free[1][0]}
    cut = [list(itertools.takewhile(lambda t: t not in stop, row)) for row in free]
    assert len({len(row) for row in cut}) > 2
    assert generate_batch(MODEL, prompts, 25, temperature=0, stop_ids=stop) == cut


# ---------------------------------------------------------------- stopping


def test_generation_stops_before_a_stop_id():
    free = generate(MODEL, PROMPT, 30, temperature=0)
    stop = free[7]
    cut = free[: free.index(stop)]
    assert generate(MODEL, PROMPT, 30, temperature=0, stop_ids=[stop]) == cut
    assert list(stream(MODEL, PROMPT, 30, temperature=0, stop_ids=(stop, 999))) == cut
    assert generate(MODEL, PROMPT, 30, temperature=0, stop_ids=[free[0]]) == []


def test_max_new_tokens_is_the_number_of_ids():
    for n in (0, 1, 2, 13):
        assert len(generate(MODEL, PROMPT, n, seed=0)) == n


# ---------------------------------------------------------------- seeds


def test_a_seed_gives_the_same_ids_and_another_seed_others():
    first = generate(MODEL, PROMPT, 30, seed=5)
    torch.rand(7)  # torch's own generator plays no part
    assert generate(MODEL, PROMPT, 30, seed=5) == first
    assert generate(MODEL, PROMPT, 30, seed=6) != first
    assert generate(MODEL, PROMPT, 30) != generate(MODEL, PROMPT, 30)


def test_any_integer_is_a_seed():
    for seed in (-1, 2**63, 2**64 - 1, 2**64, 10**30):
        assert len(generate_batch(MODEL, [PROMPT, PROMPT], 2, seed=seed)[1]) == 2


def test_sampling_leaves_torchs_generator_and_the_model_alone():
    state, training = torch.get_rng_state(), MODEL.training
    weights = {name: weight.clone() for name, weight in MODEL.state_dict().items()}
    generate(MODEL, PROMPT, 20, seed=0)
    generate(MODEL, PROMPT, 20)
    assert torch.equal(torch.get_rng_state(), state)
    assert MODEL.training == training
    assert all(torch.equal(weights[name], w) for name, w in MODEL.state_dict().items())
    MODEL.loss(torch.tensor([PROMPT]), torch.tensor([PROMPT])).backward()  # it can still be trained
    MODEL.zero_grad()


def test_sampled_frequencies_are_the_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    sampler = Sampler(1, temperature=0.8, seed=0)
    drawn = torch.tensor([sampler.draw(logits, [0])[0] for _ in range(4000)])
    frequencies = torch.bincount(drawn, minlength=4) / 4000
    expected = (logits[0] / 0.8).softmax(-1)
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.03)


# ---------------------------------------------------------------- what is sampled from

logit = st.floats(-30, 30, width=32)
rows = st.lists(logit, min_size=1, max_size=12)
# Half of the time from a few values, so that ties are met.
tied_rows = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=12)
many_rows = rows | tied_rows


@given(
    many_rows,
    st.floats(0.05, 20),
    st.none() | st.integers(0, 20),
    st.none() | st.floats(0.001, 1),
)
@settings(max_examples=150, deadline=None)
def test_probabilities_sum_to_one_over_the_support_that_is_defined(logits, t, top_k, top_p):
    p = Sampler(1, t, top_k, top_p).probabilities(torch.tensor([logits]))[0]
    assert p.dtype == torch.float32
    assert p.shape == (len(logits),)
    assert math.isclose(p.sum().item(), 1.0, abs_tol=1e-5)
    assert (p >= 0).all()
    assert p[int(torch.tensor(logits).argmax())] > 0

    scaled = torch.tensor(logits, dtype=torch.float64) / t
    reference = (scaled - scaled.max()).exp()
    if top_k:  # ties with the k-th stay
        kth = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        reference[torch.tensor(logits) < kth] = 0
    reference /= reference.sum()
    if top_p is not None and top_p < 1:
        order = sorted(range(len(logits)), key=lambda i: -logits[i])  # stable: the first of a tie
        before = 0.0
        for i in order:
            if abs(before - top_p) < 1e-5:
                return  # a rounding may put this one on either side
            if before >= top_p:
                reference[i] = 0
            before += float(p_full(logits, t, top_k)[i])
        reference /= reference.sum()
    torch.testing.assert_close(p.double(), reference, rtol=1e-3, atol=1e-6)


def p_full(logits, t, top_k):
    return Sampler(1, t, top_k).probabilities(torch.tensor([logits]))[0]


@given(many_rows, st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_top_k_of_0_none_or_beyond_the_vocabulary_is_all(logits, beyond):
    x = torch.tensor([logits])
    everything = Sampler(1).probabilities(x)
    for top_k in (0, None, len(logits), len(logits) + beyond, 10**9):
        assert torch.equal(Sampler(1, top_k=top_k).probabilities(x), everything)
    assert torch.equal(Sampler(1, top_p=1.0).probabilities(x), everything)


def test_top_k_keeps_k_and_all_that_tie_with_the_last():
    x = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = [int((Sampler(1, top_k=k).probabilities(x) > 0).sum()) for k in (1, 2, 3, 4, 5)]
    assert kept == [1, 3, 3, 4, 5]


def test_top_p_keeps_the_fewest_that_add_up_to_p():
    x = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def kept(p):
        return Sampler(1, top_p=p).probabilities(x)[0].nonzero().flatten().tolist()

    assert kept(1e-9) == [0]
    assert kept(0.49) == [0]
    assert kept(0.51) == [0, 1]
    assert kept(0.79) == [0, 1]
    assert kept(0.81) == [0, 1, 2]
    assert kept(0.96) == [0, 1, 2, 3]
    exact = Sampler(1, top_p=0.5).probabilities(torch.zeros(1, 2))
    assert exact.tolist() == [[1.0, 0.0]]  # the first of two equal ones is enough
    renewed = Sampler(1, top_p=0.6).probabilities(x)[0]
    torch.testing.assert_close(renewed, torch.tensor([5 / 8, 3 / 8, 0, 0]))


def test_top_p_counts_among_those_that_top_k_left():
    x = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    # Of the first two, the first has 5/8: it alone is enough for 0.6.
    p = Sampler(1, top_k=2, top_p=0.6).probabilities(x)[0]
    torch.testing.assert_close(p, torch.tensor([1.0, 0, 0, 0]))


def test_top_k_1_is_greedy():
    assert generate(MODEL, PROMPT, 30, top_k=1, seed=0) == generate(
        MODEL, PROMPT, 30, temperature=0
    )


def test_huge_logits_and_temperatures_stay_finite():
    x = torch.tensor([[3e38, -3e38, 0.0]])
    for temperature in (1e-30, 1.0, 1e30, 1e300):
        p = Sampler(1, temperature).probabilities(x)
        assert p.isfinite().all()
        assert math.isclose(p.sum().item(), 1, abs_tol=1e-6)


# ---------------------------------------------------------------- dtypes and inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_of_another_dtype_works(dtype):
    model = build().to(dtype)
    new = generate(model, PROMPT, 20, temperature=0)
    if dtype == torch.float64:  # a tie in half precision may fall either way
        assert new == greedy_by_hand(model, PROMPT, 20)
    batch = generate_batch(model, [PROMPT, [2]], 20, seed=0, top_p=0.9)
    assert [len(row) for row in batch] == [20, 20]


def test_generation_under_autocast_works():
    with torch.autocast("cpu", torch.bfloat16):
        assert len(generate(MODEL, PROMPT, 20, seed=0)) == 20


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        np.array(PROMPT, dtype=np.uint16),
        np.array(PROMPT),
        torch.tensor(PROMPT),
        torch.tensor(PROMPT, dtype=torch.int32),
    ],
    ids=["tuple", "uint16", "int64", "tensor", "int32 tensor"],
)
def test_a_prompt_may_be_any_sequence_of_integers(prompt):
    new = generate(MODEL, prompt, 20, temperature=0)
    assert new == generate(MODEL, PROMPT, 20, temperature=0)
    assert all(type(token) is int for token in new)


def test_the_prompt_is_left_alone():
    prompt = list(PROMPT)
    generate(MODEL, prompt, 30, seed=0)
    generate_batch(MODEL, [prompt], 30, seed=0)
    assert prompt == PROMPT


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "prompt 0 is empty; begin it with the tokenizer's bos id"),
        ({"prompt_ids": [], "max_new_tokens": 0}, "prompt 0 is empty"),
        ({"prompt_ids": [1, VOCAB]}, f"id {VOCAB} at place 1, outside the model's vocabulary"),
        ({"prompt_ids": [-1]}, "id -1 at place 0"),
        ({"max_new_tokens": -1}, "max_new_tokens = -1: must be 0 or above"),
        ({"temperature": -0.1}, "temperature = -0.1: must be 0"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"top_k": -1}, "top_k = -1: must be 0"),
        ({"top_k": math.nan}, "top_k = nan"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0"),
        ({"top_p": -0.5}, "top_p = -0.5"),
        ({"top_p": 1.01}, "top_p = 1.01"),
        ({"top_p": math.nan}, "top_p = nan"),
    ],
    ids=str,
)
def test_an_argument_out_of_its_range_is_refused(arguments, message):
    arguments = {"prompt_ids": PROMPT, "max_new_tokens": 3, **arguments}
    with pytest.raises(ConfigError) as error:
        generate(MODEL, **arguments)
    assert message in str(error.value)
    with pytest.raises(ConfigError):
        list(stream(MODEL, **arguments))
    prompt = arguments.pop("prompt_ids")
    with pytest.raises(ConfigError):
        generate_batch(MODEL, [prompt], **arguments)


def test_a_batch_names_the_prompt_at_fault():
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        generate_batch(MODEL, [PROMPT, []], 3)


@pytest.mark.parametrize("prompt", ["abc", [1.5], [None]], ids=str)
def test_a_prompt_of_anything_but_integers_is_a_type_error(prompt):
    with pytest.raises(TypeError):
        generate(MODEL, prompt, 3)


def test_no_prompts_give_no_rows():
    assert generate_batch(MODEL, [], 5) == []


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_whose_logits_are_not_finite_is_refused(temperature):
    model = build()
    model.lm_head.weight.data[2, 3] = math.nan
    with pytest.raises(MinillamaError, match="logits are not finite"):
        generate(model, PROMPT, 3, temperature=temperature)


def test_top_p_ranks_by_logits_where_probabilities_round_to_the_same():
    tiny = 1.401298464324817e-45  # the smallest float32 above 0
    for logits, likeliest in (([-tiny, 0.0], 1), ([0.0, -tiny, 0.0], 0), ([0.0, tiny], 1)):
        p = Sampler(1, top_p=0.3).probabilities(torch.tensor([logits]))[0]
        assert p.tolist() == [float(i == likeliest) for i in range(len(logits))]
