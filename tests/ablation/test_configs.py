from pathlib import Path

import pytest

from minillama.ablation.grid import cells
from minillama.config.ablation import load_ablation
from minillama.config.advice import advice
from minillama.config.loading import read_yaml

FOLDER = Path(__file__).parents[2] / "configs/ablations"
FILES = [path for path in sorted(FOLDER.glob("*.yaml")) if "arms" in read_yaml(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_ablation_that_ships_can_be_run(path: Path) -> None:
    config = load_ablation(path)
    grid = cells(config)
    assert config.baseline in config.arms
    assert len(grid) == len({cell.folder for cell in grid})
    head = path.read_text().split("\n\n", 1)[0]
    assert all(word in head for word in ("Takes:", "Shows:", "Run:"))


UNFAIR = {
    "dyt.yaml": {"dyt-naive", "dyt-scaled", "dyt-unscaled"},
    "placements.yaml": {"reordered"},
    "warmup_init.yaml": {"post"},
}
"""Arms that lack on purpose what their source has: there is another arm, or axis value, with it."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shipped_arms_are_trained_as_their_sources_say(path: Path) -> None:
    grid = cells(load_ablation(path))
    unfair = {cell.arm.split("+")[0] for cell in grid if advice(cell.config)}  # without axes
    assert unfair == UNFAIR.get(path.name, set())
