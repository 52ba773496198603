"""The report of an ablation or of a single run, made from the files of its runs and nothing else.

    folder ──read_results──▶ ──analyse──▶ report.html, report.png, table.tex, cells.parquet

Needs the ``report`` extra: pip install "minillama[report]".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from minillama.ablation.analysis import ArmResult, analyse_arms, compare_arms
from minillama.ablation.page import render
from minillama.ablation.picture import write_picture
from minillama.ablation.results import COLUMNS, Results, read_results, table_row
from minillama.ablation.verdict import headline, number
from minillama.files import explain_write_errors, write_atomic

_TEXTS = ("arm", "fate", "run_dir", "config_hash", "weights_hash", "data_hash", "error")
_WHOLE = ("seed", "steps", "tokens", "best_step", "n_params", "n_norm_params", "threads")
_TYPES = {name: pa.string() for name in _TEXTS} | {name: pa.int64() for name in _WHOLE}
"""The Parquet types of the columns that do not hold a float."""


def write_report(folder: str | Path) -> Path:
    """Write report.html and report.png into ``folder`` and return the page's path.

    ``folder`` is an ablation's, finished or not, which also gets ``table.tex`` (the table of arms
    for a paper) and ``cells.parquet`` (``cells.csv`` with its types), or a single run's.

    Raises:
        ConfigError: the folder holds neither an ablation nor a run.
        RunFolderError: a file of a run is damaged, or the report cannot be written.
    """
    results = read_results(folder)
    arms = analyse_arms(results)
    comparisons = compare_arms(arms, results.margin)
    page = results.folder / "report.html"
    with explain_write_errors(results.folder):
        write_atomic(page, render(results, arms, comparisons))
        said = headline(results, arms, comparisons)
        write_picture(results.folder / "report.png", results, arms, said, _source(results))
        if results.is_ablation:
            write_atomic(results.folder / "table.tex", latex_table(arms))
            _write_parquet(results)
    return page


def _source(results: Results) -> str:
    ended = [run for run in results.runs if run.ended]
    parts = []
    for key, form in (("n_params", "{:,} parameters"), ("steps", "{:,} steps")):
        values = sorted({run.summary[key] for run in ended if run.summary.get(key)})
        if values:
            parts.append(form.format(values[-1]))
    parts.append(f"{len(ended)} runs" if len(ended) != 1 else "1 run")
    marks = "marks: validation; faint: each step's training loss; lines: its running mean"
    crosses = "; crosses: failed runs" if any(run.fate != "ok" for run in ended) else ""
    return f"{', '.join(parts)}. {marks[0].upper()}{marks[1:]}{crosses}. Made by minillama."


def latex_table(arms: Sequence[ArmResult]) -> str:
    """Return the table of arms for a paper, in booktabs' rules."""
    rows = []
    for arm in arms:
        plain, trapezoid = arm.mean_sensitivity()
        loss = number(arm.best_loss)
        if arm.best_sd == arm.best_sd:
            loss += rf" \pm {number(arm.best_sd)}"
        failed = sum(n for fate, n in arm.fates.items() if fate in ("diverged", "collapsed"))
        open_ends = arm.basin is not None and (arm.basin.open_below or arm.basin.open_above)
        at_least = r"\ge " if open_ends else ""
        basin = f"{at_least}{arm.basin.width:.2f}" if arm.basin else "-"
        columns = (
            _latex(arm.name),
            f"{arm.best_lr:g}",
            f"${loss}$".replace("−", "-"),
            number(plain).replace("–", "--"),
            number(trapezoid).replace("–", "--"),
            f"${basin}$",
            f"{failed}/{sum(run.ended for run in arm.runs)}",
        )
        rows.append(" & ".join(columns) + r" \\")
    head = r"arm & best LR & loss (nats) & $S$ plain & $S$ trapezoid & basin (decades) & failed \\"
    return "\n".join(
        (
            r"% needs \usepackage{booktabs}",
            r"\begin{tabular}{lrrrrrr}",
            r"\toprule",
            head,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        )
    )


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\~{}"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in text)


def _write_parquet(results: Results) -> None:
    rows = [table_row(run, results.folder) for run in results.runs]
    schema = pa.schema([(column, _TYPES.get(column, pa.float64())) for column in COLUMNS])
    temporary = results.folder / ".unfinished-cells.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
    temporary.replace(results.folder / "cells.parquet")
