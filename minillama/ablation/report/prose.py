"""The report's sentences: what the numbers show, no more, and what limits it.

All text here is plain; the page escapes it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from minillama.ablation.analysis import ArmResult, Comparison
from minillama.ablation.failures import FAILED, compare_failures
from minillama.ablation.interactions import compare_over_axes
from minillama.ablation.measures import BASIN_DEPTH
from minillama.ablation.report.cost import costs
from minillama.ablation.report.fates import LINE_SHIFTS, failed_in_all, fate_rows
from minillama.ablation.report.hypotheses import hypothesis_sentences
from minillama.ablation.report.inference import (
    failure_rates,
    interaction_sentences,
    only_unadjusted,
)
from minillama.ablation.report.sensitivity import RANK_DEPTH, sensitivity_rows
from minillama.ablation.report.stages import better_neighbors, how_compared
from minillama.ablation.report.wording import format_interval, format_p_value
from minillama.ablation.results import ENDED, TRAINED, Results, Run
from minillama.ablation.statistics import ALPHA, MIN_PAIRS_FOR_SIGN_FLIP
from minillama.formatting import format_duration, format_number, join_words, pluralize
from minillama.training.stability import (
    COLLAPSE_MARGIN,
    SPIKE_SIGMAS,
    SPIKE_WINDOW,
    STILL_FALLING_SHARE,
)

PROTOCOL_LRS = 6
PROTOCOL_SEEDS = 3
PROTOCOL_BEST_SEEDS = 5
MOST_NAMED = 4
"""How many arms a sentence names; of more it says how many, and the tables name all."""


# ------------------------------------------------------------------------------------- formatting


def join_some(names: Sequence[str], n_all: int) -> str:
    """Join names, such as ``a, b and c``; of many say how many of all they are: ``7 of 15 arms``.

    Names that contain commas are separated by semicolons.
    """
    if len(names) > MOST_NAMED:
        return f"{len(names)} of {n_all} arms"
    if len(names) < 2 or not any("," in name for name in names):
        return join_words(names)
    return f"{'; '.join(names[:-1])}; and {names[-1]}"


_BETWEEN_SETTINGS = re.compile(r"\+(?=[\w.-]+=)")
"""Separates an arm's name from the value of an axis, and one such value from the next."""


def short_names(arms: Sequence[str]) -> dict[str, str]:
    """Return a short, unique name for each arm.

    ``post+model.n_layers=24+optim.grad_clip=1`` beside the same with 6 layers becomes
    ``n_layers=24``: parts that all arms share are left out, and of a dotted name only the last part
    is kept.  Less is cut where a name would become empty or two would become equal.
    """
    parts = {arm: _BETWEEN_SETTINGS.split(arm) for arm in arms}
    shared = set.intersection(*map(set, parts.values())) if len(parts) > 1 else set()
    for left_out in (shared, set[str]()):
        short = {
            arm: ", ".join(_leaf(part) for part in of_arm if part not in left_out)
            for arm, of_arm in parts.items()
        }
        if all(short.values()) and len(set(short.values())) == len(short):
            return short
    return {arm: arm for arm in arms}


def _leaf(part: str) -> str:
    name, equals, value = part.partition("=")
    return name.rpartition(".")[2] + equals + value


# ------------------------------------------------------------------------------------- the verdict


def headline(results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]) -> str:
    """Return the verdict on the losses, how many runs failed, and which are left out."""
    if not results.is_ablation:
        return _single_run(results.runs[0])
    short = short_names([arm.name for arm in arms])
    text = _losses(results, comparisons, short)
    failed = sum(arm.fates[fate] for arm in arms for fate in FAILED)
    ended = pluralize(sum(run.ended for run in results.of_grid().runs), "run")
    if failed:
        text += f" {failed} of {ended}{' of the grid' if results.plan else ''} failed."
    return text + _left_out(results)


def _left_out(results: Results) -> str:
    """Return a sentence on finished runs that the config no longer has; empty if there are none."""
    if not results.left_out:
        return ""
    reasons = [f"{reason} ({n})" for reason, n in results.left_out_reasons().items()]
    runs = pluralize(len(results.left_out), "finished run")
    verb = "is" if len(results.left_out) == 1 else "are"
    return (
        f" {runs} in this folder {verb} left out, because the config no longer has "
        f"{join_words(reasons)}."
    )


