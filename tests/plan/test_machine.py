from pathlib import Path

import pytest
import torch

from minillama.errors import ConfigError
from minillama.plan.machine import GIB, VARIABLE, host_memory, memory_limit

MEMINFO = "MemTotal:  8388608 kB\nMemFree: 1 kB\nSwapTotal: 1048576 kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    """Write a small /proc and /sys."""
    for name, text in ({"proc/meminfo": MEMINFO} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 9 * GIB),
        ({"proc/self/cgroup": "0::/\n"}, 9 * GIB),
        (
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"},
            9 * GIB,
        ),
        (
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n"},
            2 * GIB,
        ),
        (  # a group above has the smaller limit
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{GIB}\n",
            },
            GIB,
        ),
        (  # in a container the path is the host's, and the mount shows the container's own group
            {"proc/self/cgroup": "0::/docker/x\n", "sys/fs/cgroup/memory.max": f"{3 * GIB}\n"},
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/x\n3:cpuset:/y\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n",
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n",
            },
            9 * GIB,
        ),
        ({"proc/self/cgroup": "0::/../..\n"}, 9 * GIB),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert host_memory(machine(tmp_path, files)) == limit


def test_this_machine_has_memory() -> None:
    found = host_memory()
    assert found is not None
    assert GIB / 4 < found < 1 << 50


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1.5")
    assert memory_limit(torch.device("cpu")) == 3 * GIB // 2
    assert memory_limit(torch.device("cuda")) == 3 * GIB // 2
    for wrong in ("", "much", "-1", "0", "nan", "inf"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigError, match="must be a number of GiB"):
            memory_limit(torch.device("cpu"))
