"""The report's picture for papers, drawn by matplotlib from the figures of ``figures.py``."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from minillama.ablation.analysis import ArmResult
from minillama.ablation.report.curves import loss_range
from minillama.ablation.report.figures import (
    ArmStyle,
    Trace,
    arm_styles,
    loss_by_rate,
    loss_by_step,
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
    "x-thin": "x",
}
_INK, _SOFT, _GRID = "#1d2126", "#59616b", "#e4e1da"
_MOST_PANELS = 6
_MOST_LEGEND_COLUMNS = 6
_LEGEND_SIZE = 10.0  # points
_LEGEND_HANDLE = 0.75  # inches
_HEADLINE_LINES = 6
_POINTS = 400  # of one raw curve
_RATE_LABEL_SHARE = 0.16  # of the axis of learning rates that a label needs
_CHARACTER = 0.62  # width in font sizes, on average; bold ones are wider
_BOLD_CHARACTER = 0.72


def write_picture(
    path: Path, results: Results, arms: Sequence[ArmResult], headline: str, small_print: str
) -> None:
    """Write the picture as PNG; see :func:`draw`."""
    figure = draw(results, arms, headline, small_print)
    figure.savefig(path, format="png", metadata={"Software": "minillama"})


def draw(
    results: Results, arms: Sequence[ArmResult], headline: str, small_print: str
) -> Figure:
    """Draw loss against learning rate on the left and, for each rate, loss against step.

    With a single learning rate there is only loss against step.
    """
    styles = arm_styles(results.arms)
    is_sweep = len(results.lrs) > 1
    rates = _panel_rates(results)
    columns = min(3, len(rates))
    rows = math.ceil(len(rates) / columns)
    width = 12.6 if is_sweep else 8.0

    title = _wrap(results.name, width, 15, _BOLD_CHARACTER)
    subtitle = _wrap(headline, width, 10.5, max_lines=_HEADLINE_LINES)
    foot = _wrap(small_print, width, 8)
    labels = [_wrap(styles[arm].short_name, width - _LEGEND_HANDLE, _LEGEND_SIZE) for arm in styles]
    legend_columns = _legend_columns(labels, width)
    legend_rows = math.ceil(len(labels) / legend_columns)
    legend_lines = legend_rows * max(label.count("\n") + 1 for label in labels)

    plots = 4.2 if rows < 2 else 5.1
    height = plots + _height(title, 15) + _height(subtitle, 10.5) + _height(foot, 8)
    if results.is_ablation:
        height += legend_lines * 1.6 * _LEGEND_SIZE / 72
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left: dict[str, Any] = {"x": 0.015, "ha": "left", "parse_math": False}
    figure.suptitle(title, fontsize=15, fontweight="bold", color=_INK, **left)
    figure.supxlabel(foot, fontsize=8, color=_SOFT, **left)
    body = figure.subfigures()
    body.suptitle(subtitle, fontsize=10.5, color=_SOFT, **left)
    if results.is_ablation:
        body.legend(
            handles=[
                _legend_handle(style, label)
                for style, label in zip(styles.values(), labels, strict=True)
            ],
            loc="outside lower left",
            ncols=legend_columns,
            frameon=False,
            fontsize=_LEGEND_SIZE,
            labelcolor=_INK,
            handlelength=3.2,
        )
    grid = body.add_gridspec(1, 2 if is_sweep else 1, width_ratios=[1, 1.35] if is_sweep else None)
    if is_sweep:
        _draw_loss_by_rate(body.add_subplot(grid[0, 0]), results, arms, styles)
    panels = grid[0, -1].subgridspec(rows, columns)
    _draw_loss_by_step(body, panels, results, arms, rates, styles)
    return figure


# ----------------------------------------------------------------------------------- texts


def _wrap(
    text: str,
    width: float,
    size: float,
    character: float = _CHARACTER,
    max_lines: int | None = None,
) -> str:
    """Break ``text`` into lines of about ``width`` inches at a font size in points."""
    return textwrap.fill(
        text,
        int((width - 0.4) * 72 / (character * size)),
        break_on_hyphens=False,
        max_lines=max_lines,
        placeholder=" … (in full in report.html)",
    )


def _height(text: str, size: float) -> float:
    """Return the height of a text's lines in inches."""
    return 1.4 * size / 72 * (text.count("\n") + 1)


def _legend_columns(labels: Sequence[str], width: float) -> int:
    longest = max(len(line) for label in labels for line in label.split("\n"))
    column = _LEGEND_HANDLE + longest * _CHARACTER * _LEGEND_SIZE / 72
    return max(1, min(len(labels), _MOST_LEGEND_COLUMNS, int((width - 0.2) / column)))


