"""The model against tiny random models of transformers: logits, loss and every gradient.

Names are mapped here once more, apart from the package's own conversion, which has its own tests.
"""

import copy

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from minillama.config import ModelConfig
from minillama.model.transformer import Transformer

VOCAB, LENGTH = 61, 150
SIZES = {"MHA": 4, "GQA": 2, "MQA": 1}

OUTER = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "lm_head.weight",
}
INNER = {f"self_attn.{p}_proj": f"attention.{p}_proj" for p in "qkvo"} | {
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
PRE = {"input_layernorm": "attention_input_norm", "post_attention_layernorm": "mlp_input_norm"}
REORDERED = {
    "post_attention_layernorm": "attention_output_norm",
    "post_feedforward_layernorm": "mlp_output_norm",
}


def ours_for(name, norms):
    if name in OUTER:
        return OUTER[name]
    _, _, layer, role = name.removesuffix(".weight").split(".", 3)
    return f"blocks.{layer}.{(INNER | norms)[role]}.weight"


def pair(model_class, config_class, norms, *, n_kv_heads=2, tied=True, norm=None, **theirs):
    """Return a random model of transformers, and ours with its weights."""
    torch.manual_seed(0)
    reference = model_class(
        config_class(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=n_kv_heads,
            head_dim=8,
            max_position_embeddings=LENGTH,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            pad_token_id=None,
            initializer_range=0.2,  # at 0.02 attention is nearly flat, and errors in it do not show
            attn_implementation="eager",
            **theirs,
        )
    )
    for weight in reference.parameters():
        if weight.ndim == 1:
            weight.data += 0.3 * torch.randn_like(weight)
    model = Transformer(
        ModelConfig(
            vocab_size=VOCAB,
            dim=32,
            n_layers=3,
            n_heads=4,
            n_kv_heads=n_kv_heads,
            ffn_dim=48,
            max_seq_len=LENGTH,
            tie_embeddings=tied,
            norm={"eps": 1e-5, **(norm or {})},
        )
    )
    names = {ours_for(name, norms): name for name, _ in reference.named_parameters()}
    assert names.keys() == dict(model.named_parameters()).keys()
    weights = dict(reference.named_parameters())
    model.load_state_dict({ours: weights[theirs].detach() for ours, theirs in names.items()})
    return reference, model, names


def inputs():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = targets[1, -3:] = -100
    return inputs, targets


def check_logits_loss_and_gradients(reference, model, names):
    tokens, targets = inputs()
    expected, logits = reference(tokens).logits, model(tokens)
    # Past position 100, where a wrong rotation or a lost float32 phase would show.
    torch.testing.assert_close(logits[:, 100:], expected[:, 100:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    exact = copy.deepcopy(model).double()(tokens)  # both round; neither may be farther from this
    assert (logits - exact).square().mean() <= 1.5**2 * (expected - exact).square().mean()

    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    own = reference(tokens, labels=tokens).loss
    shifted = tokens.roll(-1, 1)
    shifted[:, -1] = -100
    torch.testing.assert_close(model.loss(tokens, shifted), own, rtol=1e-6, atol=1e-6)

    expected_loss.backward()
    loss.backward()
    theirs = dict(reference.named_parameters())
    for name, weight in model.named_parameters():
        gradient = theirs[names[name]].grad
        assert gradient.abs().max() > 0, name
        scale = gradient.abs().max().item()
        torch.testing.assert_close(
            weight.grad / scale, gradient / scale, rtol=0, atol=2e-5, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("n_kv_heads", SIZES.values(), ids=SIZES)
def test_llama(n_kv_heads, tied):
    check_logits_loss_and_gradients(
        *pair(LlamaForCausalLM, LlamaConfig, PRE, n_kv_heads=n_kv_heads, tied=tied)
    )


def test_qk_norm_by_head_is_that_of_qwen_3():
    check_logits_loss_and_gradients(
        *pair(Qwen3ForCausalLM, Qwen3Config, PRE, tied=False, norm={"qk_norm": "head"})
    )


def test_reordered_norm_and_qk_norm_in_full_are_those_of_olmo_2():
    norm = {"placement": "reordered", "qk_norm": "full"}
    check_logits_loss_and_gradients(
        *pair(Olmo2ForCausalLM, Olmo2Config, REORDERED, tied=False, norm=norm)
    )


def test_zero_centred_gains_and_gated_attention_are_those_of_qwen_3_5():
    # Its attention layers and gains are Qwen3-Next's, with a plain MLP.
    torch.manual_seed(0)
    theirs = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["full_attention"] * 2,
            max_position_embeddings=LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1},
            initializer_range=0.2,
            pad_token_id=None,
        )
    )
    for weight in theirs.parameters():
        if weight.ndim == 1:
            weight.data += 0.3 * torch.randn_like(weight)
    model = Transformer(
        ModelConfig(
            vocab_size=VOCAB,
            dim=32,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            ffn_dim=48,
            max_seq_len=LENGTH,
            tie_embeddings=False,
            attention_gate="element",
            norm={
                "eps": 1e-6,
                "options": {"unit_offset": True},
                "qk_norm": "head",
                "qk_unit_offset": True,
            },
        )
    )

    def ours(tensors):
        """Return tensors by our names; q_proj holds queries and gates, head by head."""
        found = {ours_for(name, PRE): tensor for name, tensor in tensors.items()}
        for layer in range(2):
            name = f"blocks.{layer}.attention.{{}}_proj.weight"
            queries, gates = found[name.format("q")].unflatten(0, (4, 2, 8)).unbind(1)
            found[name.format("q")] = queries.flatten(0, 1)
            found[name.format("g")] = gates.flatten(0, 1)
        return found

    model.load_state_dict(ours({n: p.detach() for n, p in theirs.named_parameters()}))
    tokens, targets = inputs()
    expected = theirs(tokens).logits
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=2e-5)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    model.loss(tokens, targets).backward()
    gradients = ours({n: p.grad for n, p in theirs.named_parameters()})
    for name, weight in model.named_parameters():
        scale = gradients[name].abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(
            weight.grad / scale, gradients[name] / scale, rtol=0, atol=2e-5, msg=name
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_llama_in_another_dtype(dtype):
    reference, model, _ = pair(LlamaForCausalLM, LlamaConfig, PRE)
    reference, model = reference.to(dtype), model.to(dtype)
    tokens, _ = inputs()
    expected, logits = reference(tokens).logits, model(tokens)
    assert logits.dtype == dtype
    atol = 1e-5 if dtype == torch.float64 else 0.15  # transformers' angles are float32 too
    scale = expected.abs().max()
    torch.testing.assert_close(logits / scale, expected / scale, rtol=0, atol=atol)
