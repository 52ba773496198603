"""The report as one HTML page that needs neither a network nor other files."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from minillama.ablation.analysis import ArmResult, Comparison
from minillama.ablation.measures import Basin
from minillama.ablation.report import prose, quote
from minillama.ablation.report.cost import costs
from minillama.ablation.report.curves import SMOOTHED_SHARE
from minillama.ablation.report.fates import LINE_SHIFTS, failed_in_all, fate_rows
from minillama.ablation.report.figures import SEEDS_FOR_BAND, arm_styles, page_data
from minillama.ablation.report.sensitivity import RANK_DEPTH, sensitivity_rows
from minillama.ablation.report.stages import how_compared
from minillama.ablation.report.wording import format_interval, format_p_value
from minillama.ablation.results import Results, Run, table_row
from minillama.ablation.statistics import ALPHA, MIN_PAIRS_FOR_SIGN_FLIP
from minillama.formatting import (
    MISSING,
    format_duration,
    format_number,
    format_si,
    pluralize,
)
from minillama.training.stability import COLLAPSE_MARGIN

_MAX_DATA_BYTES = 900_000
"""With plotly.js this makes a page below 3 MB."""
_HERE = Path(__file__).parent

CAPTIONS = {
    "loss-rate": (
        "Loss against learning rate",
        "Each mark is the loss of one run on the whole validation split at its end; lines join the "
        "means over seeds. A cross is a run that failed: at its loss if it collapsed, at the upper "
        "edge if it diverged. An open ring is a run that was still falling (undertrained).",
    ),
    "loss-step": (
        "Loss against step",
        f"Lines: the training loss, a mean over the last 1/{SMOOTHED_SHARE} of the run. With "
        f"{SEEDS_FOR_BAND} seeds or more they are means over the seeds, and shaded is the 95% t "
        "interval of the mean; with fewer, faint lines are the loss of each step. Marks: "
        "validation loss. Drag to zoom, double-click to reset.",
    ),
    "difference-step": (
        "Difference against step",
        "Training loss minus that of the baseline at the same learning rate and seed, which saw "
        "the same batches. Shaded: the 95% t interval of the mean, at each step by itself.",
    ),
    "gradient-step": (
        "Gradient norm against step",
        "Before clipping, which hides instability: a run may end at a good loss although most of "
        "its steps were clipped.",
    ),
    "layer-residual_rms": (
        "Residual stream by depth",
        "At each run's last probe. In a stream that grows without bound, the outputs of later "
        "layers are lost.",
    ),
    "layer-attention_logit_max": (
        "Attention logits by depth",
        "The largest unmasked one. Very large logits saturate the softmax: one winner and no "
        "gradient.",
    ),
    "layer-kurtosis": (
        "Kurtosis by depth",
        "1: all features are equally large. The width of the model: a single feature dominates.",
    ),
    "layer-update_ratio": (
        "Update size by depth",
        "Norm of one update divided by the norm of the parameters.",
    ),
    "layer-saturation": (
        "Saturation by depth",
        "Share of the features with |α·x| above 2, which DyT and Derf squash nearly flat. Layers "
        "without any are not drawn.",
    ),
    "differences": (
        "Differences paired by seed",
        "Small marks: one seed each. Large: their mean with its 95% t interval. Shaded: the margin "
        "within which two losses count as equal.",
    ),
}
_DASHES = {"solid": "", "dash": "6 3", "dot": "2 3", "dashdot": "6 3 2 3", "longdash": "9 3"}
_SYMBOLS = {
    "circle": '<circle cx="17" cy="7" r="4"/>',
    "square": '<rect x="13" y="3" width="8" height="8"/>',
    "diamond": '<path d="M17 1.5 22.5 7 17 12.5 11.5 7Z"/>',
    "triangle-up": '<path d="M17 2 22 11H12Z"/>',
    "pentagon": '<path d="M17 2 22 5.8 20 11.5H14L12 5.8Z"/>',
    "star": '<path d="M17 1 18.6 5.2 23 5.4 19.5 8.2 20.8 12.5 17 10 13.2 12.5 14.5 8.2 11 5.4'
    ' 15.4 5.2Z"/>',
    "hexagon": '<path d="M14 2.5H20L23 7 20 11.5H14L11 7Z"/>',
}


def render(results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]) -> str:
    """Return the whole page as HTML."""
    data, payload = _data_within_size(results, arms, comparisons)
    config_file = "ablation.yaml" if results.is_ablation else "config.yaml"
    config = (results.folder / config_file).read_text(encoding="utf-8")
    rows = fate_rows(arms)
    template = _environment().get_template("page.html")
    return template.render(
        results=results,
        kind="ablation" if results.is_ablation else "training run",
        headline=prose.headline(results, arms, comparisons),
        quotable=quote.quotable(results, arms, comparisons),
        findings=prose.findings(results, arms, comparisons),
        cautions=prose.cautions(results, arms),
        facts=_facts(results),
        arms=arms,
        fates=[row for row in rows if row.is_notable],
        n_unremarkable=sum(row.n for row in rows if not row.is_notable),
        failed_in_all=failed_in_all(rows),
        sensitivities=sensitivity_rows(arms),
        costs=costs(arms),
        workers=sorted({session.workers for session in results.sessions}),
        means={c.arm: c.mean for c in comparisons},
        sample=None if results.is_ablation else results.runs[0].summary.get("sample"),
        styles=arm_styles(results.arms),
        figures=[
            {
                "id": figure["id"],
                "by_layer": figure["id"].startswith("layer-"),
                "last": figure["id"] == "differences",
            }
            for figure in data["figures"]
        ],
        rates=data["rates"],
        pairs=[c for c in comparisons if len(c.seeds) > 1],
        rows=[(run, table_row(run, results.folder)) for run in results.runs],
        small_print=_small_print(results, arms),
        config=config,
        config_hash=hashlib.sha256(config.encode()).hexdigest(),
        data=payload,
    )


def template_environment(folder: Path) -> Environment:
    """Return what renders the templates in ``folder``, all text in them escaped."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _packed(code: str) -> str:
    """Return a script compressed by gzip, in base64; the same bytes every time."""
    return base64.b64encode(gzip.compress(code.encode(), mtime=0)).decode()