def _legend_handle(style: ArmStyle, label: str) -> Line2D:
    return Line2D(
        [],
        [],
        color=style.light,
        linestyle=_DASHES[style.dash],
        marker=_MARKERS[style.symbol],
        markeredgecolor="white",
        linewidth=2,
        markersize=8,
        label=label.replace("$", r"\$"),
    )


# ----------------------------------------------------------------------------------- plots


def _panel_rates(results: Results) -> list[float]:
    """Return the learning rates that get a panel, evenly chosen where there are too many."""
    rates = [lr for lr in results.lrs if any(run.lr == lr for run in results.runs)]
    rates = rates or list(results.lrs[:1])
    if len(rates) <= _MOST_PANELS:
        return rates
    at = np.linspace(0, len(rates) - 1, _MOST_PANELS).round().astype(int)
    return [rates[i] for i in at]


def _draw_loss_by_rate(
    axes: Axes, results: Results, arms: Sequence[ArmResult], styles: Mapping[str, ArmStyle]
) -> None:
    figure = loss_by_rate(results, arms)
    layout = figure["layout"]
    _clean(axes, layout["xaxis"], layout["yaxis"])
    axes.set_xscale("log")
    _draw_traces(axes, figure["traces"], list(styles.values()))
    for shape in layout["shapes"]:
        axes.axhline(shape["y0"], color=_SOFT, linewidth=1, linestyle=":")
    for note in layout["annotations"]:
        axes.annotate(
            note["text"],
            (note["x"], note["y"]),
            xycoords=("axes fraction", "data"),
            xytext=(0, 5),
            textcoords="offset points",
            ha=note["xanchor"],
            fontsize=9,
            color=_SOFT,
        )
    axes.set_ylim(layout["yaxis"]["range"])
    labelled = _spaced_rates(results.lrs)
    axes.xaxis.set_major_locator(FixedLocator(results.lrs))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{lr:g}" if lr in labelled else "" for lr in results.lrs])
    axes.margins(x=0.09)


def _spaced_rates(rates: Sequence[float]) -> list[float]:
    """Return the rates whose labels fit side by side, from the smallest on."""
    least = _RATE_LABEL_SHARE * math.log(rates[-1] / rates[0])
    spaced = [rates[0]]
    for rate in rates[1:]:
        if math.log(rate / spaced[-1]) >= least:
            spaced.append(rate)
    return spaced


def _draw_loss_by_step(
    body: SubFigure,
    grid: Any,
    results: Results,
    arms: Sequence[ArmResult],
    rates: Sequence[float],
    styles: Mapping[str, ArmStyle],
) -> None:
    """Draw a panel for each learning rate, all with the same axes."""
    figure = loss_by_step(results, arms, _POINTS)
    low, high = loss_range([run.curves for run in results.runs])
    first: Axes | None = None
    for panel, lr in zip(grid, rates, strict=False):
        axes = body.add_subplot(panel, sharex=first, sharey=first)
        first = first or axes
        place = axes.get_subplotspec()
        assert place is not None
        _clean(axes, figure["layout"]["xaxis"], figure["layout"]["yaxis"])
        traces = [trace for trace in figure["traces"] if trace["meta"]["rate"] == f"{lr:g}"]
        _draw_traces(axes, traces, list(styles.values()), scale=0.8)
        if len(results.lrs) > 1:
            axes.set_title(f"learning rate {lr:g}", fontsize=10, color=_INK, pad=5)
        axes.set_ylim(low, high)
        if not place.is_first_col():
            axes.tick_params(labelleft=False)
            axes.set_ylabel("")
        if rates.index(lr) + grid.ncols < len(rates):
            axes.tick_params(labelbottom=False)
            axes.set_xlabel("")


def _clean(axes: Axes, x: Mapping[str, Any], y: Mapping[str, Any]) -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_SOFT)
    axes.tick_params(colors=_SOFT, labelsize=9)
    axes.set_xlabel(x["title"]["text"], color=_INK)
    axes.set_ylabel(y["title"]["text"], color=_INK)


def _draw_traces(
    axes: Axes, traces: Iterable[Trace], styles: Sequence[ArmStyle], scale: float = 0.9
) -> None:
    """Draw traces of plotly; ``scale`` multiplies the sizes of their lines and marks."""
    for trace in traces:
        color = styles[trace["meta"]["arm"]].light
        look: dict[str, Any] = {"linestyle": "none"}
        if line := trace.get("line"):
            look = {"linestyle": _DASHES[line["dash"]], "linewidth": scale * line["width"]}
        if marker := trace.get("marker"):
            is_cross = marker["symbol"] == "x-thin"
            look |= {
                "marker": _MARKERS[marker["symbol"]],
                "markersize": scale * marker["size"],
                "markeredgecolor": color if is_cross else "white",
                "markeredgewidth": 2.4 if is_cross else 0.9,
            }
        y = [math.nan if value is None else value for value in trace["y"]]
        axes.plot(trace["x"], y, color=color, alpha=trace.get("opacity"), **look)
