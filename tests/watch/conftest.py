"""The fixture that writes an ablation's folder is that of tests/ablation."""

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[1] / "ablation" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("ablation_conftest", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)
make_ablation = _MODULE.make_ablation
