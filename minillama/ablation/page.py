"""The report as one HTML page: no network, no file beside it; every name in it is escaped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from minillama.ablation.analysis import ArmResult, Comparison
from minillama.ablation.drawing import ArmStyle, arm_styles
from minillama.ablation.figures import page_data
from minillama.ablation.names import short_names
from minillama.ablation.results import Results, Run
from minillama.ablation.tables import (
    arm_table,
    comparison_table,
    duration,
    escape,
    known,
    run_table,
    short,
    swatch,
)
from minillama.ablation.times import where_time_went
from minillama.ablation.verdict import cautions, count, equal_start, findings, headline

_MOST_BYTES = 900_000
"""Of the figures' data: with plotly.js it makes a page below 6 MB."""
_HERE = Path(__file__).parent
_NO_NETWORK = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)

CAPTIONS = {
    "loss-rate": (
        "Loss against learning rate",
        "Each mark is one run's loss on the whole validation split at its end; lines join the "
        "means over seeds. A cross is a run that failed: at its loss if it collapsed, on the upper "
        "edge if it diverged.",
    ),
    "loss-step": (
        "Loss against step",
        "Faint: the training loss of each step. Strong: its mean over the last fiftieth of the "
        "run. Marks: validation loss. Drag to zoom, double-click to return.",
    ),
    "gradient-step": (
        "Gradient norm against step",
        "Before clipping, which hides instability: a run may end at a good loss and still have "
        "lived on its clip.",
    ),
    "layer-residual_rms": (
        "Residual stream by depth",
        "At each run's last probe. A stream that grows without bound drowns what later layers add.",
    ),
    "layer-attention_logit_max": (
        "Attention logits by depth",
        "The largest unmasked one. Very large ones leave the softmax one winner and no gradient.",
    ),
    "layer-kurtosis": (
        "Kurtosis by depth",
        "1: all features equally large. The model's width: one feature has everything.",
    ),
    "layer-update_ratio": (
        "Update size by depth",
        "Length of one step over the length of the parameters it moves.",
    ),
    "differences": (
        "Differences paired by seed",
        "Small marks: one seed each. Large: their mean with its 95% t interval. Shaded: the margin "
        "within which two losses count as the same.",
    ),
}


def render(results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]) -> str:
    """Return the whole page."""
    data, payload = _data_within_size(results, arms, comparisons)
    styles = arm_styles(results.arms)
    kind = "ablation" if results.is_ablation else "training run"
    body = [
        f'<header><p class="kicker">minillama {kind}</p><h1>{escape(results.name)}</h1></header>',
        _verdict(results, arms, comparisons),
        _cautions(results, arms),
        _facts(results),
        arm_table(arms, styles, comparisons) if results.is_ablation else "",
        _sample(results),
        _bar(results, styles, data),
        _figures([figure["id"] for figure in data["figures"]]),
        comparison_table(comparisons, results.margin),
        run_table(results, styles),
        _small_print(results),
        _config(results),
    ]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">
<title>{escape(results.name)} · minillama {kind}</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<main>
{"".join(part for part in body if part)}
</main>
<script id="data" type="application/json">{payload}</script>
<script>{get_plotlyjs()}</script>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _data_within_size(
    results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]
) -> tuple[dict[str, Any], str]:
    """Return the figures' data, as it is and as JSON, thinned until the page is small enough."""
    points = 40_000
    while True:
        data = page_data(results, arms, comparisons, points)
        payload = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        if len(payload) < _MOST_BYTES or points < len(results.runs):
            return data, payload
        points //= 2


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


# --------------------------------------------------------------------------------- head of the page


def _verdict(results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]) -> str:
    found = findings(results, arms, comparisons)
    more = _list(found) if found else ""
    said = escape(headline(results, arms, comparisons))
    return f'<section class="verdict"><strong>{said}</strong>{more}</section>'


def _cautions(results: Results, arms: Sequence[ArmResult]) -> str:
    found = cautions(results, arms)
    if not found:
        return ""
    return f'<section class="cautions"><h2>Before you rely on this</h2>{_list(found)}</section>'


def _facts(results: Results) -> str:
    ended = [run for run in results.runs if run.ended]
    tokens = sum(run.figure("tokens") for run in ended)
    seconds = sum(run.figure("seconds") for run in ended)
    facts = []
    if results.is_ablation:
        total = len(results.runs) + len(results.missing)
        facts.append(("runs ended", f"{len(ended)} of {total}"))
        facts.append(
            (
                "grid",
                f"{count(len(results.arms), 'arm')} × {count(len(results.lrs), 'rate')} × "
                f"{count(len(results.seeds), 'seed')}",
            )
        )
    sizes = sorted({int(run.figure("n_params")) for run in ended if known(run, "n_params")})
    if sizes:
        span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        facts.append(("parameters", span))
    steps = sorted({int(run.figure("steps")) for run in ended if known(run, "steps")})
    if steps:
        facts.append(("steps", f"{steps[-1]:,}"))
    facts += [("tokens in all", short(tokens)), ("training time in all", duration(seconds))]
    parts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    return f'<dl class="facts">{parts}</dl>'


# ----------------------------------------------------------------------------- figures and the rest


