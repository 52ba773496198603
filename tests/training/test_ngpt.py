"""Training an nGPT, whose weights are normalised after every update."""

import pytest
import torch

from minillama.training.checkpoint import load_checkpoint
from minillama.training.trainer import train

FIELDS = {
    "model.norm.kind": "l2norm",
    "model.norm.placement": "ngpt",
    "model.tie_embeddings": False,
    "optim.warmup_steps": 0,
    "optim.weight_decay": 0.0,
    "train.steps": 6,
}


def assert_unit_weights(model):
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            dim = 0 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            assert (weight.norm(dim=dim) - 1).abs().max() < 1e-6, name


def test_training_keeps_the_lengths_and_learns_every_scale(tiny):
    config = tiny(**FIELDS)
    summary = train(config, progress=False)
    assert summary["val_loss"] < summary["init_val_loss"]
    model, *_ = load_checkpoint(config.out_dir)
    with torch.no_grad():
        assert_unit_weights(model)
        scales = [weight for weight in model.parameters() if weight.ndim == 1]
        assert len(scales) == 2 * 5 + 1
        assert all(weight.std() > 0 for weight in scales)


def test_a_resumed_run_has_the_same_bits(tiny):
    whole = tiny("whole", **FIELDS)
    train(whole, progress=False)
    train(tiny("half", **FIELDS | {"train.steps": 3, "optim.schedule": "constant"}), progress=False)
    constant = FIELDS | {"optim.schedule": "constant"}
    half, once = tiny("half", **constant), tiny("once", **constant)
    train(half, progress=False, resume=True)
    train(once, progress=False)
    one, other = (load_checkpoint(config.out_dir)[0].state_dict() for config in (half, once))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "change",
    [{"train.dtype": "bfloat16"}, {"train.recompute": True, "train.micro_batch_size": 2}],
    ids=str,
)
def test_other_ways_to_compute_agree(tiny, change):
    losses = [
        train(tiny(name, **fields), progress=False)["val_loss"]
        for name, fields in (("plain", FIELDS), ("other", FIELDS | change))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=2e-2 if "train.dtype" in change else 1e-5)