def _losses(results: Results, comparisons: Sequence[Comparison], short: Mapping[str, str]) -> str:
    if not any(run.ended for run in results.runs):
        return "No run has ended yet: there is nothing to report."
    if len(results.arms) == 1:
        return "One arm: this shows how its loss depends on the learning rate, no comparison."
    if not comparisons:
        return "No arm can be compared with its baseline yet: they share no finished seed."
    if all(len(c.seeds) == 1 for c in comparisons):
        return "One seed proves nothing: every difference in loss shown here may be chance."
    apart = [c for c in comparisons if c.p_holm < ALPHA]
    same = [c for c in comparisons if c.same_holm < ALPHA]
    if not apart and len(same) == len(comparisons):
        names = join_some([short[c.arm] for c in comparisons], len(comparisons))
        return f"As good as its baseline within ±{results.margin:g} nats per token: {names}."
    if not apart:
        return "Not separable: these seeds show no difference between an arm and its baseline."
    by_size = sorted(apart, key=lambda c: abs(c.mean), reverse=True)
    lower = [short[c.arm] for c in by_size if c.mean < 0]
    higher = [short[c.arm] for c in by_size if c.mean > 0]
    parts = [f"lower loss than its baseline: {join_some(lower, len(comparisons))}"] if lower else []
    parts += (
        [f"higher loss than its baseline: {join_some(higher, len(comparisons))}"] if higher else []
    )
    return _sentence("; ".join(parts), " (each at its own best learning rate).")


def findings(
    results: Results, arms: Sequence[ArmResult], comparisons: Sequence[Comparison]
) -> list[str]:
    """Return one sentence for each finding: the loss of each arm, failures, sensitivity."""
    if not results.is_ablation:
        return []
    out = hypothesis_sentences(results, arms)
    out += [_comparison(c, results.margin, len(comparisons)) for c in comparisons]
    out += interaction_sentences(compare_over_axes(arms))
    more = (
        how_compared(results),
        _failures(arms),
        failure_rates(compare_failures(arms)),
        _sensitivity(arms, comparisons),
        _costs(arms, comparisons),
    )
    return out + [text for text in more if text]


def _comparison(c: Comparison, margin: float, n_comparisons: int) -> str:
    """Compare an arm with its baseline at their best learning rates."""
    n = len(c.seeds)
    where = (
        f"at learning rate {c.lr:g}"
        if c.lr == c.baseline_lr
        else f"at their best learning rates ({c.lr:g} and {c.baseline_lr:g})"
    )
    side = "below" if c.mean < 0 else "above"
    gap = f"{format_number(abs(c.mean))} nats per token {side} {c.baseline}"
    if n == 1:
        return f"{c.arm} ended {gap} {where}, with one seed: another seed may reverse this."
    seeds = pluralize(n, "seed")
    interval = format_interval(c.t95.low, c.t95.high)
    evidence = f"95% interval {interval}, {seeds}, {format_p_value(c.p_holm)}"
    sign_flip = (
        f"A sign-flip test, which assumes less, cannot reach p < {ALPHA:.2f}".replace("0.", ".")
        + f" with fewer than {MIN_PAIRS_FOR_SIGN_FLIP} pairs."
        if n < MIN_PAIRS_FOR_SIGN_FLIP
        else f"The sign-flip test gives {format_p_value(c.p_sign)}."
    )
    same = c.same_holm < ALPHA
    if c.p_holm < ALPHA:
        small = f" Still, the two are equivalent within ±{margin:g}." if same else ""
        return f"{c.arm} ended {gap} {where} ({evidence}).{small} {sign_flip}"
    if same:
        return (
            f"{c.arm} and {c.baseline} are equivalent within ±{margin:g} nats per token {where}: "
            f"the 90% interval of the difference, {format_interval(c.t90.low, c.t90.high)}, lies "
            f"inside ({seeds}, equivalence {format_p_value(c.same_holm)})."
        )
    return (
        f"{c.arm} and {c.baseline} cannot be distinguished {where}, nor shown equivalent within "
        f"±{margin:g} nats per token ({evidence}); more seeds would narrow the interval."
        + only_unadjusted(c, n_comparisons)
    )