def _bar(results: Results, styles: Mapping[str, ArmStyle], data: Mapping[str, Any]) -> str:
    """Return the buttons that hide an arm in every figure, and the choice of a learning rate."""
    if not data["figures"]:
        return ""
    if len(results.arms) == 1 and len(data["rates"]) == 1:
        return "<h2>Figures</h2>"
    names = short_names(results.arms)
    buttons = "".join(
        f'<button type="button" data-arm="{i}" aria-pressed="true" title="{escape(arm)}">'
        f"{swatch(styles[arm])}<span>{escape(names[arm])}</span></button>"
        for i, arm in enumerate(results.arms)
    )
    rates = ""
    if len(data["rates"]) > 1:
        options = "".join(f'<option value="{rate}">{rate}</option>' for rate in data["rates"])
        rates = (
            '<label class="rates">curves at learning rate<select id="rate">'
            f'<option value="best">each arm\'s best</option>{options}'
            '<option value="all">all</option></select></label>'
        )
    return (
        "<h2>Figures</h2>"
        f'<nav class="bar" aria-label="what the figures show">{buttons}{rates}</nav>'
        "<noscript><p>The figures need JavaScript; report.png beside this file does not.</p>"
        "</noscript>"
    )


def _figures(names: Sequence[str]) -> str:
    """Return the figures in order; those by layer stand two beside each other."""
    layers = [name for name in names if name.startswith("layer-")]
    before = [name for name in names if name not in layers and name != "differences"]
    after = [name for name in names if name == "differences"]
    pair = f'<div class="pair">{"".join(map(_figure, layers))}</div>' if layers else ""
    return "".join(map(_figure, before)) + pair + "".join(map(_figure, after))


def _figure(name: str) -> str:
    title, caption = CAPTIONS[name]
    return (
        f"<figure><h3>{title}</h3><figcaption>{caption}</figcaption>"
        f'<div class="plot" id="{name}" role="img" aria-label="{title}"></div></figure>'
    )


def _small_print(results: Results) -> str:
    ended = [run for run in results.runs if run.ended]
    seeds = ", ".join(str(seed) for seed in results.seeds)
    rates = ", ".join(f"{lr:g}" for lr in results.lrs)
    of_ablation = [
        ("equal start", equal_start(results)),
        ("S", _S_MEANS),
        ("basin", _BASIN_MEANS),
    ]
    rows = [
        *(of_ablation if results.is_ablation else []),
        ("learning rates", f"{rates}; seeds {seeds}"),
        ("fates", _FATES_MEAN),
        ("spikes", _SPIKES_MEAN),
        ("validation", f"{_VALIDATION_MEANS} {_values(ended, 'n_val_tokens', 'tokens')}".rstrip()),
        ("time", where_time_went(results) if results.is_ablation else ""),
        ("made with", "; ".join(_versions(ended))),
        ("threads a run", _values(ended, "threads")),
        ("device", _values(ended, "device")),
        ("machine", _values(ended, "machine")),
        ("made again by", _command(results)),
    ]
    shown = [(name, text) for name, text in rows if text]
    parts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in shown)
    return f'<h2>Small print</h2><dl class="small">{parts}</dl>'


_S_MEANS = (
    "LR sensitivity: the mean over the grid of min(ℓ, ℓ₀), less the grid's best; ℓ is a run's "
    "final validation loss, ℓ₀ its arm's loss at init, which a diverged run counts as. Plain: the "
    "mean of the points. Trapezoid: over log learning rate. It depends on the grid."
)
_BASIN_MEANS = (
    "the width in log₁₀ of the learning rates around the best whose loss is within 0.1 nats of it, "
    "linear between grid points; ≥ where it reaches the grid's edge."
)
_FATES_MEAN = (
    "diverged: the loss or a gradient was not finite, or the final loss is no lower than at init. "
    "Collapsed: the final loss is not 0.1 nats below the corpus's unigram entropy, so the model "
    "knows little more than how often each token comes."
)
_SPIKES_MEAN = (
    "the share of steps whose loss or gradient norm exceeds the mean of the previous 128 values by "
    "6 of their standard deviations; a value that is not finite is one."
)


_VALIDATION_MEANS = "the whole held-out split, once, at the end of each run."


def _sample(results: Results) -> str:
    """Return what a single run wrote at its end."""
    text = results.runs[0].summary.get("sample") if results.runs else None
    if results.is_ablation or not text:
        return ""
    return f"<h2>What it wrote</h2><pre><code>{escape(text)}</code></pre>"


def _values(runs: Sequence[Run], key: str, unit: str = "") -> str:
    values = {json.dumps(run.summary[key]) for run in runs if run.summary.get(key) is not None}
    text = ", ".join(sorted(value.strip('"') for value in values))
    return f"{text} {unit}".rstrip() if text else ""


def _versions(runs: Sequence[Run]) -> list[str]:
    found = {
        ", ".join(f"{name} {version}" for name, version in run.summary["versions"].items())
        for run in runs
        if isinstance(run.summary.get("versions"), dict)
    }
    return sorted(found)


def _command(results: Results) -> str:
    if results.is_ablation:
        return f"minillama ablate {results.folder / 'ablation.yaml'} out_dir=NEW_FOLDER"
    return f"minillama train {results.folder / 'config.yaml'} out_dir=NEW_FOLDER"


def _config(results: Results) -> str:
    path = results.folder / ("ablation.yaml" if results.is_ablation else "config.yaml")
    text = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    return (
        f"<details><summary>The config (sha256 {digest[:16]})</summary>"
        f"<pre><code>{escape(text)}</code></pre></details>"
    )
