"""The report's picture for papers: loss by learning rate, and how each run got there."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
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
from minillama.ablation.names import short_names
from minillama.ablation.results import Results
from minillama.ablation.words import Words

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
_MOST_LEGEND_COLUMNS = 6
_HEADLINE_LINES = 6


def write_picture(
    path: Path, results: Results, arms: Sequence[ArmResult], headline: str, source: str
) -> None:
    """Draw loss against learning rate on the left, loss against step for each rate on the right.

    A single run has the right half alone.  ``source`` is the line of small print under it.
    """
    figure = draw(results, arms, headline, source)
    figure.savefig(path, metadata={"Software": "minillama"})


def draw(results: Results, arms: Sequence[ArmResult], headline: str, source: str) -> Figure:
    """Return the figure: words above, the legend and the small print below, as high as they need.

    All lengths here are in inches from the figure's left or lower edge.
    """
    styles = arm_styles(results.arms)
    sweep = len(results.lrs) > 1
    rates = _panel_rates(results)
    columns = min(3, len(rates))
    rows = math.ceil(len(rates) / columns)
    figure = Figure(figsize=(12.6 if sweep else 8.0, 6.0), dpi=160)
    FigureCanvasAgg(figure)
    figure.set_facecolor("white")
    words = Words(figure)
    above = [
        *(
            (line, 15, {"fontweight": "bold", "color": _INK})
            for line in words.wrapped(results.name, 15, bold=True)
        ),
        *((line, 10.5, {"color": _SOFT}) for line in _said(headline, words, results)),
    ]
    below = [(line, 8, {"color": _SOFT}) for line in words.wrapped(source, 8)]
    legend = _legend(figure, words, results, styles) if results.is_ablation else None
    under = words.height(below) + 0.1
    middle = under + (words.height_of(legend) + 0.05 if legend else 0.0)
    bottom = middle + 0.55  # tick labels and the axis label
    plots = 3.3 if rows < 2 else 4.2
    height = bottom + plots + 0.4 + words.height(above)
    figure.set_size_inches(figure.get_figwidth(), height)
    words.write(above, height - 0.1)
    words.write(below, under)
    if legend:
        legend.set_bbox_to_anchor((words.LEFT - 0.06, under), transform=figure.dpi_scale_trans)
    outer = figure.add_gridspec(
        1,
        2 if sweep else 1,
        width_ratios=[1, 1.35] if sweep else None,
        left=0.065 if sweep else 0.09,
        right=0.985,
        top=(bottom + plots) / height,
        bottom=bottom / height,
        wspace=0.17,
    )
    if sweep:
        _loss_by_rate(figure.add_subplot(outer[0, 0]), results, arms, styles, words)
    inner = outer[0, -1].subgridspec(rows, columns, wspace=0.07, hspace=0.28)
    _panels(figure, inner, results, rates, columns, styles)
    return figure


def _said(headline: str, words: Words, results: Results) -> list[str]:
    """Return the headline's lines: with short names if it is long, and cut if it still is."""
    lines = words.wrapped(headline, 10.5)
    if len(lines) > _HEADLINE_LINES:
        short = short_names(results.arms)
        names = "|".join(re.escape(arm) for arm in sorted(short, key=len, reverse=True))
        whole = rf"(?<![\w.=+-])(?:{names})(?![\w=+-])"
        lines = words.wrapped(re.sub(whole, lambda name: short[name[0]], headline), 10.5)
    if len(lines) > _HEADLINE_LINES:
        lines = [*lines[: _HEADLINE_LINES - 1], "… the whole sentence is in report.html"]
    return lines


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
    axes: Axes,
    results: Results,
    arms: Sequence[ArmResult],
    styles: dict[str, ArmStyle],
    words: Words,
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
        _name_level(axes, "diverged", top - pad, "left")
    unigram = [run.figure("unigram_entropy") for run in results.runs]
    level = float(np.nanmean(unigram)) if np.isfinite(unigram).any() else math.nan
    if min(losses) - pad < level < top:
        axes.axhline(level, color=_SOFT, linewidth=1, linestyle=":")
        _name_level(axes, "unigram entropy", level, "right")  # apart from the other
    axes.set_ylim(min(losses) - pad, top)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(results.lrs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.09)
    named = _apart(axes, results.lrs, words)
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if value in named else "")
    )
    axes.set_xlabel("peak learning rate", color=_INK)
    axes.set_ylabel("final validation loss (nats a token)", color=_INK)


def _apart(axes: Axes, rates: Sequence[float], words: Words) -> set[float]:
    """Return the rates whose labels fit side by side, from the smallest on."""
    if not axes.lines or axes.get_xlim()[0] <= 0:
        return set(rates)  # nothing is drawn
    low, high = map(math.log, axes.get_xlim())
    inches = axes.bbox.width / words.dpi / (high - low)
    named: set[float] = set()
    free = -math.inf
    for rate in rates:
        at, half = inches * math.log(rate), words.wide(f"{rate:g}", 9) / 2 + 0.04
        if at - half >= free:
            named.add(rate)
            free = at + half
    return named


def _name_level(axes: Axes, name: str, level: float, side: Literal["left", "right"]) -> None:
    axes.annotate(
        name,
        (0.01 if side == "left" else 0.99, level),
        xycoords=("axes fraction", "data"),
        xytext=(0, 6 if side == "left" else 3),
        textcoords="offset points",
        ha=side,
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


def _legend(figure: Figure, words: Words, results: Results, styles: dict[str, ArmStyle]) -> Legend:
    """Return the arms' legend in as many columns as fit, each name on as many lines as it needs."""
    names = short_names(results.arms)
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
            label="\n".join(words.wrapped(names[arm], 10, beside=0.75)).replace("$", r"\$"),
        )
        for arm in results.arms
    ]
    for columns in range(min(len(handles), _MOST_LEGEND_COLUMNS), 0, -1):
        legend = figure.legend(
            handles=handles,
            loc="lower left",
            ncols=columns,
            frameon=False,
            fontsize=10,
            labelcolor=_INK,
            handlelength=3.2,
        )
        if columns == 1 or words.width_of(legend) <= words.width + 0.12:
            break
        legend.remove()
    return legend
