"""Norms: values, gradients, dtypes and casts.  Their exact properties: test_norm_properties.py."""

import math

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from minillama.config.norms import NORM_KINDS, NormConfig
from minillama.model.norms import (
    Derf,
    DyT,
    L2Norm,
    LayerNorm,
    NoNorm,
    RMSNorm,
    ScaleNorm,
    build_norm,
)

SIZES = (1, 3, 63, 123)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)

EVERY_NORM = [
    ("rmsnorm", {}),
    ("rmsnorm", {"affine": False}),
    ("rmsnorm", {"unit_offset": True}),
    ("rmsnorm", {"partial": 0.5}),
    ("rmsnorm", {"partial": 0.5, "unit_offset": True}),
    ("rmsnorm", {"bias": True}),
    ("layernorm", {}),
    ("layernorm", {"bias": False}),
    ("layernorm", {"affine": False}),
    ("scalenorm", {}),
    ("l2norm", {}),
    ("dyt", {}),
    ("dyt", {"bias": False}),
    ("derf", {}),
    ("none", {}),
]
every_norm = pytest.mark.parametrize(("kind", "options"), EVERY_NORM, ids=str)


def build(kind, options, dim, eps=1e-6):
    return build_norm(NormConfig(kind=kind, eps=eps, options=options), dim)


def by_hand(kind, options, norm, x, eps=1e-6):
    """The formula of the module's table, in float64 on float64 copies of the norm's numbers."""
    x = x.double()
    p = {name: value.double() for name, value in norm.named_parameters()}
    if kind == "rmsnorm":
        share = x[..., : max(1, int(x.shape[-1] * options.get("partial", 1.0)))]
        y = x / torch.sqrt((share * share).mean(-1, keepdim=True) + eps)
        if "weight" not in p:
            return y
        y = y * (1 + p["weight"]) if options.get("unit_offset") else y * p["weight"]
        return y + p.get("bias", 0.0)
    if kind == "layernorm":
        centred = x - x.mean(-1, keepdim=True)
        y = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)
        return y * p.get("weight", 1.0) + p.get("bias", 0.0)
    length = torch.sqrt((x * x).sum(-1, keepdim=True)).clamp(min=eps)
    if kind == "scalenorm":
        return p["g"] * x / length
    if kind == "l2norm":
        return x / length
    if kind == "dyt":
        return p["weight"] * torch.tanh(p["alpha"] * x) + p.get("bias", 0.0)
    if kind == "derf":
        return p["weight"] * torch.erf(p["alpha"] * x + p["shift"]) + p.get("bias", 0.0)
    return x


def randomise(norm, generator=None):
    """Move every number off its start, where gains and shifts do not show."""
    for weight in norm.parameters():
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return norm


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def awkward_inputs(dim, dtype, generator):
    """Contiguous, transposed, strided and one-row inputs of ``dim`` features."""

    def draw(*shape):
        return (2 * torch.randn(shape, generator=generator)).to(dtype)

    yield "contiguous", draw(2, 5, dim)
    yield "transposed", draw(2, dim, 5).transpose(1, 2)
    yield "strided", draw(3, 2 * dim)[:, ::2]
    yield "every other row", draw(6, dim)[::2]
    yield "expanded", draw(1, dim).expand(4, dim)
    yield "one vector", draw(dim)


def assert_close(layout, ours, reference, *, rtol, atol):
    torch.testing.assert_close(
        ours, reference, rtol=rtol, atol=atol, msg=lambda text: f"{layout} input: {text}"
    )


# ---------------------------------------------------------------- the checks RMSNorm came with


def test_the_three_checks_that_rmsnorm_came_with():
    x = 10 * torch.randn(2, 10, 512, generator=seeded())
    norm = RMSNorm(512)
    y = norm(x)
    assert y.shape == x.shape
    rms = y.square().mean(-1).sqrt()
    assert (rms - 1).abs().max() < 1e-3
    y.sum().backward()
    assert norm.weight.grad.shape == (512,)
    assert norm.weight.grad.abs().max() > 0