def _environment() -> Environment:
    environment = template_environment(_HERE)
    environment.filters.update(
        number=format_number,
        p_value=format_p_value,
        si=format_si,
        is_finite=math.isfinite,
        rate=lambda lr: f"{lr:g}" if math.isfinite(lr) else MISSING,
        whole=lambda n: f"{n:,.0f}" if math.isfinite(n) else MISSING,
        basin=_format_basin,
        filled=_format_entry,
    )
    environment.globals.update(
        css=(_HERE / "page.css").read_text(encoding="utf-8"),
        js=(_HERE / "page.js").read_text(encoding="utf-8"),
        plotly=_packed(get_plotlyjs()),
        captions=CAPTIONS,
        dashes=_DASHES,
        symbols=_SYMBOLS,
        interval=format_interval,
        alpha=ALPHA,
        line_shifts=LINE_SHIFTS,
        collapse_margin=COLLAPSE_MARGIN,
        rank_depth=RANK_DEPTH,
        min_pairs=MIN_PAIRS_FOR_SIGN_FLIP,
        nan=math.nan,
    )
    return environment


def _format_basin(basin: Basin | None) -> str:
    if basin is None:
        return MISSING
    return f"{'≥ ' if basin.is_open else ''}{basin.width:.2f}"


def _format_entry(value: Any, form: str) -> str:
    return MISSING if value is None else "∞" if value == math.inf else form.format(value)


def _data_within_size(
    results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]
) -> tuple[dict[str, Any], str]:
    """Return the figures' data, also as JSON, with so few points that the page is small enough."""
    points = 40_000
    while True:
        data = page_data(results.of_grid(), arms, comparisons, points)
        payload = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        if len(payload) < _MAX_DATA_BYTES or points < len(results.runs):
            return data, payload
        points //= 2


def _facts(results: Results) -> list[tuple[str, str]]:
    ended = [run for run in results.runs if run.ended]
    facts = []
    if results.is_ablation:
        total = len(results.runs) + len(results.missing)
        grid = (
            pluralize(len(results.arms), "arm"),
            pluralize(len(results.lrs), "rate"),
            pluralize(len(results.seeds), "seed"),
        )
        facts += [("runs ended", f"{len(ended)} of {total}"), ("grid", " × ".join(grid))]
    if results.plan:
        n_seeds, rates = len(results.plan.seeds[: results.plan.n_run]), results.plan.rates
        n_rates = sum(map(len, rates.values()))
        fresh = f"{pluralize(n_rates, 'rate')} × {pluralize(n_seeds, 'seed')}"
        facts.append(("fresh seeds", fresh))
    sizes = sorted({int(run.figure("n_params")) for run in ended if run.has_figure("n_params")})
    if sizes:
        span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        facts.append(("parameters", span))
    steps = [int(run.figure("steps")) for run in ended if run.has_figure("steps")]
    if steps:
        facts.append(("steps", f"{max(steps):,}"))
    return [
        *facts,
        ("tokens in all", format_si(sum(run.figure("tokens") for run in ended))),
        ("training time in all", format_duration(sum(run.figure("seconds") for run in ended))),
    ]


def _small_print(results: Results, arms: Sequence[ArmResult]) -> list[tuple[str, str]]:
    ended = [run for run in results.runs if run.ended]
    seeds = ", ".join(str(seed) for seed in results.seeds)
    rates = ", ".join(f"{lr:g}" for lr in results.lrs)
    of_ablation = [
        ("equal start", prose.equal_start(results)),
        ("seeds", how_compared(results)),
        ("S", prose.SENSITIVITY_MEANING),
        ("basin", prose.BASIN_MEANING),
        ("margin", quote.margin_meaning(results, arms)),
    ]
    n_tokens = _distinct(ended, "n_val_tokens")
    validation = f"{prose.VALIDATION_MEANING} {n_tokens + ' tokens' if n_tokens else ''}".rstrip()
    return [
        *(of_ablation if results.is_ablation else []),
        ("learning rates", f"{rates}; seeds of the grid: {seeds}"),
        ("fates", prose.FATES_MEANING),
        ("spikes", prose.SPIKES_MEANING),
        ("validation", validation),
        ("time", prose.where_time_went(results) if results.is_ablation else ""),
        ("made with", "; ".join(_versions(ended))),
        ("threads per run", _distinct(ended, "threads")),
        ("device", _distinct(ended, "device")),
        ("machine", _distinct(ended, "machine")),
        ("repeat with", quote.command(results.folder, results)),
    ]


def _distinct(runs: Sequence[Run], key: str) -> str:
    """Return the different values of an entry of the summaries, joined by commas."""
    values = {json.dumps(run.summary[key]) for run in runs if run.summary.get(key) is not None}
    return ", ".join(sorted(value.strip('"') for value in values))


def _versions(runs: Sequence[Run]) -> list[str]:
    found = {
        ", ".join(f"{name} {version}" for name, version in run.summary["versions"].items())
        for run in runs
        if isinstance(run.summary.get("versions"), dict)
    }
    return sorted(found)
