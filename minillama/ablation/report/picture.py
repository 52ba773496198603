"""The report's picture for papers: loss by learning rate, and by step for each learning rate."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from minillama.ablation.analysis import ArmResult
from minillama.ablation.report import figures
from minillama.ablation.report.curves import loss_range
from minillama.ablation.report.figures import ArmStyle, arm_styles
from minillama.ablation.report.prose import short_names
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
    "circle-open": "o",
}
_INK, _SOFT, _GRID = "#1d2126", "#59616b", "#e4e1da"
_POINTS_PER_PIXEL = 0.75  # sizes of the figures' data are in pixels, matplotlib's in points
_LEFT = 0.2  # inches left of all text, and right of it
_LETTER = 0.62  # width of a letter in font sizes: most are narrower
_LINE = 1.4  # height of a line in font sizes
_MOST_PANELS = 6
_LABEL_LETTERS = 28  # of a line beside a panel
_MOST_POINTS = 1_000_000  # of a curve: all
_MOST_LEGEND_COLUMNS = 6
_MOST_HEADLINE_LINES = 6


def write_picture(
    path: Path, results: Results, arms: Sequence[ArmResult], headline: str, small_print: str
) -> None:
    """Draw loss against learning rate on the left, loss against step for each rate on the right.

    A single run has only the right half.  ``small_print`` is the text below it.
    """
    figure = draw(results, arms, headline, small_print)
    figure.savefig(path, format="png", metadata={"Software": "minillama"})


def draw(results: Results, arms: Sequence[ArmResult], headline: str, small_print: str) -> Figure:
    """Return the figure: title and headline, the plots, the legend and the small print.

    The figure is as high as its texts need; the plots between them are laid out by matplotlib.
    """
    styles = arm_styles(results.arms)
    sweep = len(results.lrs) > 1
    rates = _panel_rates(results)
    columns = min(3, len(rates))
    rows = math.ceil(len(rates) / columns)
    width = 12.6 if sweep else 8.0
    figure = Figure(figsize=(width, 6.0), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)

    title = _wrap(results.name, width, 15 * 1.15)  # bold letters are wider
    lines = _headline_lines(headline, results, width)
    foot = _wrap(small_print, width, 8)
    legend = _legend(figure, styles, width) if results.is_ablation else None
    above = _height(title, 15) + _height(lines, 10.5) + 0.15
    foot_height = _height(foot, 8) + 0.1
    below = foot_height + (_legend_height(legend) + 0.1 if legend else 0.0)
    height = above + (3.9 if rows < 2 else 4.9) + below
    figure.set_size_inches(width, height)
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0.005, below / height, 0.99, (height - above - below) / height))
    _write(figure, title, 15, height - 0.1, fontweight="bold", color=_INK)
    _write(figure, lines, 10.5, height - 0.1 - _height(title, 15), color=_SOFT)
    _write(figure, foot, 8, foot_height, color=_SOFT)
    if legend:
        anchor = (_LEFT - 0.06, foot_height)
        legend.set_bbox_to_anchor(anchor, transform=figure.dpi_scale_trans)

    halves = figure.add_gridspec(1, 2 if sweep else 1, width_ratios=[1, 1.35] if sweep else None)
    if sweep:
        _draw_loss_by_rate(figure.add_subplot(halves[0, 0]), results, arms, styles, width)
    panels = halves[0, -1].subgridspec(rows, columns)
    spec = figures.difference_by_step(results, arms, points=_MOST_POINTS)
    if spec["traces"]:
        low, high = _tail_range(spec["traces"])
    else:
        spec = figures.loss_by_step(results, arms, points=_MOST_POINTS)
        low, high = loss_range([run.curves for run in results.runs])
    first: Axes | None = None
    for i, lr in enumerate(rates):
        axes = figure.add_subplot(panels[i // columns, i % columns], sharex=first, sharey=first)
        first = first or axes
        _clean(axes)
        of_rate = [trace for trace in spec["traces"] if trace["meta"]["rate"] == f"{lr:g}"]
        _draw_traces(axes, of_rate, styles)
        for shape in spec["layout"].get("shapes", ()):
            axes.axhline(shape["y0"], color=_SOFT, linewidth=1, linestyle=":")
        axes.set_ylim(low, high)
        if sweep:
            axes.set_title(f"learning rate {lr:g}", fontsize=10, color=_INK, pad=5)
        if i % columns:
            axes.tick_params(labelleft=False)
        else:
            label = spec["layout"]["yaxis"]["title"]["text"]
            axes.set_ylabel(textwrap.fill(label, _LABEL_LETTERS), color=_INK)
        if i + columns < len(rates):
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel(spec["layout"]["xaxis"]["title"]["text"], color=_INK)
        axes.yaxis.set_minor_formatter(NullFormatter())
    return figure


# ------------------------------------------------------------------------------------------- text


def _wrap(text: str, width: float, size: float) -> list[str]:
    """Break a text into lines that fit a figure ``width`` inches wide."""
    return textwrap.wrap(text, _letters(width - 2 * _LEFT, size))


def _letters(width: float, size: float) -> int:
    return max(1, int(72 * width / (_LETTER * size)))


def _height(lines: Sequence[str], size: float) -> float:
    return len(lines) * _LINE * size / 72


def _write(figure: Figure, lines: Sequence[str], size: float, top: float, **look: Any) -> None:
    for i, line in enumerate(lines):
        figure.text(
            _LEFT,
            top - (i + 1) * _LINE * size / 72,
            line,
            fontsize=size,
            va="bottom",
            parse_math=False,  # a dollar sign in a name starts no formula
            transform=figure.dpi_scale_trans,
            **look,
        )


def _headline_lines(headline: str, results: Results, width: float) -> list[str]:
    """Return the headline's lines: with short names if it is long, and cut if it is still long."""
    lines = _wrap(headline, width, 10.5)
    if len(lines) > _MOST_HEADLINE_LINES:
        short = short_names(results.arms)
        names = "|".join(re.escape(arm) for arm in sorted(short, key=len, reverse=True))
        whole_name = rf"(?<![\w.=+-])(?:{names})(?![\w=+-])"
        shorter = re.sub(whole_name, lambda name: short[name[0]], headline)
        lines = _wrap(shorter, width, 10.5)
    if len(lines) > _MOST_HEADLINE_LINES:
        lines = [*lines[: _MOST_HEADLINE_LINES - 1], "… the whole sentence is in report.html"]
    return lines


