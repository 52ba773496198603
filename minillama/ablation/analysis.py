"""Summarises the runs of each arm, and compares each arm with its baseline.

A diverged run counts with the loss at init ℓ₀ everywhere, as in the LR sensitivity: leaving it out
would flatter the arm that failed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minillama.ablation.measures import (
    Basin,
    Floats,
    Sensitivity,
    capped,
    lr_basin,
    lr_sensitivity,
)
from minillama.ablation.results import Results, Run
from minillama.ablation.sequential import repeated_interval, repeated_p, repeated_tost
from minillama.ablation.stage_plan import StagePlan
from minillama.ablation.statistics import (
    ALPHA,
    bca_interval,
    holm,
    sign_flip_test,
    t_interval,
    t_test,
)


@dataclass(frozen=True)
class ArmResult:
    """The results of one arm; losses are validation losses in nats per token.

    ``best_lr`` is chosen on the grid's seeds, and with it ``best_loss``, ``best_sd`` and
    ``best_seeds`` are of the seeds that are compared: fresh ones if the ablation has a second
    stage.  ``mean_loss``, ``sensitivity``, ``basin`` and ``fates`` are the grid's; ``runs`` and
    ``losses`` hold both.
    """

    name: str
    baseline: str
    config_arm: str
    """Its name in the config, without the values of axes."""
    point: Mapping[str, str]
    """The label of its value on each axis."""
    runs: Sequence[Run]
    losses: Mapping[tuple[float, int], float]
    mean_loss: Mapping[float, float]
    best_lr: float
    best_loss: float
    best_sd: float
    best_seeds: tuple[int, ...]
    edge: str
    sensitivity: Mapping[int, Sensitivity]
    basin: Basin | None
    fates: Counter[str]
    grid_runs: Sequence[Run]
    looks: tuple[int, ...] = ()
    """Numbers of seeds after which a growing second stage is looked at; empty if it is fixed."""
    look: int = 0
    """The number of the last of these looks, from 0."""

    @property
    def grid_loss(self) -> float:
        """The lowest mean loss of the grid; NaN before a run has ended."""
        return min(self.mean_loss.values(), default=math.nan)

    def first(self, key: str) -> float:
        """Return a number of the summary that is the same for all runs of the arm."""
        known = (run.figure(key) for run in self.runs)
        return next((value for value in known if not math.isnan(value)), math.nan)

    def mean_at_best(self, key: str) -> float:
        """Return the mean of a number of the summary over the runs that are compared."""
        at_best = [run for run in self.runs if run.lr == self.best_lr]
        values = [run.figure(key) for run in at_best if run.seed in self.best_seeds]
        known = [value for value in values if math.isfinite(value)]
        return float(np.mean(known)) if known else math.nan

    def median(self, key: str) -> float:
        """Return the median of a number of the summary over all runs that have it."""
        known = [run.figure(key) for run in self.runs if run.has_figure(key)]
        return float(np.median(known)) if known else math.nan

    def mean_sensitivity(self) -> tuple[float, float]:
        """Return S, plain and trapezoid, averaged over the seeds with a full grid."""
        if not self.sensitivity:
            return math.nan, math.nan
        found = list(self.sensitivity.values())
        return (
            float(np.mean([s.plain for s in found])),
            float(np.mean([s.trapezoid for s in found])),
        )


@dataclass(frozen=True)
class Interval:
    """An interval of a mean difference; NaN with too few pairs."""

    low: float
    high: float

    @classmethod
    def of(cls, ends: tuple[Floats, Floats]) -> Interval:
        """Return the interval between two ends, arrays of one number each."""
        return cls(float(ends[0]), float(ends[1]))

    def excludes(self, value: float) -> bool:
        """Whether ``value`` lies outside."""
        return value < self.low or value > self.high


@dataclass(frozen=True)
class Comparison:
    """An arm minus its baseline, each at its own best LR, paired by seed.

    If the seeds grow, intervals and p values hold over all looks (see :mod:`.sequential`), and
    ``bca95`` and ``p_sign``, which do not, are NaN.

    Below zero the arm's loss is lower.  ``same_p`` is TOST's: below .05 the two are equivalent
    within the margin.  ``p_holm`` and ``same_holm`` are adjusted for all arms of the report, and so
    is ``simultaneous95`` (Bonferroni): all such intervals together cover with 95 %.
    ``s_mean``, ``s_t95``, ``s_p`` and ``s_holm`` are of the difference in plain LR sensitivity,
    over the seeds for which both arms have a full grid.
    """

    arm: str
    baseline: str
    lr: float
    baseline_lr: float
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float
    t95: Interval
    bca95: Interval
    t90: Interval
    p_t: float
    p_holm: float
    p_sign: float
    same_p: float
    same_holm: float
    s_mean: float
    s_t95: Interval
    s_p: float
    s_holm: float
    simultaneous95: Interval


def analyse_arms(results: Results) -> list[ArmResult]:
    """Return the results of each arm's ended runs, in the order of the config."""
    return [_analyse(results, arm) for arm in results.arms]


def _loss(run: Run) -> float:
    return float(capped(run.figure("val_loss"), _init_loss([run])))


def _init_loss(runs: Sequence[Run]) -> float:
    known = [run.figure("init_val_loss") for run in runs]
    known = [loss for loss in known if math.isfinite(loss)]
    return float(np.mean(known)) if known else math.inf


