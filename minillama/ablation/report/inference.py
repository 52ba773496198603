"""Sentences on failure rates, interactions, and what adjusting for many comparisons changes."""

from __future__ import annotations

from collections.abc import Sequence

from minillama.ablation.analysis import Comparison
from minillama.ablation.failures import FailureComparison
from minillama.ablation.interactions import Interaction
from minillama.ablation.report.wording import format_interval, format_p_value
from minillama.ablation.statistics import ALPHA
from minillama.formatting import format_number, join_words, pluralize


def failure_rates(compared: Sequence[FailureComparison]) -> str:
    """Say at which rates an arm is shown to fail more or less often than its baseline."""
    shown = [each for each in compared if each.p_holm < ALPHA]
    rest = [each for each in compared if each.p_holm >= ALPHA]
    parts = [
        f"{each.arm} fails {'more' if each.difference > 0 else 'less'} often than {each.baseline} "
        f"at {each.lr:g}: {_counts(each)}, {format_p_value(each.p_holm)}."
        for each in shown
    ]
    if rest:
        widest = max(rest, key=lambda each: abs(each.difference))
        where = "" if len(rest) == 1 else f" in {len(rest)} comparisons of an arm at a rate"
        start = "Elsewhere no" if shown else "No"
        parts.append(
            f"{start} difference in how often runs fail is shown{where}"
            f"{'; the largest' if len(rest) > 1 else ''}: {widest.arm} at {widest.lr:g}, "
            f"{_counts(widest)}, {format_p_value(widest.p_holm)}."
        )
    return " ".join(parts)


def _counts(each: FailureComparison) -> str:
    low, high = each.rate95.low, each.rate95.high
    return (
        f"{each.failed} of {each.n_seeds} against {each.baseline_failed} of {each.n_seeds} "
        f"(95% interval of the difference {format_interval(low, high, 2)})"
    )


def interaction_sentences(interactions: Sequence[Interaction]) -> list[str]:
    """Say for which arms the difference to the baseline is shown to depend on an axis."""
    shown = [each for each in interactions if each.p_holm < ALPHA]
    rest = [each for each in interactions if not each.p_holm < ALPHA]
    out = []
    for each in shown:
        side = "lower" if each.mean < 0 else "higher"
        at = f" (at {each.elsewhere})" if each.elsewhere else ""
        out.append(
            f"The difference {each.arm} − {each.baseline} depends on {each.axis}{at}: it is "
            f"{format_number(abs(each.mean))} nats per token {side} with {each.value} than with "
            f"{each.reference} (95% interval {format_interval(each.t95.low, each.t95.high)}, "
            f"{pluralize(len(each.seeds), 'seed')}, {format_p_value(each.p_holm)})."
        )
    if rest:
        axes = join_words(dict.fromkeys(each.axis for each in rest))
        start = "For the other arms and values it" if shown else "Whether an arm's difference"
        verb = "is not shown to depend" if shown else "depends"
        end = "" if shown else " is not shown"
        narrow = min(rest, key=lambda each: each.p_t)
        named = f"{narrow.arm} with {narrow.value} minus with {narrow.reference}"
        out.append(
            f"{start} {verb} on {axes}{end} ({pluralize(len(rest), 'interaction')}; the clearest, "
            f"{named}: {format_number(narrow.mean)}, unadjusted 95% interval "
            f"{format_interval(narrow.t95.low, narrow.t95.high)}, "
            f"{format_p_value(narrow.p_holm)} after adjusting)."
        )
    return out


def only_unadjusted(c: Comparison, n_comparisons: int) -> str:
    """Say that an interval excludes zero by itself, but not beside all the other comparisons."""
    if not c.t95.excludes(0) or c.p_holm < ALPHA:
        return ""
    return (
        f" This interval alone excludes zero; with {pluralize(n_comparisons, 'comparison')} that "
        f"is not enough: the interval for all of them together is "
        f"{format_interval(c.simultaneous95.low, c.simultaneous95.high)}."
    )