# ---------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", SIZES)
@every_norm
def test_values_match_the_formula(kind, options, dim, dtype):
    generator = seeded(dim)
    norm = randomise(build(kind, options, dim), generator).to(dtype)
    # Each of at most two roundings to the dtype is off by half an eps of the value; layernorm and
    # the squashes add β to a product, so there the eps of the largest value counts.
    eps = torch.finfo(dtype).eps
    for layout, x in awkward_inputs(dim, dtype, generator):
        y, expected = norm(x), by_hand(kind, options, norm, x)
        assert y.dtype == dtype, layout
        assert y.shape == x.shape, layout
        scale = max(1.0, expected.abs().max().item())
        atol = (3 if dtype in HALVES else 30) * eps * scale
        assert_close(layout, y.double(), expected, rtol=1.01 * eps, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dim", SIZES)
@every_norm
def test_gradients_match_the_formula(kind, options, dim, dtype):
    generator, eps = seeded(dim), 1e-2  # large, for at dim 1 a layernorm divides by its root alone
    norm = randomise(build(kind, options, dim, eps), generator).to(dtype)
    for layout, x in awkward_inputs(dim, dtype, generator):
        x = x.detach().requires_grad_()
        # The gradient of a transposed result is not contiguous either.
        g = torch.randn(tuple(reversed(x.shape)), generator=generator).permute(
            *reversed(range(x.ndim))
        )
        inputs = [x, *norm.parameters()]
        got = torch.autograd.grad(norm(x), inputs, g.to(dtype))
        expected = torch.autograd.grad(
            by_hand(kind, options, norm, x, eps), inputs, g.to(dtype).double()
        )
        for ours, reference in zip(got, expected, strict=True):
            assert ours.dtype == dtype, layout
            scale = max(1.0, reference.abs().max().item())
            atol = (8 if dtype in HALVES else 60) * torch.finfo(dtype).eps * scale
            assert_close(layout, ours, reference, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize(
    ("ours", "theirs"), [(RMSNorm, nn.RMSNorm), (LayerNorm, nn.LayerNorm)], ids=["rms", "ln"]
)
def test_values_and_gradients_match_torch(ours, theirs, dim, dtype):
    generator = seeded(dim)
    norm = randomise(ours(dim, eps=1e-2), generator).to(dtype)
    reference = theirs(dim, eps=1e-2).to(dtype)
    reference.load_state_dict(norm.state_dict())
    atol = (4 if dtype in HALVES else 20) * torch.finfo(dtype).eps
    for layout, x in awkward_inputs(dim, dtype, generator):
        results = []
        for module in (norm, reference):
            leaf = x.detach().requires_grad_()
            y = module(leaf)
            g = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(dtype)
            results.append((y, *torch.autograd.grad(y, [leaf, *module.parameters()], g)))
        for one, other in zip(*results, strict=True):
            scale = max(1.0, other.abs().max().item())
            assert_close(layout, one, other, rtol=0, atol=atol * scale)


@pytest.mark.parametrize("dim", [2, 3, 7])
@every_norm
def test_gradcheck(kind, options, dim):
    norm = randomise(build(kind, options, dim, eps=1e-3), seeded(1)).double()
    x = torch.randn(2, 3, dim, generator=seeded(2), dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in norm.named_parameters()]

    def f(x, *weights):
        return torch.func.functional_call(norm, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(f, (x, *norm.parameters()))


def test_epsilon_stands_inside_the_root():
    x = torch.full((4,), 1e-3, dtype=torch.float64)
    inside = 1e-3 / math.sqrt(1e-6 + 1e-2)
    outside = 1e-3 / (1e-3 + 1e-2)
    y = RMSNorm(4, eps=1e-2).double()(x)
    torch.testing.assert_close(y, torch.full_like(x, inside))
    assert abs(y[0].item() - outside) > 0.05
    x = torch.tensor([-1e-3, 1e-3], dtype=torch.float64)
    y = LayerNorm(2, eps=1e-2).double()(x)
    torch.testing.assert_close(y, x / math.sqrt(1e-6 + 1e-2))


@pytest.mark.parametrize(("norm", "scale"), [(L2Norm, 1.0), (ScaleNorm, math.sqrt(8))])
def test_epsilon_of_the_l2_norms_is_the_least_length(norm, scale):
    x = torch.zeros(2, 8)
    x[0, 0], x[1, 0] = 1e-4, 3.0
    y = norm(8, eps=1e-2)(x)
    torch.testing.assert_close(y[:, 0], scale * torch.tensor([1e-2, 1.0]))


@pytest.mark.parametrize(
    ("dim", "partial", "measured"),
    [(4, 1.0, 4), (4, 0.5, 2), (4, 0.99, 3), (4, 0.01, 1), (100, 0.29, 29), (1000, 0.001, 1)],
)
def test_partial_measures_the_first_features_and_at_least_one(dim, partial, measured):
    norm = RMSNorm(dim, eps=0.0, partial=partial)
    x = torch.full((dim,), 100.0)
    x[:measured] = 0.0
    x[measured - 1] = 2.0 * math.sqrt(measured)  # the mean square of those alone is 4
    torch.testing.assert_close(norm(x), x / 2)


# ---------------------------------------------------------------- casts and dtypes


def test_rmsnorm_casts_in_the_order_of_transformers_llama():
    x = torch.randn(64, 123, generator=seeded(), dtype=torch.float32).bfloat16()
    ours, theirs = RMSNorm(123).bfloat16(), LlamaRMSNorm(123, eps=1e-6).bfloat16()
    ours.weight.data.normal_(1.0, 0.3, generator=seeded(1))
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x), theirs(x))
    gain_first = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)) * (
        ours.weight.float()
    )
    assert not torch.equal(ours(x), gain_first.bfloat16())  # the other order would show


