"""Advice on runs that are no fair test of their norm or placement."""

from typing import Any

import pytest

from minillama.config import RunConfig
from minillama.config.advice import advice
from minillama.config.placement import PLACEMENTS


def lines(model: dict[str, Any], warmup_steps: int = 10, **optim: Any) -> list[str]:
    optim = {"warmup_steps": warmup_steps, **optim}
    return advice(RunConfig.model_validate({"model": model, "optim": optim}))


def test_each_condition_that_a_fair_dyt_lacks_is_named() -> None:
    fair = {"alpha": 0.2, "alpha_attention": 0.8, "bias": False}
    assert lines({}) == []
    assert lines({"norm": {"kind": "dyt", "options": fair}, "embed_scale": "learned"}) == []
    [naive] = lines({"norm": {"kind": "dyt"}})
    assert all(w in naive for w in ("options.bias=false", "alpha_attention", "embed_scale=learned"))
    [unscaled] = lines({"norm": {"kind": "dyt", "options": fair}})
    assert unscaled.endswith("without model.embed_scale=learned")


FAIR: dict[str, dict[str, Any]] = {
    "post": {},
    "reordered": {"init": "plain_normal", "norm": {"qk_norm": "full"}},
    "scaled": {"init": "plain_normal"},
    "deepnorm": {"init": "fan_in"},
    "rezero": {"init": "fan_in"},
    "mix": {"init": "plain_normal"},
    "hybrid": {"init": "normal"},
    "ngpt": {"tie_embeddings": False, "norm": {"kind": "l2norm"}},
}
"""A setting of each placement that has conditions, in which it is a test of its source."""

UNFAIR = [
    ("post", {}, {"warmup_steps": 0}, "optim.warmup_steps = 0, where its source has a warm-up"),
    ("reordered", {"norm": {"qk_norm": "none"}}, {}, "model.norm.qk_norm = 'none'"),
    ("reordered", {"init": "normal"}, {}, "has plain_normal or fan_in"),
    ("scaled", {"init": "normal"}, {}, "normal divides o_proj and down_proj"),
    ("deepnorm", {"init": "normal"}, {}, "model.init = 'normal', where its source has fan_in"),
    ("deepnorm", {}, {"warmup_steps": 0}, "a warm-up"),
    ("rezero", {"init": "normal"}, {}, "takes the place of smaller weights"),
    ("mix", {"init": "normal"}, {}, "its code divides no weights"),
    ("mix", {}, {"warmup_steps": 0}, "a warm-up"),
    ("hybrid", {"init": "fan_in"}, {}, "where its source has normal"),
    ("hybrid", {}, {"warmup_steps": 0}, "a warm-up"),
    ("ngpt", {"norm": {"kind": "rmsnorm"}}, {}, "model.norm.kind = 'rmsnorm'"),
    ("ngpt", {"tie_embeddings": True}, {}, "model.tie_embeddings = True"),
    ("ngpt", {}, {"weight_decay": 0.1}, "optim.weight_decay = 0.1"),
    ("ngpt", {}, {"warmup_steps": 10}, "optim.warmup_steps = 10, where its source has 0"),
]


def setting(placement: str, change: dict[str, Any]) -> dict[str, Any]:
    fair = FAIR[placement]
    norm = {"placement": placement, **fair.get("norm", {}), **change.get("norm", {})}
    return {**fair, **change, "norm": norm}


def optim_of(placement: str) -> dict[str, Any]:
    return {"warmup_steps": 0, "weight_decay": 0.0} if placement == "ngpt" else {}


@pytest.mark.parametrize("placement", FAIR)
def test_a_placement_trained_as_its_source_has_no_advice(placement: str) -> None:
    assert lines(setting(placement, {}), **optim_of(placement)) == []


@pytest.mark.parametrize(("placement", "change", "optim", "said"), UNFAIR)
def test_what_the_source_of_a_placement_did_not_do_is_named(
    placement: str, change: dict[str, Any], optim: dict[str, Any], said: str
) -> None:
    [line] = lines(setting(placement, change), **{**optim_of(placement), **optim})
    assert line.startswith(f"placement {placement}: ")
    assert said in line


def test_every_condition_is_tested() -> None:
    rows = {name: PLACEMENTS.get(name) for name in PLACEMENTS}
    n_conditions = {name: len(row.conditions) for name, row in rows.items() if row.conditions}
    assert n_conditions == {name: sum(row[0] == name for row in UNFAIR) for name in FAIR}
