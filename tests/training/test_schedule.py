import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillama.config.run import OptimConfig
from minillama.training.optim import learning_rate

SCHEDULES = ["cosine", "linear", "constant", "wsd"]


def rates(steps, **fields):
    config = OptimConfig(**fields)
    return [learning_rate(step, config, steps) for step in range(1, steps + 1)]


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert rates(10, lr=1.0, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.1 + 0.45 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]),
        ("constant", [1.0] * 5),
        ("wsd", [1.0] * 4 + [0.1]),
    ],
)
def test_shapes_after_the_peak(schedule, expected):
    got = rates(5, lr=1.0, warmup_steps=1, min_lr_ratio=0.1, schedule=schedule)
    assert got == pytest.approx(expected, abs=1e-12)


def test_wsd_holds_the_peak_and_falls_linearly_over_the_last_fifth():
    got = rates(20, lr=1.0, warmup_steps=2, min_lr_ratio=0.2, schedule="wsd")
    assert got[1:16] == [1.0] * 15
    assert got[16:] == pytest.approx([0.8, 0.6, 0.4, 0.2])


@given(
    schedule=st.sampled_from(SCHEDULES),
    steps=st.integers(1, 60),
    data=st.data(),
    lr=st.floats(1e-8, 10),
    ratio=st.floats(0, 1),
)
def test_every_schedule_keeps_its_promises(schedule, steps, data, lr, ratio):
    warmup = data.draw(st.integers(0, steps))
    got = rates(steps, lr=lr, warmup_steps=warmup, min_lr_ratio=ratio, schedule=schedule)
    top = max(1, warmup)
    assert got[0] > 0
    assert got[top - 1] == lr == max(got)
    assert got[:top] == sorted(got[:top])
    assert got[top - 1 :] == sorted(got[top - 1 :], reverse=True)
    if schedule != "constant" and top < steps:
        assert got[-1] == lr * ratio


def test_a_run_of_one_step_or_of_warm_up_alone_ends_at_the_peak():
    assert rates(1, lr=0.5) == [0.5]
    assert rates(3, lr=0.9, warmup_steps=3)[-1] == 0.9


@pytest.mark.parametrize("step", [0, -1, 11])
def test_a_step_outside_of_the_run_is_refused(step):
    with pytest.raises(ValueError, match="not in 1"):
        learning_rate(step, OptimConfig(), 10)
