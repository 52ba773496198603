"""Configs that differ in their norms alone begin with equal other weights and see equal batches."""

import pytest
import torch

from minillama.data.batches import Batches
from minillama.model.norms import norm_parameter_names
from minillama.model.transformer import Transformer
from minillama.training.trainer import train

ARMS = {
    "rmsnorm": {},
    "layernorm": {"model.norm.kind": "layernorm"},
    "none": {"model.norm.kind": "none"},
    "peri with QK norm": {"model.norm.placement": "peri", "model.norm.qk_norm": "head"},
    "post": {"model.norm.placement": "post", "model.norm.embed_norm": True},
    "rezero": {"model.norm.placement": "rezero"},
}


@pytest.fixture
def seen(monkeypatch):
    """Return what every step of a run was trained on, and the weights that it began with."""
    batches, weights = [], []
    batch_at, loss_sums = Batches.batch_at, Transformer.loss_sums

    def watch_batches(self, step, rows):
        batch = batch_at(self, step, rows)
        batches.append(batch)
        return batch

    def watch_weights(self, *arguments, **named):
        if not weights:
            norms = norm_parameter_names(self)
            others = {n: p for n, p in self.named_parameters() if n not in norms}
            weights.append({n: p.detach().clone() for n, p in others.items() if p.ndim > 1})
        return loss_sums(self, *arguments, **named)

    monkeypatch.setattr(Batches, "batch_at", watch_batches)
    monkeypatch.setattr(Transformer, "loss_sums", watch_weights)

    def take():
        taken = list(batches), dict(weights[0])
        batches.clear(), weights.clear()
        return taken

    return take


def test_arms_that_differ_in_norms_share_weights_batches_and_their_hashes(tiny, seen):
    runs = {}
    for name, overrides in ARMS.items():
        steps = {"train.steps": 3, "optim.warmup_steps": 0}
        summary = train(tiny(name.replace(" ", "-"), **steps, **overrides), progress=False)
        runs[name] = (summary["weights_hash"], summary["data_hash"]), *seen()
    hashes, batches, weights = runs.pop("rmsnorm")
    assert len(batches) == 3
    for other_hashes, other_batches, other_weights in runs.values():
        assert other_hashes == hashes
        assert other_weights.keys() == weights.keys()
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights)
        for ours, theirs in zip(batches, other_batches, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_another_seed_changes_both(tiny, seen):
    hashes = []
    for seed in (0, 1):
        config = tiny(
            f"seed-{seed}", **{"train.seed": seed, "train.steps": 1, "optim.warmup_steps": 0}
        )
        summary = train(config, progress=False)
        hashes.append((summary["weights_hash"], summary["data_hash"], *seen()))
    (weights, data, batches, tensors), (weights_1, data_1, batches_1, tensors_1) = hashes
    assert weights != weights_1
    assert data != data_1
    assert not torch.equal(batches[0][0], batches_1[0][0])
    assert not torch.equal(tensors["embed.weight"], tensors_1["embed.weight"])
