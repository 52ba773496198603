"""The report's figures as plain data in the form of plotly.js.

The page draws them with plotly.js; ``picture.py`` draws two of them with matplotlib.

A trace's ``meta`` contains the index of its arm, which gives it its color (one for light pages, one
for dark) and the button that hides it, and its learning rate if the figure can be limited to one.
"""

from __future__ import annotations

import html
import itertools
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from minillama.ablation.analysis import ArmResult, Comparison
from minillama.ablation.measures import Floats
from minillama.ablation.report.curves import Band, band, smoothed, subsample, thin
from minillama.ablation.report.prose import short_names
from minillama.ablation.results import Results, Run

Trace = dict[str, Any]
Figure = dict[str, Any]

_MOST_POINTS = 400  # of one curve
_FEWEST_POINTS = 12
_LABEL_CHARACTERS = 22

SEEDS_FOR_BAND = 4
"""With so many seeds, curves are drawn as a mean with its interval."""

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
    figures = [
        loss_by_step(results, arms, points),
        difference_by_step(results, arms, points),
        gradient_by_step(results, arms, points),
    ]
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
    return _axis(title, type="log", dtick="D2", exponentformat="power", **fields)


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
    shifts = _side_shifts(results)
    traces = []
    for arm in arms:
        style, shift = styles[arm.name], shifts[arm.name]
        means = {
            lr: loss
            for lr, loss in arm.mean_loss.items()
            if all(run.has_loss for run in arm.grid_runs if run.lr == lr and run.ended)
        }
        x, y = [shift * lr for lr in means], list(means.values())
        mode, of_runs = "lines", dict[str, Any]()
        if (
            most_seeds(results) >= SEEDS_FOR_BAND
        ):  # the marks are the means, and the runs small dots
            mode, of_runs = "lines+markers", {"symbol": "circle", "size": 4}
        for fate, look in (
            ("ok", of_runs),
            ("undertrained", _THICK_RING),
            ("collapsed", _CROSS),
        ):
            runs = [run for run in arm.grid_runs if run.fate == fate and run.has_loss]
            losses = [run.figure("val_loss") for run in runs]
            traces.append(_run_marks(style, runs, losses, look, shift))
        diverged = [run for run in arm.grid_runs if run.fate == "diverged"]
        traces.append(_run_marks(style, diverged, [top - pad] * len(diverged), _CROSS, shift))
        traces.append(_trace(style, mode, x, y, digits=5, hoverinfo="skip"))
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


def most_seeds(results: Results) -> int:
    """Return how many runs the arm and rate with the most of them have."""
    return max(Counter((run.arm, run.lr) for run in results.runs).values(), default=0)


def _side_shifts(results: Results) -> dict[str, float]:
    """Return a factor of the learning rate for each arm, so that arms stand side by side."""
    n, lrs = len(results.arms), sorted(results.lrs)
    gaps = [math.log(high / low) for low, high in itertools.pairwise(lrs)]
    width = min(gaps, default=0.0) * min(0.4, 0.05 * (n - 1))
    return {
        arm: math.exp(width * (i / (n - 1) - 0.5)) if n > 1 else 1.0
        for i, arm in enumerate(results.arms)
    }


