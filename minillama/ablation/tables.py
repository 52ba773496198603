"""The report's tables as HTML: the arms, the pairs, every run."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from minillama.ablation.analysis import ArmResult, Comparison
from minillama.ablation.drawing import ArmStyle
from minillama.ablation.results import Results, Run, table_row
from minillama.ablation.statistics import MIN_PAIRS_FOR_SIGN_FLIP
from minillama.ablation.verdict import number, p_value

_DASH_LENGTHS = {"solid": "", "dash": "6 3", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "9 3"}
_SHAPES = {
    "circle": '<circle cx="17" cy="7" r="4"/>',
    "square": '<rect x="13" y="3" width="8" height="8"/>',
    "diamond": '<path d="M17 1.5 22.5 7 17 12.5 11.5 7Z"/>',
    "triangle-up": '<path d="M17 2 22 11H12Z"/>',
    "pentagon": '<path d="M17 2 22 5.8 20 11.5H14L12 5.8Z"/>',
    "star": '<path d="M17 1 18.6 5.2 23 5.4 19.5 8.2 20.8 12.5 17 10 13.2 12.5 14.5 8.2 11 5.4'
    ' 15.4 5.2Z"/>',
    "hexagon": '<path d="M14 2.5H20L23 7 20 11.5H14L11 7Z"/>',
}


def escape(value: Any) -> str:
    """Return a value as text that HTML shows as it is."""
    return html.escape(str(value))


def known(run: Run, key: str) -> bool:
    """Whether the run's summary has a finite number under ``key``."""
    return math.isfinite(run.figure(key))


def short(n: float) -> str:
    """Write a large number in three digits, as in ``1.23 M``."""
    if not math.isfinite(n):
        return "–"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.0f}"


def duration(seconds: float) -> str:
    """Write a time as people say it, as in ``3 min 20 s``."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def swatch(style: ArmStyle) -> str:
    """Return an arm's line and mark as an inline picture."""
    dashes = _DASH_LENGTHS[style.dash]
    return (
        f'<svg class="swatch" style="--light:{style.light};--dark:{style.dark}" width="34" '
        f'height="14" aria-hidden="true"><line x1="0" y1="7" x2="34" y2="7" stroke="currentColor" '
        f'stroke-width="2" stroke-dasharray="{dashes}"/>'
        f'<g fill="currentColor">{_SHAPES[style.symbol]}</g></svg>'
    )


def table(head: Sequence[str], rows: Iterable[str]) -> str:
    """Return a table that scrolls sideways where the screen is narrow; ``head`` is HTML."""
    cells = "".join(f"<th>{name}</th>" for name in head)
    return (
        f'<div class="wide"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def arm_table(
    arms: Sequence[ArmResult], styles: Mapping[str, ArmStyle], comparisons: Sequence[Comparison]
) -> str:
    """One row for each arm, at its best learning rate."""
    beside = {c.arm: c for c in comparisons}
    rows = []
    for arm in arms:
        spread = f" <small>± {number(arm.best_sd)}</small>" if arm.best_sd == arm.best_sd else ""
        c = beside.get(arm.name)
        away = "baseline" if arm.name == arm.baseline else number(c.mean) if c else "–"
        plain, trapezoid = arm.mean_sensitivity()
        at_best = [run for run in arm.runs if run.lr == arm.best_lr and run.ended]
        basin = "–"
        if arm.basin is not None:
            is_open = arm.basin.open_below or arm.basin.open_above
            basin = f"{'≥ ' if is_open else ''}{arm.basin.width:.2f}"
        edge = f" <small>{arm.edge}</small>" if arm.edge else ""
        fates = ", ".join(f"{n} {fate}" for fate, n in arm.fates.items()) or "not run"
        extra = arm.first("n_norm_params")
        speed = [r.figure("tokens_per_s") for r in arm.runs if known(r, "tokens_per_s")]
        columns = [
            f"{arm.best_lr:g}{edge}" if arm.mean_loss else "–",
            f"{number(arm.best_loss)}{spread}",
            away,
            number(_mean([run.figure("val_bits_per_byte") for run in at_best])),
            number(plain),
            number(trapezoid),
            basin,
            escape(fates),
            f"{arm.first('n_params'):,.0f}<br><small>{extra:,.0f} in norms</small>"
            if math.isfinite(arm.first("n_params"))
            else "–",
            short(float(np.median(speed))) if speed else "–",
        ]
        cells = "".join(f"<td>{column}</td>" for column in columns)
        rows.append(f"<tr><th>{swatch(styles[arm.name])} {escape(arm.name)}</th>{cells}</tr>")
    head = (
        "arm",
        "best<br>rate",
        "loss<br><small>nats a token</small>",
        "less<br>baseline",
        "bits<br>a byte",
        "S<br><small>plain</small>",
        "S<br><small>trapezoid</small>",
        "basin<br><small>decades</small>",
        "fates",
        "parameters",
        "tokens/s",
    )
    note = (
        "Loss: mean over seeds (± standard deviation) at the arm's best learning rate, which was "
        "picked on the same runs. Lower is better for loss and S, wider for the basin. tokens/s: "
        "the median, while other cells ran beside it, so a rough guide only."
    )
    return f'<h2>The arms</h2>{table(head, rows)}<p class="note">{note}</p>'


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else math.nan


