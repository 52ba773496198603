"""The lines to quote from a report: the claim with its conditions, and all findings as Markdown."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minillama.ablation.analysis import ArmResult, Comparison
from minillama.ablation.failures import FAILED
from minillama.ablation.report import prose
from minillama.ablation.report.wording import format_interval
from minillama.ablation.results import Results
from minillama.formatting import format_number, format_si, join_words, pluralize


def quotable(results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]) -> str:
    """Return the claim, its intervals, its conditions and the command; empty without a claim.

    With many arms the intervals are in the table of pairs, and the line says so.
    """
    pairs = [c for c in comparisons if len(c.seeds) > 1]
    if not pairs:
        return ""
    short = prose.short_names([arm.name for arm in arms])
    claim = prose.headline(results, arms, comparisons)
    if len(pairs) <= prose.MOST_NAMED:
        parts = [
            f"{short[c.arm]} − {short[c.baseline]} {format_number(c.mean)} nats per token "
            f"({format_interval(c.t95.low, c.t95.high)})"
            for c in pairs
        ]
        adjusted = ", not adjusted for their number" if len(parts) > 1 else ""
        claim += f" Difference and its 95% t interval{adjusted}: {'; '.join(parts)}."
    # Without the folder's own path, which says nothing on another machine.
    return f"{claim} Conditions: {conditions(results)}. `{command(results.folder.name, results)}`"


def conditions(results: Results) -> str:
    """Return the model's size, the tokens, the text, the seeds and how the rates were chosen."""
    ended = [run for run in results.runs if run.ended]
    parts = []
    for key, unit in (("n_params", "parameters"), ("tokens", "training tokens")):
        values = [run.figure(key) for run in ended if run.figure(key) > 0]
        if values:
            least, most = format_si(min(values)), format_si(max(values))
            parts.append(f"{least if least == most else f'{least} to {most}'} {unit}")
    sources = {run.config.get("data", {}).get("source", {}).get("kind") for run in ended}
    if texts := sorted(str(source) for source in sources if source):
        parts.append(f"text {join_words(texts)}")
    plan = results.plan
    n_seeds = (plan.n_run or len(plan.seeds)) if plan else len(results.seeds)
    parts.append(pluralize(n_seeds, "fresh seed" if plan else "seed"))
    rates = [f"{lr:g}" for lr in results.lrs]
    if len(rates) == 1:
        parts.append(f"learning rate {rates[0]}")
    else:
        parts.append(
            f"each arm at its own best of {len(rates)} learning rates ({rates[0]} to {rates[-1]}), "
            + (
                f"chosen on {pluralize(len(plan.grid_seeds), 'other seed')}"
                if plan
                else "chosen on the runs that are compared"
            )
        )
    return ", ".join(parts)


def command(folder: str | Path, results: Results) -> str:
    """Return the command that repeats the experiment, which lies in ``folder``."""
    name = "ablation" if results.is_ablation else "config"
    verb = "ablate" if results.is_ablation else "train"
    path = Path(folder) / f"{name}.yaml"
    return shlex.join(("minillama", verb, str(path), "out_dir=NEW_FOLDER"))


def margin_in_steps(results: Results, arms: Sequence[ArmResult]) -> float:
    """Return the share of more steps that lowers the baseline's loss by the margin; NaN if unknown.

    From the slope of its training loss against the logarithm of the step, by least squares over the
    second half of its runs at the best learning rate.  The mean of all baselines is taken.
    """
    slopes = []
    for arm in arms:
        for run in arm.runs:
            if arm.name == arm.baseline and run.lr == arm.best_lr and run.fate == "ok":
                late = run.curves.steps > run.figure("steps") / 2
                late &= np.isfinite(run.curves.loss)
                if late.sum() >= 10:
                    x, y = np.log(run.curves.steps[late]), run.curves.loss[late]
                    slopes.append(float(np.polyfit(x, y, 1)[0]))
    slope = float(np.mean(slopes)) if slopes else math.nan
    return math.expm1(results.margin / -slope) if slope < 0 else math.nan


def margin_meaning(results: Results, arms: Sequence[ArmResult]) -> str:
    """Explain the margin in steps of training, where the curves allow it."""
    share = margin_in_steps(results, arms)
    text = f"±{results.margin:g} nats per token: within it two losses count as the same."
    if math.isfinite(share):
        text += (
            f" About what {share:.0%} more steps are worth to the baseline: the slope of its "
            "training loss against the logarithm of the step, over the second half of its runs at "
            "its best learning rate."
        )
    return text


def findings_markdown(
    results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]
) -> str:
    """Return ``findings.md``: plain lines made from the results, the same for the same results."""
    lines = [
        f"# {results.name}: findings",
        "",
        quotable(results, arms, comparisons) or prose.headline(results, arms, comparisons),
        "",
        *(f"- {finding}" for finding in prose.findings(results, arms, comparisons)),
        f"- Margin: {margin_meaning(results, arms)}",
        "",
        "| arm | best LR | loss, mean ± standard deviation over seeds | S, plain | failed |",
        "|---|---|---|---|---|",
        *map(_table_row, arms),
    ]
    cautions = [f"- {caution}" for caution in prose.cautions(results, arms)]
    lines += ["", "Before you rely on this:", "", *cautions] if cautions else []
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ") + "\n"


def _table_row(arm: ArmResult) -> str:
    loss = format_number(arm.best_loss)
    if math.isfinite(arm.best_sd):
        loss += f" ± {format_number(arm.best_sd)}"
    failed = sum(arm.fates[fate] for fate in FAILED)
    ended = sum(run.ended for run in arm.grid_runs)
    plain = format_number(arm.mean_sensitivity()[0])
    name = arm.name.replace("|", r"\|")
    return f"| {name} | {arm.best_lr:g} | {loss} | {plain} | {failed} of {ended} |"
