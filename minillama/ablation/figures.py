"""The report's interactive figures, as plain data that plotly.js draws.

A trace's ``meta`` names its arm, which gives it its colour on the page (one for light, one for
dark) and the button that hides it, and its learning rate where the figure can be cut down to one.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from minillama.ablation.analysis import ArmResult, Comparison
from minillama.ablation.drawing import (
    arm_styles,
    every,
    running_mean,
    smoothing_window,
    thin,
)
from minillama.ablation.measures import Floats
from minillama.ablation.names import short_names
from minillama.ablation.results import Results, Run

Trace = dict[str, Any]
Figure = dict[str, Any]

_POINTS_IN_ALL = 40_000
_FEWEST_POINTS = 12
_LABEL_CHARACTERS = 22


def page_data(
    results: Results,
    arms: Sequence[ArmResult],
    comparisons: Sequence[Comparison],
    points_in_all: int = _POINTS_IN_ALL,
) -> dict[str, Any]:
    """Return everything that the page's script needs: the arms' looks and the figures.

    ``points_in_all`` bounds the points of all raw curves of one figure together.
    """
    points = max(_FEWEST_POINTS, points_in_all // max(1, len(results.runs)))
    styles = arm_styles(results.arms)
    rates = [f"{lr:g}" for lr in results.lrs]
    figures = [curves(results, arms, points), gradients(results, arms, points)]
    if len(results.lrs) > 1:
        figures.insert(0, loss_by_rate(results, arms))
    figures += [by_layer(results, arms, *measure) for measure in LAYER_MEASURES]
    pairs = [c for c in comparisons if len(c.seeds) > 1]
    if pairs:
        figures.append(differences(pairs, results))
    return {
        "arms": [{"name": html.escape(arm), **asdict(styles[arm])} for arm in results.arms],
        "rates": rates,
        "figures": [figure for figure in figures if figure["traces"]],
    }


def numbers(values: Floats | Sequence[float], digits: int = 4) -> list[float | None]:
    """Return values as JSON holds them, to ``digits`` significant ones; not finite is null."""
    return [
        float(f"{value:.{digits}g}") if math.isfinite(value) else None
        for value in np.asarray(values, dtype=np.float64).tolist()
    ]


def _trace(results: Results, arm: str, lr: float | None, **fields: Any) -> Trace:
    style = arm_styles(results.arms)[arm]
    index = results.arms.index(arm)
    trace: Trace = {
        "type": "scatter",
        "name": html.escape(short_names(results.arms)[arm]),
        **fields,
    }
    trace["meta"] = {"arm": index, "rate": None if lr is None else f"{lr:g}"}
    if "lines" in trace["mode"]:
        trace["line"] = {"dash": style.dash, "width": style.width} | trace.get("line", {})
    if "markers" in trace["mode"]:
        trace["marker"] = {"symbol": style.symbol, "size": style.size} | trace.get("marker", {})
    return trace


def _axis(title: str, **fields: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, "zeroline": False, **fields}


def _log_axis(title: str, **fields: Any) -> dict[str, Any]:
    return _axis(title, type="log", exponentformat="power", **fields)


# ------------------------------------------------------------------------ loss by learning rate


def loss_by_rate(results: Results, arms: Sequence[ArmResult]) -> Figure:
    """Final validation loss against learning rate: every run, and the mean over seeds.

    A run that diverged has no loss: it stands as a cross on the figure's upper edge.
    """
    finite = [run.figure("val_loss") for run in results.runs if run.has_loss]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    pad = 0.06 * (high - low) or 0.1
    lost = [run for run in results.runs if run.fate == "diverged"]
    top = high + (3 if lost else 1) * pad
    traces = []
    for arm in arms:
        shown = {lr: loss for lr, loss in arm.mean_loss.items() if _has_mean(arm, lr)}
        traces.append(
            _trace(
                results,
                arm.name,
                None,
                mode="lines",
                x=list(shown),
                y=numbers(list(shown.values()), 5),
                hoverinfo="skip",
            )
        )
        for fate, mark in (
            ("ok", {}),
            ("collapsed", _CROSS),
        ):
            runs = [run for run in arm.runs if run.fate == fate and run.has_loss]
            traces.append(_marks(results, arm.name, runs, None, mark))
        gone = [run for run in arm.runs if run.fate == "diverged"]
        traces.append(_marks(results, arm.name, gone, top - pad, _CROSS))
    layout: dict[str, Any] = {
        "xaxis": _axis(
            "peak learning rate",
            type="log",
            tickvals=list(results.lrs),
            ticktext=[f"{lr:g}" for lr in results.lrs],
        ),
        "yaxis": _axis("validation loss (nats a token)", range=[low - pad, top]),
    }
    levels = [("init_val_loss", "loss at init"), ("unigram_entropy", "unigram entropy")]
    lines = [(text, _mean_figure(results.runs, key)) for key, text in levels]
    lines = [(text, value) for text, value in lines if low - pad < value < top]
    layout["shapes"] = [_level(value) for _, value in lines]
    layout["annotations"] = [_level_name(text, value) for text, value in lines]
    if lost:
        layout["annotations"].append(_level_name("diverged", top - pad))
    return {
        "id": "loss-rate",
        "traces": [trace for trace in traces if trace["x"]],
        "layout": layout,
    }


_CROSS = {"symbol": "x-thin", "size": 11, "line": {"width": 3}}


def _has_mean(arm: ArmResult, lr: float) -> bool:
    return all(run.has_loss for run in arm.runs if run.lr == lr and run.ended)


def _marks(
    results: Results, arm: str, runs: Sequence[Run], at: float | None, marker: Mapping[str, Any]
) -> Trace:
    losses = [run.figure("val_loss") for run in runs]
    return _trace(
        results,
        arm,
        None,
        mode="markers",
        x=[run.lr for run in runs],
        y=numbers(losses, 5) if at is None else [at] * len(runs),
        marker=dict(marker),
        customdata=[
            [f"{run.lr:g}", run.seed, run.fate, f"{loss:.4f}" if math.isfinite(loss) else "none"]
            for run, loss in zip(runs, losses, strict=True)
        ],
        hovertemplate="lr %{customdata[0]}, seed %{customdata[1]}<br>"
        "loss %{customdata[3]} (%{customdata[2]})",
    )


def _mean_figure(runs: Sequence[Run], key: str) -> float:
    values = [run.figure(key) for run in runs if math.isfinite(run.figure(key))]
    return float(np.mean(values)) if values else math.nan


def _level(value: float) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"width": 1, "dash": "dot"},
    }


def _level_name(text: str, value: float) -> dict[str, Any]:
    return {
        "xref": "paper",
        "x": 0.005,
        "y": value,
        "text": text,
        "showarrow": False,
        "xanchor": "left",
        "yanchor": "bottom",
        "font": {"size": 11},
    }


# ----------------------------------------------------------------------------- curves by step


def _best_rates(arms: Sequence[ArmResult]) -> dict[str, float]:
    return {arm.name: arm.best_lr for arm in arms}


def _curve(
    results: Results, run: Run, best: Mapping[str, float], x: Floats, y: Floats, **fields: Any
) -> Trace:
    """Return a trace of one run; it knows whether it is at its arm's best rate, if there is one."""
    digits = fields.pop("digits", 4)
    trace = _trace(results, run.arm, run.lr, x=numbers(x, 9), y=numbers(y, digits), **fields)
    trace["meta"]["best"] = run.lr == best[run.arm] or math.isnan(best[run.arm])
    return trace


