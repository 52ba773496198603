"""The notebook for learners runs from its first cell to its last, and is kept without outputs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "scripts" / "first_lesson.ipynb"


@pytest.fixture
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def execute(notebook, folder, timeout):
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    client.execute()
    return notebook


def outputs(notebook, kind):
    """Return what the cells show of a MIME type."""
    return [
        output["data"][kind]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if kind in output.get("data", {})
    ]


def check(notebook, folder):
    text = "\n".join(
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "stream" and output["name"] == "stdout"
    )
    assert "root mean square: 1.0" in text
    assert float(re.search(r"cosine to x ([+-]\S+)", text)[1]) == pytest.approx(0, abs=1e-6)
    model, rmsnorm, layernorm, grid = outputs(notebook, "text/html")
    assert "<th>norm</th><td>rmsnorm, placement pre</td>" in model
    assert "<caption>rmsnorm</caption>" in rmsnorm
    assert "<caption>layernorm</caption>" in layernorm
    assert "<tr><th>rmsnorm</th>" in grid
    assert len(outputs(notebook, "image/png")) == 1
    assert (folder / "runs/first-lesson/ablation/report.html").is_file()
    widgets = outputs(notebook, "application/vnd.jupyter.widget-view+json")
    assert len(widgets) >= 2  # a bar for each run


def test_it_runs_shortened(notebook, tmp_path):
    [parameters] = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    parameters.source = 'n_steps, seeds, out = 20, [0], "runs/first-lesson"'
    check(execute(notebook, tmp_path, timeout=300), tmp_path)


@pytest.mark.slow
def test_it_runs_as_it_is(notebook, tmp_path):
    check(execute(notebook, tmp_path, timeout=1800), tmp_path)


def test_it_is_kept_without_outputs(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 5
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
