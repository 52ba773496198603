"""The config of an ablation itself; the runs it leads to: tests/ablation/test_grid.py."""

import pytest

from minillama.config.ablation import AblationConfig, RunnerConfig, load_ablation
from minillama.config.loading import check
from minillama.config.run import parse_run, to_yaml
from minillama.errors import ConfigError


@pytest.fixture
def ablation(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "base.yaml").write_text("model: {dim: 32, norm: {options: {partial: 0.5}}}\n")
    text = "base: {}\nbaseline: a\narms: {a: , b: {model.norm.kind: layernorm}}\nlr: [1e-3, 3e-3]\n"

    def load(*overrides, text=text):
        path = tmp_path / "ablation.yaml"
        path.write_text(text, encoding="utf-8")
        return load_ablation(path, overrides)

    return load


def test_an_ablation_has_arms_rates_and_seeds(ablation):
    config = ablation()
    assert config.arms == {"a": {}, "b": {"model.norm.kind": "layernorm"}}
    assert (config.lr, config.seeds, config.margin) == ([1e-3, 3e-3], [0], 0.02)
    assert config.out_dir == "runs/ablation"
    assert ablation("name=mine").out_dir == "runs/mine"
    assert ablation("seeds=[0, 1, 2]").seeds == [0, 1, 2]


def test_the_base_is_a_path_relative_to_the_ablation_and_overridable(ablation):
    config = ablation("base=base.yaml")
    assert (
        config.base == "base.yaml"
    )  # given on the command line it is seen from the current folder
    text = "base: base.yaml\nbaseline: a\narms: {a: {}}\nlr: [1e-3]\n"
    config = ablation(text=text)
    assert config.base == {"model": {"dim": 32, "norm": {"options": {"partial": 0.5}}}}
    config = ablation("base.model.dim=64", "base.optim.lr=1", text=text)
    assert config.base["model"]["dim"] == 64
    assert config.base["optim"] == {"lr": 1}
    assert parse_run(config.base, "base").model.dim == 64
    config = ablation("base.model.norm.kind=layernorm", text=text)
    assert config.base["model"]["norm"] == {"kind": "layernorm"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("baseline=c", "baseline = 'c': unknown arm 'c'; valid: a, b"),
        ("baseline=A", "did you mean 'a'?"),
        ("lr=[]", "lr = []: list should have at least 1 item"),
        ("lr=[0.1, -1]", "lr.1 = -1: should be greater than 0"),
        ("lr=[1e-3, 0.001]", "lr = [0.001, 0.001]: names a value twice"),
        ("seeds=[0, 0]", "seeds = [0, 0]: names a value twice"),
        ("seeds=[]", "seeds = []: list should have at least 1 item"),
        ("seeds=[true]", "seeds.0 = True: must be a number"),
        ("axes={optim.warmup_steps: [0, 0]}", "axes.optim.warmup_steps = [0, 0]: names a value"),
        ("axes={optim.warmup_steps: []}", "at least 1 item"),
        ("arms={}", "at least 1 item"),
        ("arms={'a/b': {}, a: {}}", "a/b"),
        ("arms=3", "arms = 3: should be a valid dictionary"),
        ("margin=0", "margin = 0: should be greater than 0"),
        ("runner.workers=0", "runner.workers = 0"),
        ("runner.kind=slurm", "unknown choice 'slurm'"),
        ("xyzzy=1", "no such field"),
    ],
)
def test_a_wrong_entry_of_an_ablation_is_refused(ablation, override, expected):
    with pytest.raises(ConfigError) as error:
        ablation(override)
    assert len(error.value.field_errors) == 1
    assert expected in str(error.value)


def test_a_missing_base_file_is_refused(ablation):
    with pytest.raises(ConfigError, match=r"no config at .*nowhere"):
        ablation(text="base: nowhere.yaml\nbaseline: a\narms: {a: {}}\nlr: [1]\n")


def test_an_ablation_is_written_and_read_back_equal(ablation, tmp_path):
    config = ablation("axes={train.dtype: [float32, bfloat16]}", "runner.workers=2")
    assert ablation(text=to_yaml(config)) == config
    assert isinstance(config, AblationConfig)


def test_what_is_rays_alone_is_refused_without_it():
    with pytest.raises(ConfigError) as caught:
        check(RunnerConfig, {"gpus": 0.5, "retries": 1}, "test")
    assert [expected.path for expected in caught.value.field_errors] == ["gpus", "retries"]
    assert "set kind: ray" in str(caught.value)
    assert check(RunnerConfig, {"kind": "ray", "gpus": 0.5, "retries": 0}, "test").gpus == 0.5
