"""The report's words: what the numbers say, no more, and what stands against it.

All text here is plain; whoever puts it on a page escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minillama.ablation.analysis import ArmResult, Comparison
from minillama.ablation.names import short_names
from minillama.ablation.results import Results, Run
from minillama.ablation.statistics import MIN_PAIRS_FOR_SIGN_FLIP

ALPHA = 0.05
FAILED = ("diverged", "collapsed")
PROTOCOL_LRS = 6
PROTOCOL_SEEDS = 3
PROTOCOL_BEST_SEEDS = 5
MOST_NAMED = 4
"""So many arms are named in the headline; the findings below it name all."""


def number(value: float, digits: int = 3) -> str:
    """Write a number with a true minus; a dash where there is none."""
    if not math.isfinite(value):
        return "∞" if value == math.inf else "–"
    return f"{value:.{digits}f}".replace("-", "−")


def p_value(p: float) -> str:
    """Write a p value with its relation, as in ``p = .031``."""
    if math.isnan(p):
        return "p unknown"
    text = "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".", 1)
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def count(n: int, noun: str) -> str:
    """Write a number of things, as in ``3 seeds``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def some(arms: Sequence[str]) -> str:
    """Join the first names, and say how many more there are where they would be a wall of text.

    Names that hold commas themselves are set apart by semicolons.
    """
    more = len(arms) - MOST_NAMED
    named = [*arms] if more <= 0 else [*arms[:MOST_NAMED], f"{more} more"]
    if len(named) < 2 or not any("," in name for name in named):
        return listed(named)
    return f"{'; '.join(named[:-1])}; and {named[-1]}"


def listed(words: Iterable[str]) -> str:
    """Join words as prose does."""
    *most, last = list(words)
    return f"{', '.join(most)} and {last}" if most else last


# ------------------------------------------------------------------------------------- the verdict


def headline(results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]) -> str:
    """Say the whole in a sentence, and in a second one which arms failed, if any did."""
    if not results.is_ablation:
        return _of_one_run(results.runs[0])
    short = short_names([arm.name for arm in arms])
    counts = [(sum(arm.fates[fate] for fate in FAILED), len(arm.runs), arm) for arm in arms]
    counts = sorted((c for c in counts if c[0]), key=lambda c: c[0] / c[1], reverse=True)
    failed = [f"{short[arm.name]} ({n} of {n_runs})" for n, n_runs, arm in counts]
    text = _of_losses(results, comparisons, short)
    return f"{text} Runs failed in {some(failed)}." if failed else text


def _of_losses(
    results: Results, comparisons: Sequence[Comparison], short: Mapping[str, str]
) -> str:
    if not any(run.ended for run in results.runs):
        return "No run has ended yet: there is nothing to say."
    if len(results.arms) == 1:
        return "One arm: this shows how it takes its learning rate, and compares it with nothing."
    if not comparisons:
        return "No arm can be compared with its baseline yet: they share no finished seed."
    if all(len(c.seeds) == 1 for c in comparisons):
        return "One seed proves nothing: no difference in loss shown here can be told from chance."
    apart = [c for c in comparisons if c.p_holm < ALPHA]
    same = [c for c in comparisons if c.same_holm < ALPHA]
    if not apart and len(same) == len(comparisons):
        arms_named = some([short[c.arm] for c in comparisons])
        return f"As good as its baseline within ±{results.margin:g} nats: {arms_named}."
    if not apart:
        return "Not separable: with these seeds no arm's best loss can be told from its baseline's."
    by_size = sorted(apart, key=lambda c: abs(c.mean), reverse=True)
    lower = [short[c.arm] for c in by_size if c.mean < 0]
    higher = [short[c.arm] for c in by_size if c.mean > 0]
    parts = [f"lower loss than its baseline: {some(lower)}"] if lower else []
    parts += [f"higher loss than its baseline: {some(higher)}"] if higher else []
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]} (each at its own best learning rate)."


