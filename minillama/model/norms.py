"""The norms, each with its equation, its paper, where ε is added and the order of casts.

    kind        formula                          learned, start
    rmsnorm     x / √(mean(x²) + ε) · γ          γ = 1
    layernorm   (x − mean) / √(var + ε) · γ + β  γ = 1, β = 0
    scalenorm   g · x / ‖x‖                      g = √d
    l2norm      x / ‖x‖                          nothing
    dyt         γ · tanh(α·x) + β                γ = 1, α = 0.5, β = 0
    derf        γ · erf(α·x + s) + β             γ = 1, α = 0.5, s = 0, β = 0
    none        x                                nothing

All act on the last dimension, return the dtype and shape they were given, and take their statistics
in float32 (float64 for float64) whatever the input's dtype.  A constructor draws nothing from a
random generator.  ``forward`` raises ValueError where the last dimension has another size.
``register_norm`` adds a kind of yours.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from pydantic import BaseModel, create_model
from torch import Tensor, nn

from minillama.arguments import check_flag, check_type, finite_number
from minillama.config.loading import Section
from minillama.config.norms import NORM_KINDS, NormConfig, NormKind
from minillama.errors import ConfigError
from minillama.model.kernels import rms_norm, rms_norm_reference
from minillama.registry import Registry

BuildT = TypeVar("BuildT", bound=Callable[..., nn.Module])

NORM_BUILDERS: Registry[Callable[..., nn.Module]] = Registry(NORM_KINDS.what)
"""The class, or function, that builds each kind of :data:`minillama.config.norms.NORM_KINDS`."""

SITES = ("", "attention", "mlp", "embed", "final")
"""Where a norm may be used; empty: not said."""

_NORM_CLASSES: set[type[nn.Module]] = set()
"""The class of every norm that was registered or built."""


def _builds(kind: str) -> Callable[[BuildT], BuildT]:
    def register(build: BuildT) -> BuildT:
        _register_builder(kind, build)
        return build

    return register


def _register_builder(kind: str, build: Callable[..., nn.Module]) -> None:
    NORM_BUILDERS.register(kind, build)
    if isinstance(build, type):
        _NORM_CLASSES.add(build)


def _checked_dim(dim: int) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int) or dim <= 0:
        raise ConfigError(f"dim = {dim!r}: must be a positive whole number")
    return dim


def _checked_eps(eps: float) -> float:
    return finite_number("eps", eps, "must be a finite number of at least 0")


def _checked_start(name: str, value: float) -> float:
    return finite_number(name, value, "must be a finite number above 0", positive=True)


def _check_flags(**flags: bool) -> None:
    for name, value in flags.items():
        check_flag(name, value)


def _check_site(site: str) -> None:
    if site not in SITES:
        raise ConfigError(f"site = {site!r}: must be one of {', '.join(map(repr, SITES))}")


def _check_width(x: Tensor, dim: int) -> None:
    check_type("x", x, Tensor)
    if x.shape[-1:] != (dim,):
        raise ValueError(
            f"a norm of {dim} features was given x of shape {tuple(x.shape)}; build it for the "
            "size of x's last dimension"
        )


@_builds("rmsnorm")
class RMSNorm(nn.Module):
    """Root mean square norm: y = x / √(mean(x²) + ε) · γ.

    Zhang & Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv 1910.07467); ε inside the
    root as in Llama (Touvron 2023), where the paper's own code adds it outside.

    Casts: x to float32, normalised there, back to x's dtype, then times γ in that dtype (the order
    of Hugging Face's Llama).  With ``unit_offset`` the gain multiplies before the way back (Gemma).

    Args:
        dim: features in the last dimension.
        eps: ε, at least 0.
        affine: learn the gain γ, of shape (dim,), ones at start.
        unit_offset: the gain is 1 + w, and w is zeros at start (Gemma); ``weight`` is w.
        partial: share p of the features whose mean square is taken, the first ⌊dim·p⌋ of them, at
            least one (pRMSNorm, section 4 of the paper).
        bias: add a learned shift β, of shape (dim,), zeros at start, as the paper's own code can;
            not without ``affine``.

    Raises:
        ValueError: ``dim``, ``eps`` or ``partial`` is out of range.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        *,
        affine: bool = True,
        unit_offset: bool = False,
        partial: float = 1.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.unit_offset = _checked_dim(dim), _checked_eps(eps), unit_offset
        _check_flags(affine=affine, unit_offset=unit_offset, bias=bias)
        rule = "must be above 0 and at most 1"
        if finite_number("partial", partial, rule, positive=True) > 1:
            raise ConfigError(f"partial = {partial!r}: {rule}")
        # Rounded first, since 100 × 0.29 is a little under 29 in floating point.
        self.n_measured = max(1, math.floor(round(dim * partial, 6)))
        start = torch.zeros if unit_offset else torch.ones
        self.register_parameter("weight", nn.Parameter(start(dim)) if affine else None)
        has_bias = affine and bias
        self.register_parameter("bias", nn.Parameter(torch.zeros(dim)) if has_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` of shape (..., dim)."""
        y = self._scaled(x)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def _scaled(self, x: Tensor) -> Tensor:
        _check_width(x, self.dim)
        gain: Tensor | None = self.weight
        if self.unit_offset and gain is not None:
            gain = 1 + gain.to(_wide(x))
        if self.n_measured == self.dim:
            return rms_norm(x, gain, self.eps, cast_first=not self.unit_offset)
        return rms_norm_reference(x, gain, self.eps, not self.unit_offset, self.n_measured)

    def extra_repr(self) -> str:
        """Show what differs from the plain norm."""
        parts = [f"{self.dim}", f"eps={self.eps:g}"]
        parts += ["affine=False"] if self.weight is None else []
        parts += ["unit_offset=True"] if self.unit_offset else []
        parts += [f"measured={self.n_measured}"] if self.n_measured < self.dim else []
        parts += ["bias=True"] if self.bias is not None else []
        return ", ".join(parts)


@_builds("layernorm")
class LayerNorm(nn.Module):
    """Layer norm: y = (x − mean(x)) / √(var(x) + ε) · γ + β.

    Ba, Kiros & Hinton 2016, "Layer Normalization" (arXiv 1607.06450); the variance is the biased
    one, ε inside the root.  Casts: as torch's kernel does it, float32 until the end.

    Args:
        dim: features in the last dimension.
        eps: ε, at least 0.
        affine: learn the gain γ, of shape (dim,), ones at start (OLMo 1 had none).
        bias: learn the shift β, of shape (dim,), zeros at start; not without ``affine``.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, dim: int, eps: float = 1e-6, *, affine: bool = True, bias: bool = True
    ) -> None:
        super().__init__()
        self.dim, self.eps = _checked_dim(dim), _checked_eps(eps)
        _check_flags(affine=affine, bias=bias)
        self.register_parameter("weight", nn.Parameter(torch.ones(dim)) if affine else None)
        has_bias = affine and bias
        self.register_parameter("bias", nn.Parameter(torch.zeros(dim)) if has_bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` of shape (..., dim)."""
        _check_width(x, self.dim)
        weight = None if self.weight is None else self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        # Autocast would hand back float32 for a bfloat16 input.
        return F.layer_norm(x, (self.dim,), weight, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Show the size, ε and what is learned."""
        learned = f"affine={self.weight is not None}, bias={self.bias is not None}"
        return f"{self.dim}, eps={self.eps:g}, {learned}"


@_builds("scalenorm")
class ScaleNorm(nn.Module):
    """Scaled l2 norm: y = g · x / ‖x‖, one learned number g, √dim at start.

    Nguyen & Salazar 2019, "Transformers without Tears" (arXiv 1910.05895), section 3.2.  As in
    their code ‖x‖ is taken to be at least ε.  Casts: float32 throughout, then back to x's dtype.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = _checked_dim(dim), _checked_eps(eps)
        self.g = nn.Parameter(torch.tensor(float(dim)).sqrt())

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` of shape (..., dim)."""
        _check_width(x, self.dim)
        wide = x.to(_wide(x))
        return (self.g * F.normalize(wide, dim=-1, eps=self.eps)).to(x.dtype)


@_builds("l2norm")
class L2Norm(nn.Module):
    """Unit length: y = x / ‖x‖; nothing is learned.

    As in nGPT (Loshchilov 2024, arXiv 2410.01131); ‖x‖ is taken to be at least ε.  Casts: float32
    throughout, then back to x's dtype.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = _checked_dim(dim), _checked_eps(eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` of shape (..., dim)."""
        _check_width(x, self.dim)
        return F.normalize(x.to(_wide(x)), dim=-1, eps=self.eps).to(x.dtype)


@_builds("dyt")
class DyT(nn.Module):
    """Dynamic tanh: y = γ · tanh(α·x) + β, with no statistics of x.

    Zhu, Chen, He, LeCun & Liu 2025, "Transformers without Normalization" (arXiv 2503.10622).  For
    Llama the paper changes three things, without which it is an unfair baseline: no β
    (``bias=False``), a larger α before attention than elsewhere (0.8 and 0.2 at 7 B), and a learned
    scale of √dim behind the embedding (``model.embed_scale: learned``).  Casts: float32 throughout,
    then back to x's dtype.

    Args:
        dim: features in the last dimension; γ and β have shape (dim,), ones and zeros at start.
        alpha: α at the start, one learned number.
        alpha_attention: α at the start where ``site`` is ``"attention"``; None: ``alpha``.
        bias: learn β.
        site: where the norm is used: ``attention``, ``mlp``, ``embed`` or ``final``.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        *,
        alpha: float = 0.5,
        alpha_attention: float | None = None,
        bias: bool = True,
        site: str = "",
    ) -> None:
        super().__init__()
        _check_flags(bias=bias)
        _check_site(site)
        start = _checked_start("alpha", alpha)
        if alpha_attention is not None:
            in_attention = _checked_start("alpha_attention", alpha_attention)
            start = in_attention if site == "attention" else start
        self.alpha = nn.Parameter(torch.tensor(start))
        self.weight = nn.Parameter(torch.ones(_checked_dim(dim)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(dim)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Squash ``x`` of shape (..., dim)."""
        _check_width(x, len(self.weight))
        y = self.weight * torch.tanh(self.argument(x))
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def argument(self, x: Tensor) -> Tensor:
        """Return α·x, in float32: where it is beyond ±2 the tanh is nearly flat."""
        return self.alpha * x.to(_wide(x))


@_builds("derf")
class Derf(nn.Module):
    """Dynamic erf: y = γ · erf(α·x + s) + β, with no statistics of x.

    Chen, Lu, Zhu, Sun & Liu 2025, "Stronger Normalization-Free Transformers" (arXiv 2512.10938); α
    and s are one learned number each.  Casts: float32 throughout, then back to x's dtype.

    Args:
        dim: features in the last dimension; γ and β have shape (dim,), ones and zeros at start.
        alpha: α at the start.
        bias: learn β.
    """

    bias: nn.Parameter | None

    def __init__(self, dim: int, *, alpha: float = 0.5, bias: bool = True) -> None:
        super().__init__()
        _check_flags(bias=bias)
        self.alpha = nn.Parameter(torch.tensor(_checked_start("alpha", alpha)))
        self.shift = nn.Parameter(torch.tensor(0.0))
        self.weight = nn.Parameter(torch.ones(_checked_dim(dim)))
        self.register_parameter("bias", nn.Parameter(torch.zeros(dim)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """Squash ``x`` of shape (..., dim)."""
        _check_width(x, len(self.weight))
        y = self.weight * torch.erf(self.argument(x))
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def argument(self, x: Tensor) -> Tensor:
        """Return α·x + s, in float32: where it is beyond ±2 the erf is nearly flat."""
        return self.alpha * x.to(_wide(x)) + self.shift


@_builds("none")
class NoNorm(nn.Identity):
    """No norm: y = x."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        _checked_dim(dim)
        _checked_eps(eps)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# -------------------------------------------------------------------------------------- registry


def is_builtin(kind: str) -> bool:
    """Return whether the norm ``kind`` is one of this module, not registered by a user."""
    return NORM_BUILDERS.get(kind).__module__ == __name__


def register_norm(name: str, *, formula: str = "", source: str = "") -> Callable[[BuildT], BuildT]:
    """Decorate a module class, or a function that returns a module, as norm kind ``name``.

    It is called with the number of features first, with ``eps`` and ``site`` (``attention``,
    ``mlp``, ``embed``, ``final``) if it has parameters of these names, and with the options of the
    config by keyword: every other parameter is an option, checked against its annotation, required
    where it has no default.

    Raises:
        ConfigError: the name is empty or taken, or what is decorated takes no number of features.
        TypeError: a name, formula or source is not a str, or what is decorated cannot be called.
    """
    for what, text in (("name", name), ("formula", formula), ("source", source)):
        check_type(what, text, str)
    if not name.strip():
        raise ConfigError("a norm's name must not be empty")

    def register(build: BuildT) -> BuildT:
        if not callable(build):
            raise TypeError(f"a norm is built by a class or a function, not by {build!r}")
        parameters = list(inspect.signature(build, eval_str=True).parameters.values())
        first = parameters.pop(0) if parameters else None
        if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
            raise ConfigError(
                f"the norm {name!r} has no first parameter for the number of features; begin with "
                "def __init__(self, dim: int, ...)"
            )
        options: dict[str, Any] = {
            p.name: (
                Any if p.annotation is p.empty else p.annotation,
                ... if p.default is p.empty else p.default,
            )
            for p in parameters
            if p.name not in ("eps", "site") and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        model: type[BaseModel] = create_model(f"{name} options", __base__=Section, **options)
        row = NormKind(formula or (build.__doc__ or "").split("\n")[0], source, model)
        _register_builder(name, build)
        NORM_KINDS.register(name, row)
        return build

    return register


def build_norm(config: NormConfig, dim: int, site: str = "") -> nn.Module:
    """Build the norm that ``config`` names, for ``dim`` features, to be used at ``site``.

    Raises:
        UnknownNameError: no such kind is registered.
        ConfigError: ``dim`` or ``site`` is wrong.
        TypeError: a registered function returns no module.
    """
    check_type("config", config, NormConfig)
    _checked_dim(dim)
    _check_site(site)
    build = NORM_BUILDERS.get(config.kind)
    parameters = inspect.signature(build).parameters
    given = {"eps": config.eps, "site": site}
    wanted = {name: value for name, value in given.items() if name in parameters}
    norm = build(dim, **wanted, **config.options)
    check_type(f"what builds the norm {config.kind!r} must return a module: it", norm, nn.Module)
    _NORM_CLASSES.add(type(norm))  # a function may return any module
    return norm


@torch.no_grad()
def multiply_gain(norm: nn.Module, factor: float) -> None:
    """Multiply the gain that ``norm`` starts with; one without a gain is left as it is."""
    if factor == 1:
        return
    if isinstance(norm, ScaleNorm):
        norm.g.mul_(factor)
        return
    gain = getattr(norm, "weight", None)
    if isinstance(gain, nn.Parameter):
        offset = 1 if isinstance(norm, RMSNorm) and norm.unit_offset else 0
        gain.copy_((gain + offset) * factor - offset)


def norm_parameter_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that belong to norms, by the classes of the modules."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if type(module) in _NORM_CLASSES
        for name, _ in module.named_parameters()
    }
