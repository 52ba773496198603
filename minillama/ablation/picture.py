"""The report's picture for papers: loss by learning rate, and how each run got there."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from minillama.ablation.analysis import ArmResult
from minillama.ablation.drawing import (
    ArmStyle,
    arm_styles,
    loss_range,
    running_mean,
    smoothing_window,
)
from minillama.ablation.results import Results

_DASHES: dict[str, Any] = {
    "solid": "-",
    "dash": (0, (6, 2)),
    "dot": (0, (1.5, 1.5)),
    "dashdot": (0, (6, 2, 1.5, 2)),
    "longdash": (0, (10, 3)),
}
_MARKERS = {
    "circle": "o",
    "square": "s",
    "diamond": "D",
    "triangle-up": "^",
    "pentagon": "p",
    "star": "*",
    "hexagon": "h",
}
_INK, _SOFT, _GRID = "#1d2126", "#59616b", "#e4e1da"
_MOST_PANELS = 6


def write_picture(
    path: Path, results: Results, arms: Sequence[ArmResult], headline: str, source: str
) -> None:
    """Draw loss against learning rate on the left, loss against step for each rate on the right.

    A single run has the right half alone.  ``source`` is the line of small print under it.
    """
    styles = arm_styles(results.arms)
    sweep = len(results.lrs) > 1
    rates = _panel_rates(results)
    columns = min(3, len(rates))
    rows = math.ceil(len(rates) / columns)
    width = 12.6 if sweep else 8.0
    said = textwrap.wrap(headline, round(width * 12.5))
    longest = max(len(arm) for arm in results.arms)
    legend_columns = max(1, int((width - 0.3) / (0.85 + 0.085 * longest)))
    legend_rows = math.ceil(len(results.arms) / legend_columns) if results.is_ablation else 0
    above = 0.85 + 0.2 * len(said) + 0.24 * legend_rows
    height = above + 0.8 + (3.3 if rows < 2 else 4.2)  # inches, as all here that is not a share
    figure = Figure(figsize=(width, height), dpi=160)
    FigureCanvasAgg(figure)
    figure.set_facecolor("white")
    outer = figure.add_gridspec(
        1,
        2 if sweep else 1,
        width_ratios=[1, 1.35] if sweep else None,
        left=0.065 if sweep else 0.09,
        right=0.985,
        top=1 - above / height,
        bottom=0.75 / height,
        wspace=0.17,
    )
    if sweep:
        _loss_by_rate(figure.add_subplot(outer[0, 0]), results, arms, styles)
    inner = outer[0, -1].subgridspec(rows, columns, wspace=0.07, hspace=0.28)
    _panels(figure, inner, results, rates, columns, styles)
    _words(figure, results, styles, said, source, legend_columns)
    figure.savefig(path, metadata={"Software": "minillama"})


def _panel_rates(results: Results) -> list[float]:
    """Return the rates that get a panel: all, or the middle of a grid too long to draw."""
    rates = [lr for lr in results.lrs if any(run.lr == lr for run in results.runs)] or [
        results.lrs[0]
    ]
    if len(rates) <= _MOST_PANELS:
        return rates
    at = np.linspace(0, len(rates) - 1, _MOST_PANELS).round().astype(int)
    return [rates[i] for i in at]


def _clean(axes: Axes) -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_SOFT)
    axes.tick_params(colors=_SOFT, labelsize=9)


def _loss_by_rate(
    axes: Axes, results: Results, arms: Sequence[ArmResult], styles: dict[str, ArmStyle]
) -> None:
    _clean(axes)
    drawn = [run for run in results.runs if run.has_loss]
    losses = [run.figure("val_loss") for run in drawn] or [0.0, 1.0]
    pad = 0.06 * (max(losses) - min(losses)) or 0.1
    lost = [run for run in results.runs if run.fate == "diverged"]
    top = max(losses) + (3 if lost else 1) * pad
    for arm in arms:
        style = styles[arm.name]
        means = [
            (lr, loss)
            for lr, loss in arm.mean_loss.items()
            if all(run.has_loss for run in arm.runs if run.lr == lr and run.ended)
        ]
        axes.plot(
            [lr for lr, _ in means],
            [loss for _, loss in means],
            color=style.light,
            linestyle=_DASHES[style.dash],
            linewidth=style.width,
        )
        for run in arm.runs:
            if run.fate == "diverged":
                axes.plot(run.lr, top - pad, "x", color=style.light, markersize=9, mew=2.4)
            elif run.fate == "collapsed" and run.has_loss:
                axes.plot(
                    run.lr, run.figure("val_loss"), "x", color=style.light, markersize=9, mew=2.4
                )
            elif run.has_loss:
                axes.plot(
                    run.lr,
                    run.figure("val_loss"),
                    _MARKERS[style.symbol],
                    color=style.light,
                    markersize=0.9 * style.size,
                    markeredgecolor="white",
                    markeredgewidth=0.9,
                )
    if lost:
        _name_level(axes, "diverged", top - pad)
    unigram = [run.figure("unigram_entropy") for run in results.runs]
    level = float(np.nanmean(unigram)) if np.isfinite(unigram).any() else math.nan
    if min(losses) - pad < level < top:
        axes.axhline(level, color=_SOFT, linewidth=1, linestyle=":")
        _name_level(axes, "unigram entropy", level)
    axes.set_ylim(min(losses) - pad, top)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(results.lrs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.09)
    axes.set_xlabel("peak learning rate", color=_INK)
    axes.set_ylabel("final validation loss (nats a token)", color=_INK)


def _name_level(axes: Axes, name: str, level: float) -> None:
    axes.annotate(
        name,
        (0.01, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=9,
        color=_SOFT,
    )


def _panels(
    figure: Figure,
    grid: object,
    results: Results,
    rates: Sequence[float],
    columns: int,
    styles: dict[str, ArmStyle],
) -> None:
    """Draw loss against step, a panel for each rate, all on the same axes."""
    first: Axes | None = None
    low, high = loss_range([run.curves for run in results.runs])
    for i, lr in enumerate(rates):
        axes = figure.add_subplot(grid[i // columns, i % columns], sharex=first, sharey=first)  # type: ignore[index]
        first = first or axes
        _clean(axes)
        for run in results.runs:
            if run.lr != lr:
                continue
            style, curves = styles[run.arm], run.curves
            axes.plot(curves.steps, curves.loss, color=style.light, linewidth=0.6, alpha=0.22)
            smooth = running_mean(curves.loss, smoothing_window(len(curves.loss)))
            axes.plot(
                curves.steps,
                smooth,
                color=style.light,
                linewidth=0.9 * style.width,
                linestyle=_DASHES[style.dash],
            )
            axes.plot(
                curves.val_steps,
                curves.val_loss,
                _MARKERS[style.symbol],
                color=style.light,
                markersize=0.65 * style.size,
                markeredgecolor="white",
                markeredgewidth=0.7,
            )
        if len(results.lrs) > 1:
            axes.set_title(f"learning rate {lr:g}", fontsize=10, color=_INK, pad=5)
        axes.set_ylim(low, high)
        if i % columns:
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel("loss (nats a token)", color=_INK)
        if i + columns < len(rates):
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel("step", color=_INK)
        axes.yaxis.set_minor_formatter(NullFormatter())


def _words(
    figure: Figure,
    results: Results,
    styles: dict[str, ArmStyle],
    headline: Sequence[str],
    source: str,
    legend_columns: int,
) -> None:
    left, height = 0.02, figure.get_figheight()

    def write(text: str, inches: float, size: float, **fields: Any) -> None:
        """Write a line whose foot is so far below the top; names are no formulas."""
        figure.text(left, 1 - inches / height, text, fontsize=size, parse_math=False, **fields)

    write(results.name, 0.33, 15, fontweight="bold", color=_INK)
    for i, line in enumerate(headline):
        write(line, 0.58 + 0.2 * i, 10.5, color=_SOFT)
    write(source, height - 0.13, 8, color=_SOFT)
    if not results.is_ablation:
        return
    handles = [
        Line2D(
            [],
            [],
            color=styles[arm].light,
            linestyle=_DASHES[styles[arm].dash],
            marker=_MARKERS[styles[arm].symbol],
            markeredgecolor="white",
            linewidth=2,
            markersize=8,
            label=arm.replace("$", r"\$"),
        )
        for arm in results.arms
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left - 0.008, 1 - (0.46 + 0.2 * len(headline)) / height),
        ncols=min(len(handles), legend_columns),
        frameon=False,
        fontsize=10,
        labelcolor=_INK,
        handlelength=3.2,
    )