def curves(results: Results, arms: Sequence[ArmResult], points: int) -> Figure:
    """Loss against step: raw training loss faint, its running mean strong, validation as marks."""
    best = _best_rates(arms)
    faint = {"line": {"width": 1, "dash": "solid"}, "opacity": 0.25, "hoverinfo": "skip"}
    traces = []
    for run in results.runs:
        steps, loss = run.curves.steps, run.curves.loss
        label = f"lr {run.lr:g}, seed {run.seed}<br>step %{{x}}"
        x, y = thin(steps, loss, min(points, 400))
        traces.append(_curve(results, run, best, x, y, mode="lines", **faint))
        x, y = every(steps, running_mean(loss, smoothing_window(len(loss))), min(points, 200))
        hover = f"{label}: training loss %{{y:.3f}} (smoothed)"
        traces.append(_curve(results, run, best, x, y, mode="lines", hovertemplate=hover))
        x, y = run.curves.val_steps, run.curves.val_loss
        hover = f"{label}: validation loss %{{y:.4f}}"
        traces.append(
            _curve(results, run, best, x, y, digits=5, mode="markers", hovertemplate=hover)
        )
    return {
        "id": "loss-step",
        "traces": [trace for trace in traces if trace["x"]],
        "layout": {"xaxis": _axis("step"), "yaxis": _axis("loss (nats a token)")},
        "fit_tail": True,
    }


