import re
from pathlib import Path
from typing import Any

import pytest

from minillama.ablation.grid import Place, arms, cell_folders, cells
from minillama.config.ablation import AblationConfig
from minillama.errors import ConfigError


def ablation(**fields: Any) -> AblationConfig:
    default: dict[str, Any] = {
        "name": "test",
        "base": {
            "model": {"dim": 16, "n_heads": 2, "norm": {"eps": 1e-5}},
            "tokenizer": {"kind": "byte"},
            "name": "of-the-base",
            "out_dir": "elsewhere",
        },
        "arms": {"rms": {}, "ln": {"model.norm.kind": "layernorm"}},
        "baseline": "rms",
        "lr": [1e-3, 3e-3],
        "seeds": [0, 1],
    }
    return AblationConfig(**default | fields)


def test_each_cell_is_a_resolved_run_with_its_own_folder() -> None:
    grid = cells(ablation())
    assert [(c.arm, c.lr, c.seed) for c in grid] == [
        (arm, lr, seed) for arm in ("rms", "ln") for lr in (1e-3, 3e-3) for seed in (0, 1)
    ]
    last = grid[-1]
    assert last.folder == Path("runs/test/cells/ln/lr-0.003/seed-1")
    assert last.config.name == "ln-lr-0.003-seed-1"
    assert last.config.optim.lr == 3e-3
    assert last.config.train.seed == 1
    assert last.config.model.norm.kind == "layernorm"
    assert last.config.model.norm.eps == 1e-5
    assert last.config.model.vocab_size == 259
    assert len({c.folder for c in grid}) == len(grid)


def test_any_arm_name_gives_a_short_safe_and_unique_folder() -> None:
    names = ["Post", "post", "a/b", "a-b", "..", "x" * 300, "x" * 299 + "y", "é", "con fused"]
    cells_of = cell_folders(Place(name, 1.0, 0) for name in names)
    folders = {place.arm: path.parts[1] for place, path in cells_of.items()}
    assert list(folders) == names
    assert (folders["Post"], folders["a-b"]) == ("Post", "a-b")
    assert all(re.fullmatch(r"[A-Za-z0-9_=+-][A-Za-z0-9._=+-]{,99}", f) for f in folders.values())
    assert len({folder.lower() for folder in folders.values()}) == len(names)


def test_arms_differ_only_in_what_they_override() -> None:
    grid = cells(ablation())
    rms, ln = (c.config.model_dump() for c in grid if c.lr == 1e-3 and c.seed == 0)
    for config in (rms, ln):
        del config["model"]["norm"], config["name"], config["out_dir"], config["arm"]
    assert rms == ln


def test_nested_overrides_add_to_the_base_as_dotted_ones_do() -> None:
    nested = {"model": {"norm": {"options": {"bias": False}, "kind": "layernorm"}}}
    dotted = {"model.norm.options.bias": False, "model.norm.kind": "layernorm"}
    for arm in (nested, dotted):
        config = cells(ablation(arms={"a": arm}, baseline="a"))[0].config
        assert config.model.dim == 16
        assert config.model.norm.eps == 1e-5
        assert config.model.norm.options == {"affine": True, "bias": False}


def test_an_arm_overrides_the_overrides_of_all_arms() -> None:
    config = ablation(
        overrides={"train.steps": 7, "model.dim": 32},
        arms={"wide": {"model.dim": 64}, "narrow": None},
        baseline="narrow",
    )
    assert {(c.arm, c.config.train.steps, c.config.model.dim) for c in cells(config)} == {
        ("wide", 7, 64),
        ("narrow", 7, 32),
    }


def test_axes_multiply_arms_and_keep_the_baseline_at_the_same_point() -> None:
    config = ablation(axes={"optim.warmup_steps": [0, 20], "model.init": ["normal", "fan_in"]})
    named = {arm.name: arm for arm in arms(config)}
    assert len(named) == 8
    arm = named["ln+warmup_steps=20+init=fan_in"]
    assert arm.baseline == "rms+warmup_steps=20+init=fan_in"
    cell = next(c for c in cells(config) if c.arm == arm.name)
    assert cell.config.optim.warmup_steps == 20
    assert cell.config.model.init == "fan_in"
    assert cell.config.model.norm.kind == "layernorm"
    assert len(cells(config)) == 8 * 4


def test_axes_with_equal_leaves_have_longer_labels() -> None:
    config = ablation(axes={"optim.eps": [1e-8, 1e-6], "model.norm.eps": [1e-5]})
    assert arms(config)[0].name == "rms+optim.eps=1e-08+model.norm.eps=1e-05"
    twice = ablation(axes={"data.source": [{"kind": "pydocs"}, {"kind": "pydocs "}]})
    with pytest.raises(ConfigError, match="the same name"):
        cells(twice)


def test_all_errors_of_all_arms_are_reported_at_once() -> None:
    config = ablation(
        base={"tokenizer": {"kind": "byte"}, "train": {"stepz": 3}},
        arms={
            "rms": {},
            "typo": {"model.norm.kind": "layrnorm", "model.dim": 30},
            "lr": {"optim.lr": 1, "model.n_heads": 3},
            "lost": {"train.steps.x": 1},
        },
    )
    with pytest.raises(ConfigError) as caught:
        cells(config)
    text = str(caught.value)
    assert text.count("train.stepz") == 1
    assert "base: train.stepz = 3: no such field; did you mean steps?" in text
    assert "arms.typo: model.norm.kind = 'layrnorm'" in text
    assert "did you mean 'layernorm'?" in text
    assert "arms.typo: model.dim = 30" in text
    assert "arms.lr: optim.lr = 1: is set by lr; leave it out" in text
    assert "arms.lr: model.dim = 128" in text
    assert "arms.rms" not in text


def test_an_override_through_a_number_is_an_error_of_its_arm() -> None:
    config = ablation(base={"train": {"steps": 3}}, arms={"rms": {}, "lost": {"train.steps.x": 1}})
    with pytest.raises(ConfigError, match=r"arms\.lost: override train\.steps\.x: train\.steps"):
        cells(config)


def test_a_grid_that_repeats_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="names a value twice"):
        ablation(lr=[1e-3, 1.00000001e-3])
    with pytest.raises(ValueError, match=r"axes\.model\.init"):
        ablation(axes={"model.init": ["normal", "normal"]})


def test_a_base_that_skips_keeps_skipping_in_every_cell() -> None:
    def rule(**fields: Any) -> str:
        return cells(ablation(**fields))[0].config.train.on_nonfinite

    never = {"stop_hopeless": False}
    assert (rule(), rule(runner=never)) == ("stop", "run_on")
    skips = {"train.on_nonfinite": "skip"}
    assert rule(overrides=skips) == rule(overrides=skips, runner=never) == "skip"


def test_cells_of_several_processes_are_refused_once() -> None:
    config = ablation(overrides={"train.parallel": "ddp"})
    with pytest.raises(ConfigError) as caught:
        cells(config)
    said = "base: train.parallel = 'ddp': a cell is trained by one process; leave it out"
    assert str(caught.value) == f"ablation test: {said}"