def findings(
    results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]
) -> list[str]:
    """Say in a sentence each what was found: losses arm by arm, failures, sensitivity."""
    out = [of_comparison(c, results.margin) for c in comparisons]
    if results.is_ablation:
        out += [text for text in (_of_failures(arms), _of_sensitivity(arms, comparisons)) if text]
    return out


def of_comparison(c: Comparison, margin: float) -> str:
    """Say how an arm stands to its baseline at their best learning rates."""
    n = len(c.seeds)
    where = (
        f"at learning rate {c.lr:g}"
        if c.lr == c.baseline_lr
        else f"at their best learning rates ({c.lr:g} and {c.baseline_lr:g})"
    )
    side = "below" if c.mean < 0 else "above"
    gap = f"{number(abs(c.mean))} nats {side} {c.baseline}"
    if n == 1:
        return f"{c.arm} ended {gap} {where}, with one seed: another seed may turn this round."
    evidence = (
        f"95% interval {number(c.t95.low)} to {number(c.t95.high)}, {count(n, 'seed')}, "
        f"{p_value(c.p_holm)}"
    )
    few = (
        f" A sign-flip test, which assumes less, cannot reach p < .05 with fewer than "
        f"{MIN_PAIRS_FOR_SIGN_FLIP} pairs."
        if n < MIN_PAIRS_FOR_SIGN_FLIP
        else f" The sign-flip test gives {p_value(c.p_sign)}."
    )
    same = c.same_holm < ALPHA
    if c.p_holm < ALPHA:
        small = f" Still, the two are equivalent within ±{margin:g}." if same else ""
        return f"{c.arm} ended {gap} {where} ({evidence}).{small}{few}"
    if same:
        return (
            f"{c.arm} and {c.baseline} are equivalent within ±{margin:g} nats {where}: the 90% "
            f"interval of the difference, {number(c.t90.low)} to {number(c.t90.high)}, lies inside "
            f"({count(n, 'seed')}, equivalence {p_value(c.same_holm)})."
        )
    return (
        f"{c.arm} and {c.baseline} cannot be told apart {where}, nor shown equivalent within "
        f"±{margin:g} nats ({evidence}); more seeds would narrow the interval."
    )


def _of_one_run(run: Run) -> str:
    loss, start = run.figure("val_loss"), run.figure("init_val_loss")
    steps = count(int(run.figure("steps")), "step") if run.summary else "no step recorded"
    if run.fate == "unfinished":
        return f"This run has not finished ({len(run.curves.steps)} training steps logged so far)."
    if not math.isfinite(loss):
        return f"This run ended as {run.fate} after {steps}; it has no validation loss."
    return (
        f"Validation loss {number(loss)} nats a token after {steps}, from {number(start)} at the "
        f"start ({run.fate}). One run compares nothing."
    )


def _of_failures(arms: Sequence[ArmResult]) -> str:
    parts = []
    for arm in arms:
        for fate in ("diverged", "collapsed", "crashed"):
            failed = [run for run in arm.runs if run.fate == fate]
            if failed:
                rates = listed(f"{lr:g}" for lr in sorted({run.lr for run in failed}))
                parts.append(f"{len(failed)} of {arm.name}'s {len(arm.runs)} {fate} (at {rates})")
    ended = sum(run.ended for arm in arms for run in arm.runs)
    if not parts:
        return f"Of {count(ended, 'run')} that ended, none diverged or collapsed." if ended else ""
    return f"Failures: {'; '.join(parts)}."


def _of_sensitivity(arms: Sequence[ArmResult], comparisons: Sequence[Comparison]) -> str:
    known = [arm for arm in arms if arm.sensitivity]
    if not known:
        return ""
    values = listed(f"{number(arm.mean_sensitivity()[0])} for {arm.name}" for arm in known)
    text = f"LR sensitivity S over this grid (plain mean; lower is steadier): {values}."
    paired = [c for c in comparisons if not math.isnan(c.s_t95.low)]
    if not paired:
        return f"{text} From one seed, so differences in it are unproven."
    apart = [c.arm for c in paired if c.s_t95.excludes(0)]
    rest = [c.arm for c in paired if not c.s_t95.excludes(0)]
    parts = [f"excludes zero for {listed(apart)}"] if apart else []
    parts += [f"includes zero for {listed(rest)}"] if rest else []
    return f"{text} The 95% interval of its difference to the baseline {'; it '.join(parts)}."


