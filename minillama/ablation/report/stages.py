"""On which seeds the rates were chosen and the arms compared, and what the choice may cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minillama.ablation.analysis import ArmResult
from minillama.ablation.results import Results
from minillama.formatting import format_number, join_words, pluralize


def how_compared(results: Results) -> str:
    """Say which seeds chose each arm's rate and which compare the arms; empty without a choice."""
    plan = results.plan
    if plan is None:
        if len(results.lrs) < 2 or len(results.arms) < 2:
            return ""
        return (
            "Each arm's learning rate was chosen, and the arms compared, on the same seeds "
            f"({seed_range(results.seeds)}), which favors the arm whose runs vary more."
        )
    text = (
        f"Each arm's learning rate was chosen on seeds {seed_range(plan.grid_seeds)}, and the arms "
        f"are compared on fresh seeds, {seed_range(plan.seeds[: plan.n_run])}, that did not choose "
        "it. S, basins, fates and the curves are of the grid's seeds; rates of failure count both."
    )
    if len(plan.looks) < 2:
        return text
    goal = (
        "each comparison is decided"
        if plan.until == "decided"
        else f"each 95% interval is at most {plan.until:g} nats per token wide"
    )
    ended = f"it ended after {plan.n_run}" if plan.n_run else "it has not ended"
    looks = join_words(map(str, plan.looks), "or")
    return (
        f"{text} Their number grows to {looks} until {goal}; {ended}. Intervals and p values hold "
        "over all these looks (group-sequential, spending as O'Brien and Fleming)."
    )


def seed_range(seeds: Sequence[int]) -> str:
    """Return seeds as text: ``100 to 123`` for a long run of consecutive ones."""
    seeds = sorted(seeds)
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def better_neighbors(results: Results, arms: Sequence[ArmResult]) -> list[str]:
    """Return a caution for each arm that does better, on the fresh seeds, beside its chosen rate.

    The comparison stays at the chosen rate: to move it now would choose on the compared seeds.
    """
    plan, out = results.plan, []
    for arm in arms if plan else ():
        assert plan is not None
        means = {
            lr: float(np.mean([arm.losses[lr, seed] for seed in arm.best_seeds]))
            for lr in plan.rates[arm.name]
            if arm.best_seeds and all((lr, seed) in arm.losses for seed in arm.best_seeds)
        }
        best = min(means, key=lambda lr: means[lr], default=arm.best_lr)
        if best != arm.best_lr and arm.best_lr in means:
            gap = means[arm.best_lr] - means[best]
            out.append(
                f"On the {pluralize(len(arm.best_seeds), 'fresh seed')} {arm.name} does better at "
                f"{best:g} than at {arm.best_lr:g}, the rate chosen on the grid, by "
                f"{format_number(gap)} nats per token: the choice is uncertain by that much."
            )
    return out
