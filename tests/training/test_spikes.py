import math

import numpy as np

from minillama.training.spikes import FEWEST_BEFORE_A_SPIKE, is_spike


def test_a_spike_stands_out_from_the_losses_before_it():
    losses = np.random.default_rng(0).normal(3, 0.1, 300).tolist()
    assert is_spike(4.0, losses[:FEWEST_BEFORE_A_SPIKE])
    assert not is_spike(3.2, losses)
    assert not is_spike(4.0, losses[: FEWEST_BEFORE_A_SPIKE - 1])
    for value in (math.nan, math.inf):  # not a spike: something else becomes of it
        assert not is_spike(value, losses)
