"""A run that cannot fit is refused with the estimate before anything is built."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillama.errors import ConfigError
from minillama.model.transformer import Transformer
from minillama.training import memory
from minillama.training.memory import least_bytes, memory_of, refuse_beyond_memory
from minillama.training.trainer import train

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("model.dim", 2_000_000, "weights"),
        ("model.ffn_dim", 10**12, "weights"),
        ("model.vocab_size", 10**10, "weights"),
        ("model.n_layers", 10**9, "weights"),
        ("model.max_seq_len", 10**11, "rotations"),
        ("train.batch_size", 10**10, "a step"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_estimate(tiny, monkeypatch, field, value, part):
    monkeypatch.setattr("minillama.training.trainer.prepare", lambda config: 1 / 0)
    with pytest.raises(ConfigError, match=r"needs at least .* GiB of memory .*; lower") as caught:
        train(tiny(**{field: value}), progress=False)
    assert caught.value.exit_status == 2
    assert least_bytes(tiny(**{field: value}))[part] > memory_of(CPU)


def test_the_bound_is_below_what_is_there(tiny, monkeypatch):
    config = tiny(**{"model.tie_embeddings": False, "model.n_kv_heads": 1})
    numbers = sum(p.numel() for p in Transformer(config.model).parameters() if p.ndim > 1)
    parts = least_bytes(config)
    assert parts["weights"] == 4 * numbers + 2 * memory._LAYER_OBJECTS
    assert parts["gradients and optimizer"] == 12 * numbers
    monkeypatch.setattr(memory, "memory_of", lambda device: sum(parts.values()))
    refuse_beyond_memory(config, CPU)
    monkeypatch.setattr(memory, "memory_of", lambda device: sum(parts.values()) - 1)
    with pytest.raises(ConfigError, match="lower model"):
        refuse_beyond_memory(config, CPU)


class Bytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make."""

    def __init__(self):
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.made += tensor.untyped_storage().nbytes()
        return out


def test_a_step_makes_more_than_the_bound_says(tiny):
    config = tiny(**{"model.n_layers": 4})
    model, tokens = Transformer(config.model), torch.zeros(4, 16, dtype=torch.int64)
    with Bytes() as bytes_:
        model.loss(tokens, tokens).backward()
    assert least_bytes(config)["a step"] < bytes_.made


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", (str(tmp_path / "memory.max"),))
    assert memory_of(CPU) == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_of(CPU) > 1_000_000
