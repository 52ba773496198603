"""The report's figures as plain data in the form of plotly.js.

The page draws them with plotly.js; ``picture.py`` draws two of them with matplotlib.

A trace's ``meta`` contains the index of its arm, which gives it its color (one for light pages, one
for dark) and the button that hides it, and its learning rate if the figure can be limited to one.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from minillama.ablation.analysis import ArmResult, Comparison
from minillama.ablation.measures import Floats
from minillama.ablation.report.curves import smoothed, subsample, thin
from minillama.ablation.report.prose import short_names
from minillama.ablation.results import Results, Run

Trace = dict[str, Any]
Figure = dict[str, Any]

_MOST_POINTS = 400  # of one curve
_FEWEST_POINTS = 12
_LABEL_CHARACTERS = 22

# Okabe and Ito's colors, distinguishable with every common kind of color blindness; the second set
# has the same hues, lightened for a dark page.  Yellow is darkened, to be visible on white.
_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#B4558D", "#B97F00", "#3A9BD9", "#333333", "#7F7400")
_DARK = ("#5AAEE8", "#FF8F55", "#33C79E", "#E59CC8", "#F0B640", "#A9D9F8", "#E4E4E4", "#DDD06A")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "pentagon", "star", "hexagon")
_THICK_RING = {"symbol": "circle-open", "size": 11, "line": {"width": 2}}
_CROSS = {"symbol": "x-thin", "size": 11, "line": {"width": 3}}


@dataclass(frozen=True)
class ArmStyle:
    """How an arm is drawn; no two of the first 40 share both color and dash.

    ``width`` of its line and ``size`` of its marks, in pixels, shrink from arm to arm, so that
    where curves coincide the earlier one is still visible beneath the later.
    """

    index: int
    short_name: str
    light: str
    dark: str
    dash: str
    symbol: str
    width: float
    size: float


def arm_styles(arms: Sequence[str]) -> dict[str, ArmStyle]:
    """Return the style of each arm, which depends on its place in the config."""
    short = short_names(arms)
    return {
        arm: ArmStyle(
            i,
            short[arm],
            _LIGHT[i % len(_LIGHT)],
            _DARK[i % len(_DARK)],
            _DASHES[i % len(_DASHES)],
            _SYMBOLS[i % len(_SYMBOLS)],
            width=max(3.2 - 1.2 * i, 1.6),
            size=max(10.0 - 2.5 * i, 7.0),
        )
        for i, arm in enumerate(arms)
    }


def page_data(
    results: Results,
    arms: Sequence[ArmResult],
    comparisons: Sequence[Comparison],
    points_in_all: int,
) -> dict[str, Any]:
    """Return everything that the page's script needs: the arms' styles and the figures.

    ``points_in_all`` limits the points of all raw curves of one figure together.
    """
    points = max(_FEWEST_POINTS, min(points_in_all // max(1, len(results.runs)), _MOST_POINTS))
    figures = [loss_by_step(results, arms, points), gradient_by_step(results, arms, points)]
    if len(results.lrs) > 1:
        figures.insert(0, loss_by_rate(results, arms))
    figures += [by_layer(results, arms, *measure) for measure in LAYER_MEASURES]
    pairs = [c for c in comparisons if len(c.seeds) > 1]
    if pairs:
        figures.append(differences(pairs, results))
    styles = arm_styles(results.arms)
    return {
        "arms": [{"name": html.escape(arm), **asdict(styles[arm])} for arm in results.arms],
        "rates": [f"{lr:g}" for lr in results.lrs],
        "figures": [figure for figure in figures if figure["traces"]],
    }


# ---------------------------------------------------------------------------- parts of a figure


def _rounded(values: ArrayLike, digits: int = 4) -> list[float | None]:
    """Return values for JSON with ``digits`` significant digits; not finite is null."""
    return [
        float(f"{value:.{digits}g}") if math.isfinite(value) else None
        for value in np.asarray(values, dtype=np.float64).tolist()
    ]


def _trace(style: ArmStyle, mode: str, x: ArrayLike, y: ArrayLike, **fields: Any) -> Trace:
    """Return a trace in the style of an arm; ``digits`` are those of y."""
    trace: Trace = {
        "type": "scatter",
        "name": html.escape(style.short_name),
        "mode": mode,
        "x": _rounded(x, 9),
        "y": _rounded(y, fields.pop("digits", 4)),
        "meta": {"arm": style.index, "rate": None},
    }
    if "lines" in mode:
        trace["line"] = {"dash": style.dash, "width": style.width} | fields.pop("line", {})
    if "markers" in mode:
        trace["marker"] = {"symbol": style.symbol, "size": style.size} | fields.pop("marker", {})
    return trace | fields


def _of_run(trace: Trace, run: Run, arms: Sequence[ArmResult]) -> Trace:
    """Add the run's learning rate, and whether it is its arm's best or the arm has none yet."""
    best = next(arm.best_lr for arm in arms if arm.name == run.arm)
    trace["meta"] |= {"rate": f"{run.lr:g}", "best": run.lr == best or math.isnan(best)}
    return trace


def _axis(title: str, **fields: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **fields}


def _log_axis(title: str, **fields: Any) -> dict[str, Any]:
    return _axis(title, type="log", exponentformat="power", **fields)


def _level(value: float) -> dict[str, Any]:
    """Return a dotted horizontal line."""
    ends = {"x0": 0, "x1": 1, "y0": value, "y1": value}
    return {"type": "line", "xref": "paper", **ends, "line": {"width": 1, "dash": "dot"}}


def _level_name(text: str, value: float, side: str = "left") -> dict[str, Any]:
    """Return a text just above a horizontal line, at one end of it."""
    place = {"xref": "paper", "x": 0.005 if side == "left" else 0.995, "y": value}
    anchor = {"xanchor": side, "yanchor": "bottom"}
    return {**place, **anchor, "text": text, "showarrow": False, "font": {"size": 11}}


# ------------------------------------------------------------------------ loss by learning rate


def loss_by_rate(results: Results, arms: Sequence[ArmResult]) -> Figure:
    """Final validation loss against learning rate: every run, and the mean over seeds.

    A run that diverged has no loss: it is a cross at the upper edge of the figure.
    """
    finite = [run.figure("val_loss") for run in results.runs if run.has_loss]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    pad = 0.06 * (high - low) or 0.1
    any_diverged = any(run.fate == "diverged" for run in results.runs)
    top = high + (3 if any_diverged else 1) * pad
    styles = arm_styles(results.arms)
    traces = []
    for arm in arms:
        style = styles[arm.name]
        means = {
            lr: loss
            for lr, loss in arm.mean_loss.items()
            if all(run.has_loss for run in arm.grid_runs if run.lr == lr and run.ended)
        }
        x, y = list(means), list(means.values())
        traces.append(_trace(style, "lines", x, y, digits=5, hoverinfo="skip"))
        for fate, look in (
            ("ok", {}),
            ("undertrained", _THICK_RING),
            ("collapsed", _CROSS),
        ):
            runs = [run for run in arm.grid_runs if run.fate == fate and run.has_loss]
            losses = [run.figure("val_loss") for run in runs]
            traces.append(_run_marks(style, runs, losses, look))
        diverged = [run for run in arm.grid_runs if run.fate == "diverged"]
        traces.append(_run_marks(style, diverged, [top - pad] * len(diverged), _CROSS))
    levels = [
        (text, float(np.mean(known)))
        for key, text in (("init_val_loss", "loss at init"), ("unigram_entropy", "unigram entropy"))
        if (known := [run.figure(key) for run in results.runs if run.has_figure(key)])
    ]
    levels = [(text, value) for text, value in levels if low - pad < value < top]
    names = [_level_name(text, value, "right") for text, value in levels]
    if any_diverged:
        names.append(_level_name("diverged", top - pad))
    rates = {
        "tickvals": list(results.lrs),
        "ticktext": [f"{lr:g}" for lr in results.lrs],
    }
    return {
        "id": "loss-rate",
        "traces": [trace for trace in traces if trace["x"]],
        "layout": {
            "xaxis": _axis("peak learning rate", type="log", **rates),
            "yaxis": _axis("final validation loss (nats per token)", range=[low - pad, top]),
            "shapes": [_level(value) for _, value in levels],
            "annotations": names,
        },
    }


def _run_marks(
    style: ArmStyle, runs: Sequence[Run], y: Sequence[float], marker: Mapping[str, Any]
) -> Trace:
    losses = [run.figure("val_loss") for run in runs]
    return _trace(
        style,
        "markers",
        [run.lr for run in runs],
        y,
        digits=5,
        marker=dict(marker),
        customdata=[
            [f"{run.lr:g}", run.seed, run.fate, f"{loss:.4f}" if math.isfinite(loss) else "none"]
            for run, loss in zip(runs, losses, strict=True)
        ],
        hovertemplate="lr %{customdata[0]}, seed %{customdata[1]}<br>"
        "loss %{customdata[3]} (%{customdata[2]})",
    )


# ------------------------------------------------------------------------------ curves by step


def loss_by_step(results: Results, arms: Sequence[ArmResult], points: int) -> Figure:
    """Loss against step: raw training loss faint, its running mean strong, validation as marks."""
    faint: dict[str, Any] = {
        "line": {"width": 1, "dash": "solid"},
        "opacity": 0.25,
        "hoverinfo": "skip",
    }
    styles = arm_styles(results.arms)
    traces = []
    for run in results.runs:
        style, curves = styles[run.arm], run.curves
        label = f"lr {run.lr:g}, seed {run.seed}<br>step %{{x}}"
        raw = thin(curves.steps, curves.loss, points)
        mean = subsample(curves.steps, smoothed(curves.loss), points // 2)
        of_mean: dict[str, Any] = {"hovertemplate": f"{label}: training loss %{{y:.3f}} (smoothed)"}
        of_val: dict[str, Any] = {
            "hovertemplate": f"{label}: validation loss %{{y:.4f}}",
            "digits": 5,
        }
        traces += [
            _of_run(_trace(style, "lines", *raw, **faint), run, arms),
            _of_run(_trace(style, "lines", *mean, **of_mean), run, arms),
            _of_run(
                _trace(style, "markers", curves.val_steps, curves.val_loss, **of_val), run, arms
            ),
        ]
    return {
        "id": "loss-step",
        "traces": [trace for trace in traces if trace["x"]],
        "layout": {"xaxis": _axis("step"), "yaxis": _axis("loss (nats per token)")},
        "fit_tail": True,
    }


def gradient_by_step(results: Results, arms: Sequence[ArmResult], points: int) -> Figure:
    """Gradient norm before clipping against step, on a log scale, with the clipping threshold."""
    styles = arm_styles(results.arms)
    traces = []
    for run in results.runs:
        x, y = thin(run.curves.steps, run.curves.grad_norm, points)
        hover = f"lr {run.lr:g}, seed {run.seed}<br>step %{{x}}: gradient norm %{{y}}"
        look: dict[str, Any] = {"digits": 3, "line": {"width": 1.2}, "hovertemplate": hover}
        traces.append(_of_run(_trace(styles[run.arm], "lines", x, y, **look), run, arms))
    layout: dict[str, Any] = {
        "xaxis": _axis("step"),
        "yaxis": _log_axis("gradient norm before clipping"),
    }
    clips = {run.config.get("optim", {}).get("grad_clip") for run in results.runs if run.config}
    clip = clips.pop() if len(clips) == 1 else None
    if clip:
        layout["shapes"] = [_level(clip)]
        layout["annotations"] = [_level_name(f"clipped above {clip:g}", math.log10(clip))]
    return {
        "id": "gradient-step",
        "traces": [trace for trace in traces if any(v is not None for v in trace["y"])],
        "layout": layout,
    }


# ------------------------------------------------------------------------------- layer by layer

LAYER_MEASURES = (
    ("residual_rms", "RMS of the residual stream"),
    ("attention_logit_max", "largest attention logit"),
    ("kurtosis", "kurtosis of the features"),
    ("update_ratio", "update ÷ parameters"),
    ("saturation", "saturated features of DyT and Derf"),
)
"""The measures of a probe that are drawn, with their axis titles."""


def by_layer(results: Results, arms: Sequence[ArmResult], measure: str, title: str) -> Figure:
    """A probed measure against depth, from the last probe of each run."""
    styles = arm_styles(results.arms)
    traces = []
    for run in results.runs:
        step, probe = run.curves.probes[-1] if run.curves.probes else (0, {})
        layers = {
            int(name.removeprefix("layer_")): float(values[measure])
            for name, values in probe.items()
            if name.startswith("layer_") and isinstance(values.get(measure), int | float)
        }
        if not any(value > 0 for value in layers.values()):
            continue
        depth = sorted(layers)
        y: Floats = np.array([layers[layer] for layer in depth])
        hover = f"lr {run.lr:g}, seed {run.seed}, step {step}<br>layer %{{x}}: %{{y}}"
        look: dict[str, Any] = {"digits": 3, "hovertemplate": hover}
        traces.append(
            _of_run(_trace(styles[run.arm], "lines+markers", depth, y, **look), run, arms)
        )
    return {
        "id": f"layer-{measure}",
        "traces": traces,
        "layout": {"xaxis": _axis("layer"), "yaxis": _log_axis(title)},
    }


# ------------------------------------------------------------------------------ differences


def differences(comparisons: Sequence[Comparison], results: Results) -> Figure:
    """Each arm minus its baseline at their best learning rates: pairs, mean and 95% t interval."""
    styles = arm_styles(results.arms)
    traces = []
    for row, c in enumerate(comparisons):
        style = styles[c.arm]
        seeds: dict[str, Any] = {
            "marker": {"size": 7},
            "opacity": 0.6,
            "text": [f"seed {seed}" for seed in c.seeds],
            "hovertemplate": "%{text}: %{x:.4f}",
        }
        half = (c.t95.high - c.t95.low) / 2
        mean: dict[str, Any] = {
            "marker": {"size": 12},
            "error_x": {"type": "data", "array": _rounded([half]), "thickness": 2.5, "width": 6},
            "hovertemplate": f"mean %{{x:.4f}}<br>95% {c.t95.low:.4f} to {c.t95.high:.4f}",
        }
        heights = [row + 0.18] * len(c.seeds)
        traces += [
            _trace(style, "markers", c.differences, heights, **seeds),
            _trace(style, "markers", [c.mean], [row - 0.1], **mean),
        ]
    labels = {arm: _label(style.short_name) for arm, style in styles.items()}
    names = [f"{labels[c.arm]}<br>− {labels[c.baseline]}" for c in comparisons]
    margin = results.margin
    shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": -margin, "x1": margin}
    zero = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 0, "x1": 0}
    rows = {
        "tickvals": list(range(len(names))),
        "ticktext": names,
        "range": [len(names) - 0.5, -0.5],
    }
    return {
        "id": "differences",
        "traces": traces,
        "layout": {
            "xaxis": _axis("validation loss minus the baseline's (nats per token)"),
            "yaxis": _axis("", **rows),
            "shapes": [
                shade | {"line": {"width": 0}, "opacity": 0.15, "fillcolor": "#888888"},
                zero | {"line": {"width": 1}},
            ],
            "height": 150 + sum(30 + 20 * (name.count("<br>") + 1) for name in names),
        },
    }


def _label(name: str) -> str:
    """Return a name in lines so short that the plot has enough width, even on a phone."""
    return "<br>".join(map(html.escape, textwrap.wrap(name, _LABEL_CHARACTERS)))