def _single_run(run: Run) -> str:
    loss, start = run.figure("val_loss"), run.figure("init_val_loss")
    steps = pluralize(int(run.figure("steps")), "step") if run.summary else "no step recorded"
    if run.fate == "unfinished":
        return f"This run has not finished ({len(run.curves.steps)} training steps logged so far)."
    if not math.isfinite(loss):
        return f"This run ended as {run.fate} after {steps}; it has no validation loss."
    return (
        f"Validation loss {format_number(loss)} nats per token after {steps}, from "
        f"{format_number(start)} at the start ({run.fate}). A single run compares nothing."
    )


def _failures(arms: Sequence[ArmResult]) -> str:
    """Count the fates of the grid's runs, and say whether the failures hang on the line."""
    fates = sum((arm.fates for arm in arms), Counter[str]())
    ended = sum(fates[fate] for fate in ENDED)
    if not ended:
        return ""
    named = [f"{fates[fate]} {fate}" for fate in (*FAILED, "undertrained") if fates[fate]]
    where = " of the grid" if any(len(arm.runs) > len(arm.grid_runs) for arm in arms) else ""
    runs = pluralize(ended, "run") + where
    text = f"Of {runs} that ended, {join_words(named) or 'none failed'}."
    at = failed_in_all(fate_rows(arms))
    if len(set(at)) > 1:
        moved = [
            f"{n} with it {abs(shift):g} {'lower' if shift < 0 else 'higher'}"
            for n, shift in zip(at, LINE_SHIFTS, strict=True)
            if shift
        ]
        text += (
            " The number that failed depends on where the line for collapsed is drawn: "
            f"{join_words(moved)}. Compare the losses rather than these counts."
        )
    return text


def _sensitivity(arms: Sequence[ArmResult], comparisons: Sequence[Comparison]) -> str:
    rows = sensitivity_rows(arms)
    if not rows:
        return ""
    short = short_names([arm.name for arm in arms])
    values = [f"{format_number(row.plain)} for {short[row.arm]}" for row in rows if row.is_ranked]
    text = (
        f"LR sensitivity S over this grid (plain mean; lower is more stable): {join_words(values)}."
    )
    behind = [short[row.arm] for row in rows if not row.is_ranked]
    if behind:
        text += (
            f" Not ranked by S, because their best loss is more than {RANK_DEPTH:g} nats per "
            f"token above the best arm's: {join_words(behind)}."
        )
    paired = [c for c in comparisons if not math.isnan(c.s_t95.low)]
    if not paired:
        return f"{text} These are from one seed, so differences between them are unproven."
    ranked = {row.arm for row in rows if row.is_ranked}
    paired = [c for c in paired if {c.arm, c.baseline} <= ranked]
    if not paired:
        return text
    shown = [c for c in paired if c.s_holm < ALPHA]
    rest = [short[c.arm] for c in paired if not c.s_holm < ALPHA]
    parts = [
        f"{short[c.arm]} {format_number(c.s_mean)} (95% interval "
        f"{format_interval(c.s_t95.low, c.s_t95.high)}, {format_p_value(c.s_holm)})"
        for c in shown
    ]
    if parts:
        text += f" Its difference to the baseline is shown for {'; '.join(parts)}."
    if not rest:
        return text
    start = "for the others" if shown else "between an arm and its baseline"
    return (
        f"{text} No difference of S is shown {start}, adjusted for the number of arms: "
        f"{join_words(rest)}."
    )


def _costs(arms: Sequence[ArmResult], comparisons: Sequence[Comparison]) -> str:
    """Say what a step of each compared arm costs, beside whether its loss is as good."""
    found, same = costs(arms), {c.arm: c.same_holm < ALPHA for c in comparisons}
    parts = []
    for arm in arms:
        cost = found.get(arm.name)
        if cost is None or not math.isfinite(cost.t95.low):
            continue
        quality = ", as good in loss" if same.get(arm.name) else ""
        parts.append(
            f"{arm.name} {format_number(cost.ratio)} "
            f"(95% interval {format_interval(cost.t95.low, cost.t95.high)}{quality})"
        )
    if not parts or len(parts) > MOST_NAMED:
        return ""
    return f"Time of a training step over the baseline's, in this grid: {join_words(parts)}."


def _sentence(text: str, end: str = ".") -> str:
    return f"{text[0].upper()}{text[1:]}{end}" if text else ""


# ------------------------------------------------------------------------------------ the cautions