def _run_marks(
    style: ArmStyle,
    runs: Sequence[Run],
    y: Sequence[float],
    marker: Mapping[str, Any],
    shift: float,
) -> Trace:
    losses = [run.figure("val_loss") for run in runs]
    return _trace(
        style,
        "markers",
        [shift * run.lr for run in runs],
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
    """Loss against step: raw training loss faint, its running mean strong, validation as marks.

    Of an arm with :data:`SEEDS_FOR_BAND` seeds or more at a rate: the mean of their running means,
    with its 95% t interval, and the mean of their validation losses.
    """
    faint: dict[str, Any] = {
        "line": {"width": 1, "dash": "solid"},
        "opacity": 0.25,
        "hoverinfo": "skip",
    }
    styles = arm_styles(results.arms)
    traces = []
    for runs in _runs_by_rate(arms):
        style = styles[runs[0].arm]
        if len(runs) >= SEEDS_FOR_BAND:
            found = band([run.curves for run in runs], points=points)
            label = f"lr {runs[0].lr:g}, mean of {len(runs)} seeds"
            traces += [
                _of_run(trace, runs[0], arms)
                for trace in (*_band_traces(style, found, label), _mean_validation(style, runs))
            ]
            continue
        for run in runs:
            curves = run.curves
            label = f"lr {run.lr:g}, seed {run.seed}<br>step %{{x}}"
            raw = thin(curves.steps, curves.loss, points)
            mean = subsample(curves.steps, smoothed(curves.loss), points // 2)
            of_mean = {"hovertemplate": f"{label}: training loss %{{y:.3f}} (smoothed)"}
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


def difference_by_step(results: Results, arms: Sequence[ArmResult], points: int) -> Figure:
    """Training loss minus the baseline's of the same rate and seed: mean and 95% t interval.

    Both see the same batches, so that most of the noise of a single curve cancels.
    """
    styles = arm_styles(results.arms)
    of_baseline = {(run.arm, run.lr, run.seed): run.curves for arm in arms for run in arm.runs}
    baselines = {arm.name: arm.baseline for arm in arms}
    traces = []
    for runs in _runs_by_rate(arms):
        name = baselines[runs[0].arm]
        pairs = [
            (run.curves, of_baseline[name, run.lr, run.seed])
            for run in runs
            if name != run.arm and (name, run.lr, run.seed) in of_baseline
        ]
        if len(pairs) >= SEEDS_FOR_BAND:
            own, baseline = zip(*pairs, strict=True)
            found = band(own, baseline, points)
            label = f"lr {runs[0].lr:g}, {len(pairs)} pairs"
            traces += [
                _of_run(trace, runs[0], arms)
                for trace in _band_traces(styles[runs[0].arm], found, label)
            ]
    title = "training loss − baseline's (nats per token)"
    return {
        "id": "difference-step",
        "traces": [trace for trace in traces if trace["x"]],
        "layout": {"xaxis": _axis("step"), "yaxis": _axis(title), "shapes": [_level(0.0)]},
        "fit_tail": True,
    }


def _runs_by_rate(arms: Sequence[ArmResult]) -> Iterator[list[Run]]:
    """Yield the runs of each arm at each rate that have a curve."""
    for arm in arms:
        runs = [run for run in arm.runs if len(run.curves.steps)]
        for lr in dict.fromkeys(run.lr for run in runs):
            yield [run for run in runs if run.lr == lr]


def _band_traces(style: ArmStyle, found: Band, label: str) -> tuple[Trace, Trace]:
    """Return the interval, as an outline to be filled, and the mean."""
    interval = _trace(
        style,
        "lines",
        np.concatenate([found.steps, found.steps[::-1]]),
        np.concatenate([found.high, found.low[::-1]]),
        line={"width": 0, "dash": "solid"},
        fill="toself",
        hoverinfo="skip",
    )
    text = f"{label}<br>step %{{x}}: %{{y:.4f}} (smoothed)"
    return interval, _trace(style, "lines", found.steps, found.mean, hovertemplate=text, digits=5)


def _mean_validation(style: ArmStyle, runs: Sequence[Run]) -> Trace:
    """Return the means of the validation losses at the steps that all runs have."""
    by_step = [
        dict(zip(run.curves.val_steps.tolist(), run.curves.val_loss.tolist(), strict=True))
        for run in runs
    ]
    steps = sorted(set.intersection(*map(set, by_step)))
    means = [float(np.mean([losses[step] for losses in by_step])) for step in steps]
    text = (
        f"lr {runs[0].lr:g}, mean of {len(runs)} seeds<br>step %{{x}}: validation loss %{{y:.4f}}"
    )
    return _trace(style, "markers", steps, means, hovertemplate=text, digits=5)


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
