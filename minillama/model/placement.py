"""The placement table by the name that plugins import it from: a block is built from its slots.

The table is torch-free and stands with the norms' in :mod:`minillama.config.norms`.
"""

from __future__ import annotations

from minillama.config.norms import PLACEMENTS as PLACEMENTS
from minillama.config.norms import Placement as Placement
from minillama.config.norms import Slots as Slots
from minillama.config.norms import register_placement as register_placement
