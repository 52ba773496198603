import pytest

from minillama import norm_config
from minillama.model.norms import NORMS
from minillama.model.placement import PLACEMENTS


@pytest.fixture
def scratch_registries(monkeypatch):
    """Let a test register norms and placements that no other test sees."""
    for registry in (NORMS, PLACEMENTS, norm_config.NORM_KINDS, norm_config.PLACEMENTS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