def cautions(results: Results, arms: Sequence[ArmResult]) -> list[str]:
    """Return what limits the verdict: gaps, edges, a short protocol, unequal conditions."""
    if not results.is_ablation:
        return []
    out = [
        f"{arm.name}'s best learning rate, {arm.best_lr:g}, is the {arm.edge} of the grid: the "
        "true best may lie beyond it, so extend the grid before comparing this arm."
        for arm in arms
        if arm.edge and any(run.ended for run in arm.runs)
    ]
    out += _gaps(results)
    if len(results.lrs) < PROTOCOL_LRS:
        out.append(
            f"{pluralize(len(results.lrs), 'learning rate')}: a sound comparison needs at least "
            f"{PROTOCOL_LRS}, half a decade apart."
        )
    if len(results.seeds) < PROTOCOL_SEEDS:
        out.append(
            f"{pluralize(len(results.seeds), 'seed')}: a sound comparison needs at least "
            f"{PROTOCOL_SEEDS} everywhere and {PROTOCOL_BEST_SEEDS} at each arm's best rate."
        )
    few = [arm for arm in arms if 0 < len(arm.best_seeds) < PROTOCOL_BEST_SEEDS]
    if few and len(results.seeds) >= PROTOCOL_SEEDS:
        least = min(len(arm.best_seeds) for arm in few)
        names = join_some([arm.name for arm in few], len(arms))
        out.append(
            f"As few as {pluralize(least, 'seed')} at the best learning rate ({names}): a sound "
            f"comparison needs at least {PROTOCOL_BEST_SEEDS} there."
        )
    return out + better_neighbors(results, arms) + _unequal_conditions(results)


def _gaps(results: Results) -> list[str]:
    out = []
    if results.missing:
        cells = pluralize(len(results.missing), "cell")
        out.append(f"{cells} not run yet.")
    unfinished = [run for run in results.runs if run.fate == "unfinished"]
    if unfinished:
        cells = pluralize(len(unfinished), "cell")
        out.append(f"{cells} not finished; excluded from every number.")
    return out + [
        f"{run.arm} at {run.lr:g}, seed {run.seed}, crashed and is excluded from every number: "
        f"{run.error or 'no message'}"
        for run in results.runs
        if run.fate == "crashed"
    ]


def _unequal_conditions(results: Results) -> list[str]:
    out = []
    for key, what in (
        ("data_hash", "the same batches"),
        ("weights_hash", "the same initial weights (norms excepted)"),
    ):
        seeds = _unequal_seeds(results, key)
        if seeds:
            out.append(
                f"Not every arm had {what} as its baseline: the hashes differ for seed "
                f"{join_words(map(str, seeds))}."
            )
    trained = [run for run in results.runs if run.fate in TRAINED]
    groups: dict[str, set[float]] = {}
    for run in trained:
        groups.setdefault(results.baseline_of.get(run.arm, ""), set()).add(run.figure("tokens"))
    tokens = set[float]().union(*(of_group for of_group in groups.values() if len(of_group) > 1))
    if tokens:
        out.append(
            "The runs were not trained on the same number of tokens "
            f"({min(tokens):,.0f} to {max(tokens):,.0f})."
        )
    for key, what in (
        ("versions", "versions"),
        ("threads", "thread counts"),
        ("device", "devices"),
    ):
        if len({repr(run.summary.get(key)) for run in trained}) > 1:
            out.append(f"The runs were made with different {what}.")
    return out


def _unequal_seeds(results: Results, key: str) -> list[int] | None:
    """Return the seeds for which an arm and its baseline differ in an entry of the summary.

    Arms at other values of an axis may differ: they are not compared.  None if it is not recorded.
    """
    seen: dict[tuple[str, int], set[Any]] = {}
    for run in results.runs:
        if run.ended:
            group = results.baseline_of.get(run.arm, ""), run.seed
            seen.setdefault(group, set()).add(run.summary.get(key))
    if not seen or any(None in values for values in seen.values()):
        return None
    return sorted({seed for (_, seed), values in seen.items() if len(values) > 1})


# -------------------------------------------------------------------------------- the small print