def test_unit_offset_casts_in_the_order_of_transformers_gemma():
    x = torch.randn(64, 123, generator=seeded(), dtype=torch.float32).bfloat16()
    ours, theirs = RMSNorm(123, unit_offset=True).bfloat16(), GemmaRMSNorm(123).bfloat16()
    assert torch.equal(ours.weight, torch.zeros(123).bfloat16())
    ours.weight.data.normal_(0.0, 0.3, generator=seeded(1))
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x), theirs(x))
    plain = RMSNorm(123).bfloat16()
    plain.weight.data.copy_(1 + ours.weight.data)
    assert not torch.equal(ours(x), plain(x))  # the other order would show


@pytest.mark.parametrize("weights", [torch.float32, None], ids=["float32 weights", "own weights"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_norm
def test_output_has_the_input_dtype(kind, options, dtype, weights):
    norm = build(kind, options, 6).to(weights or dtype)
    assert norm(torch.randn(2, 6).to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_norm
def test_output_has_the_input_dtype_under_autocast(kind, options, dtype):
    norm = build(kind, options, 6)
    x = torch.randn(2, 6).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert y.dtype == dtype
    y.float().square().sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_norm
def test_a_zero_row_gives_zeros_and_a_finite_gradient(kind, options, dtype):
    norm = build(kind, options, 5).to(dtype)
    x = torch.ones(3, 5, dtype=dtype)
    x[1] = 0
    x.requires_grad_()
    y = norm(x)
    assert torch.equal(y[1], torch.zeros(5, dtype=dtype))
    # Divided first, so that 1 / ε of the l2 norms fits into float16.
    (y * 1e-3).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [1e3, 3e4])
@every_norm
def test_large_half_precision_inputs_stay_finite_and_right(kind, options, size, dtype):
    # Squares of these overflow float16, so they must be taken in float32.
    x = (size * torch.randn(4, 64, generator=seeded()).clamp(-2, 2)).to(dtype).requires_grad_()
    norm = build(kind, options, 64).to(dtype)
    y = norm(x)
    assert y.isfinite().all()
    expected = by_hand(kind, options, norm, x)
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert x.grad.isfinite().all()


@every_norm
def test_no_rows_give_no_rows(kind, options):
    norm = build(kind, options, 5)
    x = torch.zeros(0, 3, 5, requires_grad=True)
    y = norm(x)
    assert y.shape == (0, 3, 5)
    y.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in norm.parameters())


@every_norm
def test_the_input_is_left_alone(kind, options):
    x = torch.randn(3, 5, generator=seeded())
    before = x.clone()
    build(kind, options, 5)(x)
    assert torch.equal(x, before)


# ---------------------------------------------------------------- what is learned, what is drawn


@every_norm
def test_a_constructor_draws_nothing_from_the_random_generator(kind, options):
    before = torch.get_rng_state()
    build(kind, options, 8)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("kind", "options", "start"),
    [
        ("rmsnorm", {}, {"weight": torch.ones(3)}),
        ("rmsnorm", {"affine": False}, {}),
        ("rmsnorm", {"unit_offset": True}, {"weight": torch.zeros(3)}),
        ("rmsnorm", {"bias": True}, {"weight": torch.ones(3), "bias": torch.zeros(3)}),
        ("rmsnorm", {"affine": False, "bias": True}, {}),
        ("layernorm", {}, {"weight": torch.ones(3), "bias": torch.zeros(3)}),
        ("layernorm", {"bias": False}, {"weight": torch.ones(3)}),
        ("layernorm", {"affine": False}, {}),
        ("scalenorm", {}, {"g": torch.tensor(3.0).sqrt()}),
        ("l2norm", {}, {}),
        (
            "dyt",
            {"alpha": 0.25},
            {"alpha": torch.tensor(0.25), "weight": torch.ones(3), "bias": torch.zeros(3)},
        ),
        ("dyt", {"bias": False}, {"alpha": torch.tensor(0.5), "weight": torch.ones(3)}),
        (
            "derf",
            {},
            {
                "alpha": torch.tensor(0.5),
                "shift": torch.tensor(0.0),
                "weight": torch.ones(3),
                "bias": torch.zeros(3),
            },
        ),
        ("none", {}, {}),
    ],
    ids=str,
)
def test_what_is_learned_and_where_it_starts(kind, options, start):
    state = build(kind, options, 3).state_dict()
    assert state.keys() == start.keys()
    for name, value in start.items():
        assert torch.equal(state[name], value), name


