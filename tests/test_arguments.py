"""What is passed to a public function by mistake is refused at the call, in one sentence."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minillama
from minillama.config import ModelConfig, NormConfig
from minillama.config.ablation import load_ablation
from minillama.config.loading import parse_overrides
from minillama.data.tokenizer import ByteTokenizer, SentencePieceTokenizer, train_tokenizer
from minillama.errors import ConfigError, TokenizerError
from minillama.model.attention import Attention
from minillama.model.kv_cache import KVCache
from minillama.model.mlp import MLP
from minillama.model.norms import (
    NORM_BUILDERS,
    Derf,
    DyT,
    LayerNorm,
    NoNorm,
    RMSNorm,
    ScaleNorm,
    build_norm,
    register_norm,
)
from minillama.model.rope import RotaryEmbedding
from minillama.model.transformer import Transformer
from minillama.sampling import generate, generate_batch, stream
from minillama.training.device import check_compile

CONFIG = ModelConfig(dim=16, n_layers=1, n_heads=2, max_seq_len=32, vocab_size=259)
MODEL = Transformer(CONFIG)
IDS = torch.zeros(1, 4, dtype=torch.long)
BYTES = ByteTokenizer()
NAN = math.nan


def attention(x: object) -> torch.Tensor:
    """Give ``x`` to an attention of width 16 as if it were 4 positions."""
    return Attention(CONFIG)(x, MODEL.rope(torch.arange(4), torch.float32))


def built_as(what: object) -> torch.nn.Module:
    """Build a norm by a user's function that returns ``what``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NORM_BUILDERS._entries, "rmsnorm", lambda dim, **options: what)
        return build_norm(NormConfig(), 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: RMSNorm(8, partial="x"), ConfigError, "partial = 'x'"),
        (lambda: RMSNorm(8, partial=1.5), ConfigError, "partial = 1.5"),
        (lambda: RMSNorm(8.0), ConfigError, "dim = 8.0: must be a positive whole number"),
        (lambda: ScaleNorm(8, eps=torch.ones(2)), ConfigError, "eps = "),
        (lambda: DyT(8, alpha_attention=NAN), ConfigError, "alpha_attention = nan"),
        (lambda: Derf(8, alpha="a"), ConfigError, "alpha = 'a'"),
        (lambda: NoNorm(8, eps=NAN), ConfigError, "eps = nan"),
        (lambda: build_norm(None, 8), TypeError, "must be of type NormConfig, not NoneType"),
        (lambda: build_norm(NormConfig(), 0), ConfigError, "dim = 0"),
        (lambda: register_norm(" "), ConfigError, "must not be empty"),
        (lambda: register_norm(5), TypeError, "must be of type str, not int"),
        (lambda: Transformer({}), TypeError, "must be of type ModelConfig, not dict"),
        (lambda: Transformer(CONFIG, seed="a"), ConfigError, "seed = 'a': must be a whole number"),
        (lambda: Transformer(CONFIG, seed=1.5), ConfigError, "seed = 1.5: must be a whole number"),
        (lambda: MODEL(IDS.float()), ValueError, "tokens of torch.float32"),
        (lambda: MODEL(IDS[0]), ValueError, r"shape \(4,\)"),
        (lambda: MODEL([[1, 2]]), TypeError, "must be of type Tensor, not list"),
        (lambda: MODEL(IDS + 1000), IndexError, "outside the model's vocabulary of 259"),
        (lambda: MODEL(IDS - 1), IndexError, "outside the model's vocabulary of 259"),
        (lambda: MODEL(IDS, cache=5), TypeError, "must be of type KVCache, not int"),
        (lambda: MODEL(IDS, KVCache(CONFIG, 1, 3)), ValueError, "1 × 4 tokens do not fit"),
        (lambda: MODEL(IDS, KVCache(CONFIG, 2, 9)), ValueError, "a cache of 2 rows"),
        # It gave a number, of four tokens' states and two targets.
        (lambda: MODEL.loss(IDS, IDS[:, :2]), ValueError, r"the tokens, \(1, 4\)"),
        (lambda: MODEL.loss(IDS, IDS.float()), ValueError, "targets of torch.float32"),
        (lambda: MODEL.loss(IDS, IDS, z_loss=-1), ValueError, "z_loss = -1"),
        (lambda: MODEL.loss(IDS, IDS, z_loss=NAN), ValueError, "z_loss = nan"),
        (lambda: MODEL.loss(IDS, [1]), TypeError, "targets must be of type Tensor, not list"),
        (lambda: Attention(CONFIG, qkv_norm="no"), ConfigError, "qkv_norm = 'no': must be True"),
        (lambda: attention(torch.zeros(1, 4, 15)), ValueError, r"shapes \(1, 4, 15\), \(16, 16\)"),
        (lambda: attention(torch.zeros(4, 16)), ValueError, r"shape \(4, 16\): must be \(batch"),
        (lambda: attention(torch.zeros(1, 3, 16)), ValueError, r"\(1, 3, 6, 8\), \(4, 4\)"),
        (lambda: attention([1.0]), TypeError, "x must be of type Tensor, not list"),
        (lambda: MLP(CONFIG)(torch.zeros(3, 15)), ValueError, r"shapes \(3, 15\), \("),
        (lambda: MLP(CONFIG)([1.0]), TypeError, "x must be of type Tensor, not list"),
        (lambda: RMSNorm(2)([1.0, 2.0]), TypeError, "x must be of type Tensor, not list"),
        (lambda: DyT(8, site="atention"), ConfigError, "site = 'atention': must be one of"),
        (lambda: build_norm(NormConfig(), 8, None), ConfigError, "site = None: must be one of"),
        (lambda: register_norm("n1", formula=3), TypeError, "formula must be of type str"),
        (lambda: register_norm("n2")(3), TypeError, "built by a class or a function, not by 3"),
        (lambda: register_norm("n3")(lambda: MODEL), ConfigError, "'n3' has no first parameter"),
        (lambda: built_as(3), TypeError, "must return a module: it must .* Module, not int"),
        (lambda: KVCache(CONFIG, 1, 4, pad_B=IDS[0, :1] - 1), ConfigError, r"pad_B = \[-1\]: must"),
        (lambda: KVCache(CONFIG, 1, 4, pad_B=IDS[0, :1] + 4), ConfigError, r"pad_B = \[4\]: must"),
        (lambda: RotaryEmbedding(4, 4, scaling=2), TypeError, "scaling must be a LinearRope"),
        (lambda: Attention(None), TypeError, "must be of type ModelConfig"),
        (lambda: Attention(CONFIG, layer=-1), ConfigError, "layer = -1"),
        (lambda: MLP(None), TypeError, "must be of type ModelConfig"),
        (lambda: KVCache(CONFIG, 0, 4), ConfigError, "batch = 0"),
        (lambda: KVCache(CONFIG, 1, 1.5), ConfigError, "capacity = 1.5: must be a whole number"),
        (lambda: KVCache(CONFIG, 1, 4, dtype=torch.int64), ConfigError, "floating-point"),
        (lambda: KVCache(CONFIG, 2, 4, pad_B=torch.tensor([1])), ConfigError, "each of the 2 rows"),
        (lambda: RotaryEmbedding(3, 10), ConfigError, "head_dim = 3: must be even"),
        (lambda: RotaryEmbedding(4, 0), ConfigError, "max_seq_len = 0"),
        (lambda: RotaryEmbedding(4, 10, theta=-1), ConfigError, "theta = -1"),
        (lambda: generate(MODEL, [1], 5, temperature="a"), ConfigError, "temperature = 'a'"),
        (lambda: generate(MODEL, [1], 5, top_k=1.5), ConfigError, "top_k = 1.5"),
        (lambda: generate(MODEL, [1], 5, top_p="a"), ConfigError, "top_p = 'a'"),
        (lambda: generate(MODEL, [1], 2.5), ConfigError, "max_new_tokens = 2.5"),
        (lambda: generate(MODEL, [1], None), ConfigError, "max_new_tokens = None"),
        (lambda: generate(MODEL, [1], 3, seed=1.5), ConfigError, "seed = 1.5"),
        (lambda: generate(MODEL, "abc", 3), TypeError, "prompt 0 = 'abc': must be a list of ids"),
        (lambda: generate(MODEL, [[1, 2]], 3), TypeError, "must be a list of ids"),
        (lambda: generate(MODEL, [1], 3, stop_ids=5), TypeError, "stop_ids = 5"),
        (lambda: generate(None, [1], 3), TypeError, "must be a Transformer, not NoneType"),
        (lambda: generate_batch(MODEL, [1, 2], 3), TypeError, "prompt 0 = 1"),
        # Not at the first id: at the call.
        (lambda: stream(MODEL, [1], -3), ConfigError, "max_new_tokens = -3"),
        (lambda: stream(MODEL, [], 3), ConfigError, "prompt 0 is empty"),
        (lambda: minillama.evaluate(None, [1, 2]), TypeError, "must be a Transformer"),
        (lambda: minillama.evaluate(MODEL, [1, 2], seq_len="a"), ConfigError, "seq_len = 'a'"),
        (lambda: minillama.evaluate(MODEL, [1, 2], batch_size=None), ConfigError, "batch_size"),
        (lambda: minillama.evaluate(MODEL, [1, 2], n_bytes=NAN), ConfigError, "n_bytes = nan"),
        (lambda: BYTES.encode(5), TokenizerError, "must be a string, not int"),
        (lambda: BYTES.decode([1.5]), TokenizerError, "a list of integer ids"),
        (lambda: BYTES.decode("abc"), TokenizerError, "a list of integer ids"),
        (lambda: SentencePieceTokenizer("a"), TypeError, "must be of type bytes, not str"),
        (lambda: train_tokenizer("abc", 300), TypeError, "not one str"),
        (lambda: train_tokenizer(["abc"], "a"), ConfigError, "vocab_size = 'a'"),
        (lambda: minillama.train("base.yaml"), TypeError, "must be of type RunConfig, not str"),
        (lambda: parse_overrides([5]), TypeError, "must be of type str, not int"),
    ],
)
def test_a_wrong_argument_is_refused_at_the_call(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_config_of_an_ablation_is_not_trained():
    with pytest.raises(ConfigError, match="is the config of an ablation; run it: minillama ablate"):
        minillama.load_config("norms")


def test_the_config_of_a_run_is_no_ablation():
    with pytest.raises(ConfigError, match="is the config of a run; train it: minillama train"):
        load_ablation("tiny")


def test_a_compiler_that_fails_is_refused_before_training(monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ConfigError, match=r"false does not work.*train.compile=false"):
        check_compile(torch.device("cpu"))


@given(
    norm=st.sampled_from([RMSNorm, LayerNorm, DyT, Derf]),
    value=st.none() | st.integers() | st.floats() | st.text() | st.lists(st.booleans()),
    data=st.data(),
)
def test_a_switch_of_a_norm_is_true_or_false_and_nothing_else(norm, value, data):
    switches = {"affine", "unit_offset", "bias"} & set(inspect.signature(norm).parameters)
    name = data.draw(st.sampled_from(sorted(switches)))
    with pytest.raises(ConfigError, match=f"{name} = .*: must be True or False"):
        norm(8, **{name: value})
    norm(8, **{name: data.draw(st.booleans())})
