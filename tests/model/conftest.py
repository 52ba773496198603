from collections.abc import Callable, Iterator

import pytest
import torch

from minillama.config import norms as norm_config
from minillama.model.kernels import compiled
from minillama.model.kernels.attention import _load as _load_attention
from minillama.model.kernels.cross_entropy import _load as _load_cross_entropy
from minillama.model.kernels.decode import _load as _load_decode
from minillama.model.kernels.linear import _load as _load_linear
from minillama.model.kernels.matmul import _load as _load_matmul
from minillama.model.kernels.mlp import _load as _load_mlp
from minillama.model.kernels.stack import _load as _load_stack
from minillama.model.kernels.swiglu import _load as _load_swiglu
from minillama.model.norms import NORM_BUILDERS


@pytest.fixture
def scratch_registries(monkeypatch):
    """Let a test register norms and placements that no other test sees."""
    for registry in (NORM_BUILDERS, norm_config.NORM_KINDS, norm_config.PLACEMENTS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def _forget_kernels() -> None:
    for load in (
        compiled.load,
        _load_attention,
        _load_cross_entropy,
        _load_decode,
        _load_linear,
        _load_matmul,
        _load_mlp,
        _load_stack,
        _load_swiglu,
    ):
        load.cache_clear()


@pytest.fixture(params=["compiled", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test with the C kernels, where there is a compiler, and without."""
    monkeypatch.setenv("MINILLAMA_KERNELS", "1" if request.param == "compiled" else "0")
    _forget_kernels()
    if request.param == "compiled" and _load_swiglu(torch.float32) is None:
        pytest.skip("no C compiler here")
    yield request.param
    _forget_kernels()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of torch's threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
