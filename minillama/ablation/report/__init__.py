"""The report of an ablation or of a single run, made from the files of its runs and nothing else.

    folder ──read_results──▶ ──analyse──▶ report.html, report.png, findings.md, table.tex, …

Needs the ``report`` extra: pip install "minillama[report]".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from minillama.ablation.analysis import ArmResult, analyse_arms, compare_arms
from minillama.ablation.failures import FAILED
from minillama.ablation.report.figures import SEEDS_FOR_BAND, most_seeds
from minillama.ablation.report.page import render
from minillama.ablation.report.picture import write_picture
from minillama.ablation.report.prose import headline
from minillama.ablation.report.quote import findings_markdown
from minillama.ablation.results import COLUMNS, Results, read_results, table_row
from minillama.files import atomic_file, explain_write_errors, write_atomic
from minillama.formatting import format_number, pluralize

_TEXT_COLUMNS = ("arm", "fate", "run_dir", "config_hash", "weights_hash", "data_hash", "error")
_BOOLEAN_COLUMNS = ("still_falling", "in_grid")
_INTEGER_COLUMNS = ("seed", "steps", "tokens", "best_step", "n_params", "n_norm_params", "threads")


def write_report(folder: str | Path) -> Path:
    """Write report.html and report.png into ``folder`` and return the path of the page.

    ``folder`` is that of an ablation, finished or not, or of a single run.  An ablation's also gets
    ``findings.md`` (the lines to quote), ``table.tex`` (the table of arms for a paper) and
    ``cells.parquet`` (``cells.csv`` with types).

    Raises:
        ConfigError: the folder contains neither an ablation nor a run.
        RunFolderError: a file of a run is damaged, or the report cannot be written.
    """
    results = read_results(folder)
    arms = analyse_arms(results)
    comparisons = compare_arms(arms, results.margin)
    page = results.folder / "report.html"
    with explain_write_errors(results.folder):
        write_atomic(page, render(results, arms, comparisons))
        with atomic_file(results.folder / "report.png") as picture:
            verdict = headline(results, arms, comparisons)
            write_picture(picture, results.of_grid(), arms, verdict, _small_print(results))
        if results.is_ablation:
            found = findings_markdown(results, arms, comparisons)
            write_atomic(results.folder / "findings.md", found)
            write_atomic(results.folder / "table.tex", latex_table(arms))
            with atomic_file(results.folder / "cells.parquet") as parquet:
                cell_table(results).to_parquet(parquet, index=False)
    return page


def _small_print(results: Results) -> str:
    ended = [run for run in results.runs if run.ended]
    parts = []
    for key, noun in (("n_params", "parameter"), ("steps", "step")):
        values = [int(run.figure(key)) for run in ended if run.figure(key) > 0]
        if values:  # axes may change the size of the model
            smallest = f"{min(values):,} to " if min(values) < max(values) else ""
            parts.append(smallest + pluralize(max(values), noun))
    parts.append(pluralize(len(ended), "run"))
    failed = " Crosses: failed runs." if any(run.fate in FAILED for run in ended) else ""
    if most_seeds(results) >= SEEDS_FOR_BAND:
        how = (
            "Left: means over seeds, dots: runs. Right: training loss (running mean) minus the "
            "baseline's at the same rate and seed: mean and its 95% t interval."
        )
    else:
        how = "Marks: validation; faint: training loss of each step; lines: its running mean."
    return f"{', '.join(parts)}. {how}{failed} Made by minillama."


def cell_table(results: Results) -> pd.DataFrame:
    """Return the rows of ``cells.csv``, and those of unfinished runs, with types."""
    rows = [table_row(run, results.folder) for run in (*results.runs, *results.left_out)]
    types = dict.fromkeys(COLUMNS, "float64")
    types |= dict.fromkeys(_TEXT_COLUMNS, "string") | dict.fromkeys(_INTEGER_COLUMNS, "Int64")
    types |= dict.fromkeys(_BOOLEAN_COLUMNS, "boolean")
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(types)


def latex_table(arms: Sequence[ArmResult]) -> str:
    """Return the table of arms for a paper, with the rules of booktabs."""
    rows = []
    for arm in arms:
        plain, trapezoid = arm.mean_sensitivity()
        loss = format_number(arm.best_loss)
        if math.isfinite(arm.best_sd):
            loss += rf" \pm {format_number(arm.best_sd)}"
        basin = "-"
        if arm.basin:
            basin = (r"\ge " if arm.basin.is_open else "") + f"{arm.basin.width:.2f}"
        rows.append(
            {
                "arm": _escape_latex(arm.name),
                "best LR": f"{arm.best_lr:g}",
                r"loss $\pm$ sd (nats)": f"${loss}$".replace("−", "-"),
                "$S$ plain": format_number(plain).replace("–", "--"),
                "$S$ trapezoid": format_number(trapezoid).replace("–", "--"),
                "basin (decades)": f"${basin}$",
                "failed": f"{sum(arm.fates[fate] for fate in FAILED)}/"
                f"{sum(run.ended for run in arm.grid_runs)}",
            }
        )
    table = pd.DataFrame(rows).to_latex(index=False, escape=False, column_format="lrrrrrr")
    return f"% needs \\usepackage{{booktabs}}\n{table}"


def _escape_latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)
