import pytest
import torch

from minillama.errors import ConfigError
from minillama.training.device import check_compile, describe_device, pick_device


def test_auto_takes_the_best_there_is():
    best = "cuda" if torch.cuda.is_available() else None
    best = best or ("mps" if torch.backends.mps.is_available() else "cpu")
    assert pick_device("auto").type == best
    assert pick_device("cpu") == torch.device("cpu")
    assert describe_device(torch.device("cpu")) == "cpu"


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="does not exist here"):
        pick_device(f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(ConfigError, match="unknown"):
        pick_device("gpu")


def test_compiling_on_a_cpu_needs_a_cpp_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler-here")
    with pytest.raises(ConfigError, match=r"no-such-compiler-here.*train\.compile=false"):
        check_compile(torch.device("cpu"))
    check_compile(torch.device("cuda"))