SENSITIVITY_MEANING = (
    "LR sensitivity: the mean over the grid of min(ℓ, ℓ₀), minus the grid's best; ℓ is a run's "
    "final validation loss, ℓ₀ its arm's loss at init, which also stands for a diverged run. "
    "Plain: the mean over the grid points. Trapezoid: over log learning rate. A collapsed run "
    "counts with its own loss, near the unigram entropy, as the definition says. It depends on the "
    "grid and leaves out seeds that lack a rate; an arm whose best loss is more than "
    f"{RANK_DEPTH:g} nats per token above the best arm's is not ranked by it."
)
BASIN_MEANING = (
    f"the width in log₁₀ of the learning rates around the best with a loss within {BASIN_DEPTH:g} "
    "nats per token of it, linear between grid points; ≥ where it reaches the edge of the grid."
)
FATES_MEANING = (
    "diverged: the loss or a gradient was not finite, or the final loss is no lower than at init. "
    f"Collapsed: the final loss is not {COLLAPSE_MARGIN:g} nats per token below the unigram "
    "entropy of the corpus, so the model knows little more than token frequencies. Undertrained: "
    "likewise, but the training loss fell all along the run (each quarter's mean below the one "
    f"before, and from the second to the third by at least {STILL_FALLING_SHARE:.0%} of the whole "
    "fall), so that more steps would lower it; it is not counted as failed."
)
SPIKES_MEANING = (
    "the share of steps with a loss or gradient norm that exceeds the mean of the previous "
    f"{SPIKE_WINDOW} values by {SPIKE_SIGMAS:g} of their standard deviations; a value that is not "
    "finite counts as one."
)
VALIDATION_MEANING = "the whole held-out split, once, at the end of each run."


def equal_start(results: Results) -> str:
    """Say that the arms of each seed had the same batches and initial weights, if they had."""
    batches = _unequal_seeds(results, "data_hash")
    weights = _unequal_seeds(results, "weights_hash")
    if batches is None or weights is None:
        return "The runs do not record hashes of their batches and initial weights."
    if batches or weights:
        return ""
    return (
        "With each seed, every arm had the same batches and the same initial weights, norms "
        "excepted, as its baseline (hashes equal)."
    )


_TIME_PARTS = {
    "training_seconds": "in training steps",
    "validation_seconds": "in validation",
    "starting_seconds": "in starting (process, imports, data, model)",
}
"""What a run's summary records of its time; the rest is saving and logging."""


def where_time_went(results: Results) -> str:
    """Say how long the grid and its cells took, and with what; leave out what is not recorded.

    The idle time of the workers is the time that they existed minus that of the cells, so it
    contains the time of cells that crashed or were killed.
    """
    sessions = results.sessions
    timed = [run for run in results.runs if all(map(run.has_figure, ("seconds", *_TIME_PARTS)))]
    parts = []
    if sessions:
        wall = sum(session.seconds + session.preparing_seconds for session in sessions)
        preparing = format_duration(sum(session.preparing_seconds for session in sessions))
        workers = sorted({session.workers for session in sessions})
        parts.append(
            f"the ablation took {format_duration(wall)} in {pluralize(len(sessions), 'session')}, "
            f"{preparing} of it before the first cell, with "
            f"{join_words(pluralize(n, 'worker') for n in workers)}"
        )
    if timed:
        total = sum(map(_cell_seconds, timed))
        sums = {key: sum(run.figure(key) for run in timed) for key in _TIME_PARTS}
        spent = [f"{format_duration(sums[key])} {what}" for key, what in _TIME_PARTS.items()]
        spent.append(f"{format_duration(total - sum(sums.values()))} in saving and logging")
        which = "the cells" if len(timed) == len(results.runs) else pluralize(len(timed), "cell")
        parts.append(f"{which} took {format_duration(total)} together: {join_words(spent)}")
        if sessions and len(timed) == sum(run.ended for run in results.runs):
            available = sum(session.seconds * session.workers for session in sessions)
            parts.append(f"workers were idle for {format_duration(available - total)}")
    ended = [run for run in results.runs if run.ended and run.has_figure("seconds")]
    if ended:
        longest = max(ended, key=_cell_seconds)
        parts.append(
            f"the longest cell, {longest.arm}, lr {longest.lr:g}, seed {longest.seed}, "
            f"took {format_duration(_cell_seconds(longest))}"
        )
    return _sentence("; ".join(parts))


def _cell_seconds(run: Run) -> float:
    """Return a run's seconds including its start, which older runs do not record."""
    starting = run.figure("starting_seconds")
    return run.figure("seconds") + (starting if math.isfinite(starting) else 0.0)