def comparison_table(comparisons: Sequence[Comparison], margin: float) -> str:
    """One row for each arm that has two pairs with its baseline; nothing where none has."""
    shown = [c for c in comparisons if len(c.seeds) > 1]
    if not shown:
        return ""
    rows = []
    for c in shown:
        few = len(c.seeds) < MIN_PAIRS_FOR_SIGN_FLIP
        flip = "<small>too few pairs</small>" if few else p_value(c.p_sign)
        columns = [
            f"{c.lr:g} / {c.baseline_lr:g}",
            str(len(c.seeds)),
            number(c.mean, 4),
            f"{number(c.t95.low, 4)} to {number(c.t95.high, 4)}",
            f"{number(c.bca95.low, 4)} to {number(c.bca95.high, 4)}"
            if math.isfinite(c.bca95.low)
            else "–",
            f"{p_value(c.p_t)}<br><small>Holm: {p_value(c.p_holm)}</small>",
            flip,
            f"{p_value(c.same_p)}<br><small>Holm: {p_value(c.same_holm)}</small>",
            f"{number(c.s_mean)}<br><small>{number(c.s_t95.low)} to {number(c.s_t95.high)}</small>"
            if math.isfinite(c.s_t95.low)
            else "–",
        ]
        cells = "".join(f"<td>{column}</td>" for column in columns)
        rows.append(f"<tr><th>{escape(c.arm)}<br>− {escape(c.baseline)}</th>{cells}</tr>")
    head = (
        "difference",
        "rates",
        "pairs",
        "mean",
        "95% t",
        "95% BCa",
        "t test",
        "sign flip",
        f"same<br>within ±{margin:g}",
        "S<br><small>95% t</small>",
    )
    note = (
        "Paired by seed, each arm at its own best learning rate; below zero the arm's loss is "
        "lower. BCa: bootstrap, too narrow with few pairs. Holm: p adjusted for the number of "
        "arms here. Same: two one-sided t tests; below .05 the arms are equivalent within the "
        "margin. S: the difference in plain LR sensitivity. A sign-flip test cannot reach p < .05 "
        f"below {MIN_PAIRS_FOR_SIGN_FLIP} pairs."
    )
    return f'<h2>Pairs</h2>{table(head, rows)}<p class="note">{note}</p>'


def run_table(results: Results, styles: Mapping[str, ArmStyle]) -> str:
    """One row for each run, the failed ones marked; folded away where there are many."""
    rows = []
    for run in results.runs:
        row = table_row(run, results.folder)
        failed = ' class="failed"' if run.fate != "ok" else ""
        columns = [
            f"{run.lr:g}",
            str(run.seed),
            escape(run.fate),
            number(run.figure("val_loss"), 4),
            number(run.figure("train_loss"), 4),
            _filled(row["grad_norm_max"], "{:.3g}"),
            _filled(row["grad_norm_p99"], "{:.3g}"),
            _filled(row["clipped_share"], "{:.1%}"),
            _filled(row["spike_score"], "{:.2%}"),
            _filled(row["steps"], "{:,}"),
            _filled(row["tokens"], "{:,}"),
            _filled(row["seconds"], "{:.1f}"),
        ]
        cells = "".join(f"<td>{column}</td>" for column in columns)
        rows.append(f"<tr{failed}><th>{swatch(styles[run.arm])} {escape(run.arm)}</th>{cells}</tr>")
    head = (
        "arm",
        "rate",
        "seed",
        "fate",
        "val loss",
        "train loss",
        "largest<br>gradient",
        "99th<br>percentile",
        "clipped",
        "spikes",
        "steps",
        "tokens",
        "seconds",
    )
    return (
        f"<details{'' if len(results.runs) > 12 else ' open'}><summary>Every run</summary>"
        f"{table(head, rows)}</details>"
    )


def _filled(value: Any, form: str) -> str:
    return "–" if value is None else "∞" if value == math.inf else form.format(value)