def gradients(results: Results, arms: Sequence[ArmResult], points: int) -> Figure:
    """Gradient norm before clipping against step, on a log scale, with the level of the clip."""
    best = _best_rates(arms)
    traces = []
    for run in results.runs:
        x, y = thin(run.curves.steps, run.curves.grad_norm, min(points, 500))
        hover = f"lr {run.lr:g}, seed {run.seed}<br>step %{{x}}: gradient norm %{{y}}"
        look: dict[str, Any] = {"digits": 3, "mode": "lines", "line": {"width": 1.2}}
        traces.append(_curve(results, run, best, x, y, hovertemplate=hover, **look))
    clips = {run.config.get("optim", {}).get("grad_clip") for run in results.runs if run.config}
    layout: dict[str, Any] = {
        "xaxis": _axis("step"),
        "yaxis": _log_axis("gradient norm before clipping"),
    }
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
)
"""What is drawn of a probe's measures, and its axis title."""


def by_layer(results: Results, arms: Sequence[ArmResult], measure: str, title: str) -> Figure:
    """Return a probed measure against depth, as each run's last probe has it."""
    best = _best_rates(arms)
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
        x, y = np.array(depth, dtype=np.float64), np.array([layers[layer] for layer in depth])
        hover = f"lr {run.lr:g}, seed {run.seed}, step {step}<br>layer %{{x}}: %{{y}}"
        look: dict[str, Any] = {"digits": 3, "mode": "lines+markers"}
        traces.append(_curve(results, run, best, x, y, hovertemplate=hover, **look))
    return {
        "id": f"layer-{measure}",
        "traces": traces,
        "layout": {"xaxis": _axis("layer"), "yaxis": _log_axis(title)},
    }


# ------------------------------------------------------------------------------ differences


def _label(name: str) -> str:
    """Return a name as lines that leave a plot room beside them, even on a phone."""
    lines = textwrap.wrap(name, _LABEL_CHARACTERS)
    return "<br>".join(map(html.escape, lines))


def differences(comparisons: Sequence[Comparison], results: Results) -> Figure:
    """Each arm less its baseline at their best learning rates: pairs, mean and 95% t interval."""
    traces = []
    for row, c in enumerate(comparisons):
        y = [row] * len(c.seeds)
        traces.append(
            _trace(
                results,
                c.arm,
                None,
                mode="markers",
                x=numbers(c.differences),
                y=[row + 0.18] * len(y),
                marker={"size": 7},
                opacity=0.6,
                text=[f"seed {seed}" for seed in c.seeds],
                hovertemplate="%{text}: %{x:.4f}",
            )
        )
        half = (c.t95.high - c.t95.low) / 2
        traces.append(
            _trace(
                results,
                c.arm,
                None,
                mode="markers",
                x=numbers([c.mean]),
                y=[row - 0.1],
                marker={"size": 12},
                error_x={"type": "data", "array": numbers([half]), "thickness": 2.5, "width": 6},
                hovertemplate=f"mean %{{x:.4f}}<br>95% {c.t95.low:.4f} to {c.t95.high:.4f}",
            )
        )
    short = {arm: _label(name) for arm, name in short_names(results.arms).items()}
    names = [f"{short[c.arm]}<br>− {short[c.baseline]}" for c in comparisons]
    margin = results.margin
    shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": -margin, "x1": margin}
    zero = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 0, "x1": 0}
    return {
        "id": "differences",
        "traces": traces,
        "layout": {
            "xaxis": _axis("difference in validation loss (nats a token; left: the arm is better)"),
            "yaxis": _axis(
                "",
                tickvals=list(range(len(names))),
                ticktext=names,
                range=[len(names) - 0.5, -0.5],
            ),
            "shapes": [
                shade | {"line": {"width": 0}, "opacity": 0.15, "fillcolor": "#888888"},
                zero | {"line": {"width": 1}},
            ],
            "height": 150 + sum(30 + 20 * (name.count("<br>") + 1) for name in names),
        },
    }