def _legend(figure: Figure, styles: Mapping[str, ArmStyle], width: float) -> Legend:
    """Return the legend of the arms in as many columns as fit; long names are wrapped."""
    names = [_wrap(style.short_name, width - 0.75, 10) for style in styles.values()]
    longest = max(len(line) for lines in names for line in lines)
    columns = _letters(width - 2 * _LEFT, 10) // (longest + 10)  # 10 letters: the line and gaps
    handles = [
        Line2D(
            [],
            [],
            color=style.light,
            linestyle=_DASHES[style.dash],
            marker=_MARKERS[style.symbol],
            markeredgecolor="white",
            linewidth=2,
            markersize=8,
            label="\n".join(lines).replace("$", r"\$"),
        )
        for style, lines in zip(styles.values(), names, strict=True)
    ]
    legend = figure.legend(
        handles=handles,
        loc="lower left",
        ncols=min(max(1, columns), len(handles), _MOST_LEGEND_COLUMNS),
        frameon=False,
        fontsize=10,
        labelcolor=_INK,
        handlelength=3.2,
    )
    legend.set_in_layout(False)  # its place is below the plots' part of the figure
    return legend


def _legend_height(legend: Legend) -> float:
    figure: Any = legend.get_figure(root=True)
    box = legend.get_window_extent(figure.canvas.get_renderer())
    return float(box.height / figure.dpi)


# ------------------------------------------------------------------------------------------- plots