def test_dyt_starts_elsewhere_before_attention():
    config = NormConfig(kind="dyt", options={"alpha": 0.2, "alpha_attention": 0.8})
    alphas = {site: build_norm(config, 4, site).alpha.item() for site in ("attention", "mlp")}
    assert alphas == pytest.approx({"attention": 0.8, "mlp": 0.2})


def test_none_is_the_input_itself():
    x = torch.randn(2, 3)
    assert NoNorm(3)(x) is x


@pytest.mark.parametrize(
    ("norm", "shown"),
    [
        (RMSNorm(3, 1e-5), "RMSNorm(3, eps=1e-05)"),
        (
            RMSNorm(8, unit_offset=True, partial=0.25),
            "RMSNorm(8, eps=1e-06, unit_offset=True, measured=2)",
        ),
        (RMSNorm(8, affine=False), "RMSNorm(8, eps=1e-06, affine=False)"),
        (RMSNorm(8, bias=True), "RMSNorm(8, eps=1e-06, bias=True)"),
        (LayerNorm(8, bias=False), "LayerNorm(8, eps=1e-06, affine=True, bias=False)"),
    ],
)
def test_repr_shows_what_differs_from_the_plain_norm(norm, shown):
    assert repr(norm) == shown


def test_a_row_of_zeros_stays_zero_without_eps_also_with_partial() -> None:
    norm = RMSNorm(6, eps=0.0, partial=0.5)
    x = torch.tensor([[0.0] * 6, [0.0, 0.0, 0.0, 1.0, 2.0, 3.0], [1.0] * 6])
    assert torch.equal(norm(x)[0], torch.zeros(6))
    assert norm(x).isfinite().all()
    torch.testing.assert_close(norm(x)[2], torch.ones(6))


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm, ScaleNorm, L2Norm])
@pytest.mark.parametrize("eps", [None, "1e-6", -1, float("nan"), float("inf"), True])
def test_an_epsilon_that_cannot_be_used_is_refused_at_construction(cls, eps):
    with pytest.raises(ValueError, match=r"eps = .*: must be a finite number of at least 0"):
        cls(8, eps=eps)


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm, ScaleNorm, L2Norm, DyT, Derf])
@pytest.mark.parametrize("dim", [0, -1, 8.0, None, "8", True])
def test_a_size_that_cannot_be_used_is_refused_at_construction(cls, dim):
    with pytest.raises(ValueError, match=r"dim = .*: must be a positive whole number"):
        cls(dim)


def test_an_option_out_of_range_is_refused_at_construction():
    for partial in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="partial = "):
            RMSNorm(8, partial=partial)
    for alpha in (0, -1.0, float("nan"), None):
        with pytest.raises(ValueError, match="alpha = "):
            DyT(8, alpha=alpha)
        with pytest.raises(ValueError, match="alpha = "):
            Derf(8, alpha=alpha)


@pytest.mark.parametrize("kind", [kind for kind in NORM_KINDS if kind != "none"])
@pytest.mark.parametrize("shape", [(), (2, 1), (2, 7), (8, 2)], ids=str)
def test_an_input_of_another_width_is_refused(kind, shape):
    with pytest.raises(ValueError, match="build it for the size of x's last dimension"):
        build_norm(NormConfig(kind=kind), 8)(torch.ones(shape))
