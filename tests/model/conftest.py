from collections.abc import Callable, Iterator

import pytest
import torch

from minillama.config.norms import NORM_KINDS
from minillama.config.placement import PLACEMENTS
from minillama.model.kernels import library
from minillama.model.norms import NORM_BUILDERS


@pytest.fixture
def scratch_registries(monkeypatch):
    """Let a test register norms and placements that no other test sees."""
    for registry in (NORM_BUILDERS, NORM_KINDS, PLACEMENTS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.fixture(params=["compiled", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run the test with the C kernels, where there is a compiler, and without."""
    monkeypatch.setenv("MINILLAMA_KERNELS", "1" if request.param == "compiled" else "0")
    library.forget()
    if request.param == "compiled" and library.load(torch.float32) is None:
        pytest.skip("no C compiler here")
    yield request.param
    library.forget()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of torch's threads, for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