def _panel_rates(results: Results) -> list[float]:
    """Return the rates that get a panel: all, or some of a grid too long to draw."""
    rates = [lr for lr in results.lrs if any(run.lr == lr for run in results.runs)]
    rates = rates or [results.lrs[0]]
    if len(rates) <= _MOST_PANELS:
        return rates
    at = np.linspace(0, len(rates) - 1, _MOST_PANELS).round().astype(int)
    return [rates[i] for i in at]


def _clean(axes: Axes) -> None:
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    axes.tick_params(colors=_SOFT, labelsize=9)


def _draw_traces(
    axes: Axes, traces: Sequence[figures.Trace], styles: Mapping[str, ArmStyle]
) -> None:
    by_index = list(styles.values())
    for trace in traces:
        color = by_index[trace["meta"]["arm"]].light
        look: dict[str, Any] = {"color": color, "alpha": trace.get("opacity"), "linestyle": "none"}
        if line := trace.get("line"):
            look["linestyle"] = _DASHES[line["dash"]]
            look["linewidth"] = _POINTS_PER_PIXEL * line["width"]
        if marker := trace.get("marker"):
            cross = marker["symbol"] == "x-thin"
            look["marker"] = _MARKERS[marker["symbol"]]
            look["markersize"] = _POINTS_PER_PIXEL * marker["size"]
            ring = marker["symbol"] == "circle-open"
            look["markeredgecolor"] = color if cross or ring else "white"
            look["fillstyle"] = "none" if ring else "full"
            look["markeredgewidth"] = _POINTS_PER_PIXEL * marker.get("line", {"width": 1})["width"]
        y = [math.nan if value is None else value for value in trace["y"]]
        if trace.get("fill"):
            axes.fill(trace["x"], y, color=color, alpha=0.2, linewidth=0)
        else:
            axes.plot(trace["x"], y, **look)


def _tail_range(traces: Sequence[figures.Trace]) -> tuple[float, float]:
    """Return the range of the lines from a tenth of their way on, as the page shows it."""
    lines = [trace["y"] for trace in traces if not trace.get("fill")]
    values = [v for y in lines for v in y[math.ceil(len(y) / 10) :] if v is not None] or [0.0]
    low, high = min(0.0, *values), max(0.0, *values)
    pad = 0.06 * (high - low) or 0.1
    return low - pad, high + pad


def _draw_loss_by_rate(
    axes: Axes,
    results: Results,
    arms: Sequence[ArmResult],
    styles: Mapping[str, ArmStyle],
    width: float,
) -> None:
    spec = figures.loss_by_rate(results, arms)
    layout = spec["layout"]
    _clean(axes)
    _draw_traces(axes, spec["traces"], styles)
    for shape in layout["shapes"]:
        axes.axhline(shape["y0"], color=_SOFT, linewidth=1, linestyle=":")
    for note in layout["annotations"]:
        axes.annotate(
            note["text"],
            (0.01 if note["xanchor"] == "left" else 0.99, note["y"]),
            xycoords=("axes fraction", "data"),
            xytext=(0, 5),
            textcoords="offset points",
            ha=note["xanchor"],
            fontsize=9,
            color=_SOFT,
        )
    axes.set_xscale("log")
    axes.set_ylim(*layout["yaxis"]["range"])
    axes.margins(x=0.09)
    axes.set_xticks(results.lrs, _apart(results.lrs, 0.33 * width))
    axes.set_xticks([], minor=True)
    axes.set_xlabel(layout["xaxis"]["title"]["text"], color=_INK)
    axes.set_ylabel(layout["yaxis"]["title"]["text"], color=_INK)


def _apart(rates: Sequence[float], width: float) -> list[str]:
    """Return the label of each rate, empty where it would touch the one to its left."""
    span = math.log(rates[-1] / rates[0]) * 1.18  # with the margins on both sides
    labels, free = [], -math.inf
    for rate in rates:
        text = f"{rate:g}"
        at, half = width * math.log(rate) / span, 0.5 * _LETTER * 9 / 72 * len(text) + 0.04
        labels.append(text if at - half >= free else "")
        free = at + half if labels[-1] else free
    return labels
