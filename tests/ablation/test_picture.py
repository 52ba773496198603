"""All text on the picture is complete and legible, whatever the number and names of the arms."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from minillama.ablation.analysis import analyse_arms, compare_arms
from minillama.ablation.report import picture
from minillama.ablation.report.prose import headline, short_names
from minillama.ablation.results import read_results

_GRID = [
    f"{placement}+model.n_layers={layers}+model.init={init}+optim.warmup_steps={warmup}"
    for placement in ("pre", "post", "peri")
    for layers in (6, 24)
    for init in ("normal", "fan_in")
    for warmup in (0, 30)
]
_LONG = [f"arm{i}-{'and-so-on-' * 19}" for i in range(3)]
_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
_MANY_RATES = (1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 1e-2, 2e-2, 1e-1)


def _draw(folder: Path) -> Figure:
    results = read_results(folder)
    arms = analyse_arms(results)
    said = headline(results, arms, compare_arms(arms, results.margin))
    return picture.draw(results, arms, said, "900,000 parameters. " * 12)


@pytest.mark.parametrize(
    ("arms", "rates"),
    [
        (["a", "b"], _RATES[:1]),
        (["rms", "ln"], _MANY_RATES),
        (_LONG, _RATES[:2]),
        (_GRID[:16], _RATES),
        (_GRID, _RATES[:3]),
    ],
)
def test_all_text_is_inside_the_picture_and_does_not_overlap(
    make_ablation: Any, arms: list[str], rates: tuple[float, ...]
) -> None:
    def loss(i: int, j: int) -> float | None:
        return None if (i + j) % 11 == 1 else 5.2 if (i + j) % 5 == 4 else 2 + 0.01 * i + 0.1 * j

    losses = {
        arm: {lr: [loss(i, j)] * 2 for j, lr in enumerate(rates)} for i, arm in enumerate(arms)
    }
    folder = make_ablation(losses, name="an-experiment-" * 12, steps=40)
    figure = _draw(folder)
    figure.canvas.draw()
    boxes = {
        text: text.get_window_extent()
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible()
    }
    ticks = {
        label: tick.label1.get_visible()
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
    }
    in_view = [t for t in boxes if ticks.get(t, True) and _is_drawn(figure, t)]
    shown = " ".join(text.get_text() for text in in_view)
    assert "peak learning rate" in shown or len(rates) == 1
    for arm in short_names(arms).values():
        assert arm in shown.replace("\n", "")
    width, height = figure.canvas.get_width_height()
    for text in in_view:
        box = boxes[text]
        assert 0 <= box.x0 < box.x1 <= width, text.get_text()
        assert 0 <= box.y0 < box.y1 <= height, text.get_text()
    for one, other in itertools.combinations(in_view, 2):
        assert not boxes[one].overlaps(boxes[other]), (one.get_text(), other.get_text())


def _is_drawn(figure: Figure, text: Text) -> bool:
    """Return False for the label of a tick outside the view of its axis."""
    for axes in figure.axes:
        for axis, i in ((axes.xaxis, 0), (axes.yaxis, 1)):
            for tick in axis.get_major_ticks():
                if text in (tick.label1, tick.label2):
                    low, high = sorted(axis.get_view_interval())
                    return bool(low <= text.get_position()[i] <= high)
    return True


def test_short_names_contain_what_differs() -> None:
    assert short_names(_GRID)[_GRID[0]] == "pre, n_layers=6, init=normal, warmup_steps=0"
    two = ["post+a.b=1+c.d=2", "post+a.b=1+c.d=3"]
    assert list(short_names(two).values()) == ["d=2", "d=3"]
    assert short_names(["pre", "pre+a.b=1"]) == {"pre": "pre", "pre+a.b=1": "pre, b=1"}
    clash = ["x+a.d=1+b.d=2+s=0", "x+a.d=2+b.d=1+s=0", "x+c.d=1+b.d=2+s=0"]
    assert list(short_names(clash).values()) == clash
    assert short_names(["a+b.c=1"]) == {"a+b.c=1": "a, c=1"}