# ------------------------------------------------------------------------------------ the cautions


def cautions(results: Results, arms: Sequence[ArmResult]) -> list[str]:
    """Return what stands against the verdict: gaps, edges, a short protocol, unequal conditions."""
    if not results.is_ablation:
        return []
    out = []
    for arm in arms:
        if arm.edge and any(run.ended for run in arm.runs):
            out.append(
                f"{arm.name}'s best learning rate, {arm.best_lr:g}, is the {arm.edge} of the grid: "
                "its real best may lie beyond, so extend the grid before comparing it."
            )
    out += _of_gaps(results)
    if len(results.lrs) < PROTOCOL_LRS:
        out.append(
            f"{count(len(results.lrs), 'learning rate')}: a sound comparison takes at least "
            f"{PROTOCOL_LRS}, half a decade apart."
        )
    if len(results.seeds) < PROTOCOL_SEEDS:
        out.append(
            f"{count(len(results.seeds), 'seed')}: a sound comparison takes at least "
            f"{PROTOCOL_SEEDS} everywhere and {PROTOCOL_BEST_SEEDS} at each arm's best rate."
        )
    return out + _of_conditions(results)


def _of_gaps(results: Results) -> list[str]:
    out = []
    if results.missing:
        out.append(f"{count(len(results.missing), 'cell')} of the grid not run yet.")
    unfinished = [run for run in results.runs if run.fate == "unfinished"]
    if unfinished:
        out.append(f"{count(len(unfinished), 'cell')} not finished; left out of every number.")
    for run in results.runs:
        if run.fate == "crashed":
            out.append(
                f"{run.arm} at {run.lr:g}, seed {run.seed}, crashed and is left out of every "
                f"number: {run.error or 'no message'}"
            )
    return out


def equal_start(results: Results) -> str:
    """Say whether the arms of each seed saw the same batches and began from the same weights."""
    batches = _unequal(results.runs, "data_hash")
    weights = _unequal(results.runs, "weights_hash")
    if batches is None or weights is None:
        return "The runs do not record hashes of their batches and starting weights."
    if not batches and not weights:
        return (
            "With each seed, every arm saw the same batches and began from the same weights, norms "
            "aside (hashes equal)."
        )
    return ""


def _unequal(runs: Sequence[Run], key: str) -> list[int] | None:
    """Return the seeds whose runs differ in a figure, or None if it is not recorded."""
    seen: dict[int, set[Any]] = {}
    for run in runs:
        if run.ended:
            seen.setdefault(run.seed, set()).add(run.summary.get(key))
    if not seen or any(None in values for values in seen.values()):
        return None
    return sorted(seed for seed, values in seen.items() if len(values) > 1)


def _of_conditions(results: Results) -> list[str]:
    out = []
    for key, what in (
        ("data_hash", "the same batches"),
        ("weights_hash", "the same starting weights (norms aside)"),
    ):
        seeds = _unequal(results.runs, key)
        if seeds:
            named = listed(str(seed) for seed in seeds)
            out.append(f"Not all arms had {what}: the hashes differ with seed {named}.")
    trained = [run for run in results.runs if run.fate in ("ok", "collapsed")]
    tokens = {run.figure("tokens") for run in trained}
    if len(tokens) > 1:
        out.append(
            f"The runs did not train on equally many tokens ({min(tokens):,.0f} to "
            f"{max(tokens):,.0f})."
        )
    for key, what in (
        ("versions", "versions"),
        ("threads", "thread counts"),
        ("device", "devices"),
    ):
        if len({repr(run.summary.get(key)) for run in trained}) > 1:
            out.append(f"The runs were made with different {what}.")
    return out