def _analyse(results: Results, arm: str) -> ArmResult:
    runs, lrs, plan = results.of_arm(arm), results.lrs_of(arm), results.plan
    grid_runs = [run for run in runs if run.seed in results.seeds]
    losses = {(run.lr, run.seed): _loss(run) for run in runs if run.ended}
    mean_loss = {}
    for lr in lrs:
        at_lr = [losses[lr, seed] for seed in results.seeds if (lr, seed) in losses]
        if at_lr:
            mean_loss[lr] = float(np.mean(at_lr))
    best_lr = min(mean_loss, key=lambda lr: mean_loss[lr]) if mean_loss else math.nan
    compared, look = results.seeds, 0
    looks: tuple[int, ...] = ()
    if plan is not None:
        best_lr, compared = plan.chosen[arm], plan.seeds
        if len(plan.looks) > 1:
            looks, look = plan.looks, _last_look(results, plan)
            compared = compared[: looks[look]]
    at_best = {seed: losses[best_lr, seed] for seed in compared if (best_lr, seed) in losses}
    edge = ""
    if len(lrs) > 1 and mean_loss:
        edge = {lrs[0]: "lowest", lrs[-1]: "highest"}.get(best_lr, "")
    init_loss = _init_loss(runs)
    sensitivity = {
        seed: lr_sensitivity(lrs, [losses[lr, seed] for lr in lrs], init_loss)
        for seed in results.seeds
        if all((lr, seed) in losses for lr in lrs) and len(lrs) > 1
    }
    full = len(lrs) > 1 and len(mean_loss) == len(lrs)
    in_grid = results.grid_arms.get(arm)
    return ArmResult(
        name=arm,
        baseline=results.baseline_of.get(arm, arm),
        config_arm=in_grid.config_arm if in_grid else arm,
        point=in_grid.point if in_grid else {},
        runs=runs,
        losses=losses,
        mean_loss=mean_loss,
        best_lr=best_lr,
        best_loss=float(np.mean(list(at_best.values()))) if at_best else math.nan,
        best_sd=float(np.std(list(at_best.values()), ddof=1)) if len(at_best) > 1 else math.nan,
        best_seeds=tuple(sorted(at_best)),
        edge=edge,
        sensitivity=sensitivity,
        basin=lr_basin(list(mean_loss), list(mean_loss.values()), init_loss) if full else None,
        fates=Counter(run.fate for run in grid_runs),
        grid_runs=grid_runs,
        looks=looks,
        look=look,
    )


def _last_look(results: Results, plan: StagePlan) -> int:
    """Return the number of the last look whose cells have all ended, from 0; 0 before the first."""
    ended = {(run.arm, run.lr, run.seed) for run in results.runs if run.ended}
    complete = [look for look, n in enumerate(plan.looks) if ended.issuperset(plan.places(n))]
    return max(complete, default=0)


def with_baselines(arms: Sequence[ArmResult]) -> Iterator[tuple[ArmResult, ArmResult]]:
    """Yield each arm that is compared, with its baseline."""
    named = {arm.name: arm for arm in arms}
    for arm in arms:
        baseline = named.get(arm.baseline)
        if baseline is not None and baseline is not arm:
            yield arm, baseline


def compare_arms(arms: Sequence[ArmResult], margin: float) -> list[Comparison]:
    """Compare each arm with its baseline, where they share a seed at their best LRs."""
    out = []
    for arm, baseline in with_baselines(arms):
        seeds = tuple(s for s in arm.best_seeds if s in baseline.best_seeds)
        if seeds:
            out.append(_compare(arm, baseline, seeds, margin))
    if not out:
        return []
    apart, same = holm([c.p_t for c in out]), holm([c.same_p for c in out])
    sensitivity = holm([c.s_p for c in out])
    level, looks, look = 1 - ALPHA / len(out), arms[0].looks, arms[0].look
    return [
        replace(
            c,
            p_holm=apart[i],
            same_holm=same[i],
            s_holm=sensitivity[i],
            simultaneous95=Interval.of(repeated_interval(c.differences, looks, look, level)),
        )
        for i, c in enumerate(out)
    ]


def _compare(
    arm: ArmResult, baseline: ArmResult, seeds: tuple[int, ...], margin: float
) -> Comparison:
    d = np.array([arm.losses[arm.best_lr, s] - baseline.losses[baseline.best_lr, s] for s in seeds])

    looks, look = arm.looks, arm.look
    both = [s for s in arm.sensitivity if s in baseline.sensitivity]
    s_d = np.array([arm.sensitivity[s].plain - baseline.sensitivity[s].plain for s in both])

    return Comparison(
        arm=arm.name,
        baseline=baseline.name,
        lr=arm.best_lr,
        baseline_lr=baseline.best_lr,
        seeds=seeds,
        differences=tuple(d.tolist()),
        mean=float(d.mean()),
        t95=Interval.of(repeated_interval(d, looks, look)),
        bca95=Interval(math.nan, math.nan) if looks else Interval.of(bca_interval(d)),
        t90=Interval.of(repeated_interval(d, looks, look, 0.90)),
        p_t=repeated_p(d, looks, look),
        p_holm=math.nan,
        p_sign=math.nan if looks else float(sign_flip_test(d)),
        same_p=repeated_tost(d, looks, look, margin),
        same_holm=math.nan,
        s_mean=float(s_d.mean()) if both else math.nan,
        s_t95=Interval.of(t_interval(s_d)),
        s_p=float(t_test(s_d)),
        s_holm=math.nan,
        simultaneous95=Interval(math.nan, math.nan),
    )
