"""Sentences on the hypotheses of an ablation: what was claimed, when, and what the runs show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from minillama.ablation.analysis import ArmResult
from minillama.ablation.hypothesis_tests import HypothesisResult, check_hypotheses
from minillama.ablation.report.wording import format_interval, format_p_value
from minillama.ablation.results import Results
from minillama.formatting import format_number, pluralize


def hypothesis_sentences(results: Results, arms: Sequence[ArmResult]) -> list[str]:
    """Return a sentence for each hypothesis, planned ones first, and one that ends the list."""
    checked = check_hypotheses(results, arms)
    if not checked:
        return []
    n_planned = sum(each.recorded.is_planned for each in checked)
    sentences = [_sentence(each, n_planned) for each in checked]
    return [*sentences, "What follows was not planned: it was found in these results."]


def _sentence(result: HypothesisResult, n_planned: int) -> str:
    h, recorded = result.recorded.hypothesis, result.recorded
    if recorded.is_planned:
        start = "Planned"
        family = f"adjusted for {pluralize(n_planned, 'planned hypothesis', 'planned hypotheses')}"
    else:
        start = f"Added after {recorded.n_seen} of its runs had ended"
        family = "adjusted for those added late"
    gone = "" if result.in_config else "; the config no longer has it"
    start += f" ({h.name}, {recorded.time[:10]}, sha256 {recorded.sha256[:8]}{gone})"
    what = {"loss": "the loss", "failures": "the rate of failure", "S": "LR sensitivity S"}
    claim = {
        "same": f"is the same as {h.baseline}'s within ±{h.margin or 0:g} nats per token",
        "different": f"differs from {h.baseline}'s",
    }.get(h.claim, f"is {h.claim} than {h.baseline}'s")
    where = {"best": " at their best learning rates"}.get(str(h.rate), f" at {h.rate}")
    claimed = f"{what[h.measure]} of {h.arm} {claim}{'' if h.measure == 'S' else where}"
    if math.isnan(result.p):
        pairs = pluralize(result.n_pairs, "seed")
        return (
            f"{start}: {claimed}. Not tested yet: {pairs} shared by the two arms, two are needed."
        )
    verdict = "shown" if result.is_shown else "refuted" if result.refuted else "not shown"
    interval = format_interval(result.interval.low, result.interval.high)
    return (
        f"{start}: {claimed}. {verdict.capitalize()}: {format_number(result.mean)}, 95% interval "
        f"{interval}, {pluralize(result.n_pairs, 'seed')}, {format_p_value(result.p_holm)} "
        f"{family}."
    )
