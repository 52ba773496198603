"""The kinds of norm by name: their options, and kinds of the user's own."""

import inspect
import types
import typing

import pytest
import torch
from torch import nn

import minillama
from minillama.config import load_config
from minillama.config.norms import NORM_KINDS, NormConfig
from minillama.errors import ConfigError, UnknownNameError
from minillama.model.norms import NORM_BUILDERS, NoNorm, RMSNorm, build_norm, register_norm
from minillama.model.transformer import Transformer
from minillama.sampling import generate

KINDS = ["derf", "dyt", "l2norm", "layernorm", "none", "rmsnorm", "scalenorm"]


def base_types(annotation):
    """Return the plain types of an annotation: {float, None} for ``Annotated[float, x] | None``."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return set().union(*map(base_types, typing.get_args(annotation)))
    return {annotation}


def test_the_kinds_that_configs_may_name_are_those_that_can_be_built():
    assert NORM_BUILDERS.names() == NORM_KINDS.names()
    assert set(KINDS) <= set(NORM_BUILDERS)  # a test of plugins may have added to them


@pytest.mark.parametrize("kind", KINDS)
def test_options_in_configs_are_the_constructor_parameters(kind):
    parameters = inspect.signature(NORM_BUILDERS.get(kind), eval_str=True).parameters
    passed = {"dim", "eps", "site"}
    options = NORM_KINDS.get(kind).options.model_fields
    assert options.keys() == parameters.keys() - passed
    for name, field in options.items():
        assert field.default == parameters[name].default, name
        assert base_types(field.annotation) == base_types(parameters[name].annotation), name
        assert field.description, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_says_what_it_is(kind):
    row = NORM_KINDS.get(kind)
    assert row.formula
    assert row.source


@pytest.mark.parametrize("kind", KINDS)
def test_build_norm_passes_size_and_epsilon_on(kind):
    norm = build_norm(NormConfig(kind=kind, eps=0.25), 6)
    assert norm(torch.ones(2, 6)).shape == (2, 6)
    if "eps" in inspect.signature(NORM_BUILDERS.get(kind)).parameters and kind != "none":
        assert norm.eps == 0.25


def test_an_unknown_kind_names_the_nearest_and_all():
    config = NormConfig().model_copy(update={"kind": "rmsnrom"})
    with pytest.raises(UnknownNameError, match="did you mean 'rmsnorm'") as error:
        build_norm(config, 4)
    assert all(kind in str(error.value) for kind in KINDS)


PLUGIN = """
import torch
from torch import nn

from minillama import register_norm


@register_norm("clipnorm", formula="clip(x, −c, c) · γ", source="a test")
class ClipNorm(nn.Module):
    def __init__(self, dim: int, *, c: float = 2.0, affine: bool = True):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None

    def forward(self, x):
        y = x.clamp(-self.c, self.c)
        return y if self.weight is None else y * self.weight
"""


@pytest.fixture
def plugin_config(tmp_path, scratch_registries):
    (tmp_path / "clip.py").write_text(PLUGIN, encoding="utf-8")
    path = tmp_path / "config.yaml"
    path.write_text(
        f"plugins: ['{(tmp_path / 'clip.py').as_posix()}']\n"
        "model: {dim: 8, n_heads: 2, n_layers: 1, norm: {kind: clipnorm, options: {c: 0.5}}}\n",
        encoding="utf-8",
    )
    return path


def test_a_norm_of_a_users_own_in_a_plugin_file_is_used_by_name(plugin_config):
    config = load_config(plugin_config)
    assert config.model.norm.options == {"c": 0.5, "affine": True}
    spec = NORM_KINDS.get("clipnorm")
    assert (spec.formula, spec.source) == ("clip(x, −c, c) · γ", "a test")
    model = Transformer(config.model)
    norm = model.blocks[0].attention_input_norm
    assert type(norm).__name__ == "ClipNorm"
    torch.testing.assert_close(norm(torch.tensor([-3.0, 0.25])[:, None]), _column(-0.5, 0.25, 8))
    assert len(generate(model, [1], 3, temperature=0)) == 3
    plain = load_config(plugin_config, ["model.norm.kind=rmsnorm"])
    assert torch.equal(Transformer(plain.model).embed.weight, model.embed.weight)


def _column(first, second, dim):
    return torch.tensor([[first] * dim, [second] * dim])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.norm.options.d=1", "model.norm.options.d = 1: no such field"),
        ("model.norm.options.c=wide", "model.norm.options.c = 'wide': should be a valid number"),
        ("model.norm.options.affine=3", "model.norm.options.affine = 3"),
        ("model.norm.kind=clipnrom", "did you mean 'clipnorm'"),
    ],
)
def test_options_of_a_norm_of_a_users_own_are_checked(plugin_config, override, expected):
    with pytest.raises(ConfigError) as error:
        load_config(plugin_config, [override])
    assert expected in str(error.value)
    assert len(error.value.field_errors) == 1


def test_a_function_may_build_a_norm_and_hear_size_epsilon_and_site(scratch_registries):
    heard = []

    @register_norm("factory")
    def factory(dim: int, eps: float, site: str, partial: float):
        """Say x / rms(x)."""
        heard.append((dim, eps, site, partial))
        return RMSNorm(dim, eps, partial=partial)

    assert NORM_KINDS.get("factory").formula == "Say x / rms(x)."
    config = NormConfig(kind="factory", eps=1e-3, options={"partial": 0.5})
    norm = build_norm(config, 8, "mlp")
    assert heard == [(8, 1e-3, "mlp", 0.5)]
    assert isinstance(norm, RMSNorm)


def test_an_option_without_a_default_is_required(scratch_registries):
    @register_norm("needy")
    class Needy(NoNorm):
        def __init__(self, dim: int, strength: float) -> None:
            super().__init__(dim)

    with pytest.raises(ValueError, match=r"options.strength|strength = None: is required"):
        NormConfig(kind="needy")
    assert NormConfig(kind="needy", options={"strength": 2}).options == {"strength": 2.0}


def test_a_name_that_is_taken_is_refused(scratch_registries):
    with pytest.raises(ConfigError, match="'rmsnorm' is registered already"):
        register_norm("rmsnorm")(nn.Identity)
    assert NORM_BUILDERS.get("rmsnorm") is RMSNorm


def test_register_norm_hands_the_class_back(scratch_registries):
    assert minillama.register_norm("same")(NoNorm) is NoNorm
