"""CPUs that may be used, and output that cannot be written; ranks are tested with training."""

import os
import subprocess
import sys

import pytest

from minillama.launch import SafeStream, usable_cpus

ALLOWED = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def container(root, cgroup, files):
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("max 100000", ALLOWED),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("150000 100000", min(ALLOWED, 2)),
        ("99900000 100000", ALLOWED),
        ("garbage", ALLOWED),
    ],
)
def test_the_quota_of_a_container_counts(tmp_path, quota, expected):
    files = {"sys/fs/cgroup/cpu.max": quota}
    assert usable_cpus(container(tmp_path, "0::/\n", files)) == expected


def test_the_smallest_quota_of_a_group_and_its_parents_counts(tmp_path):
    files = {
        "sys/fs/cgroup/a/b/cpu.max": "max 100000",
        "sys/fs/cgroup/a/cpu.max": "100000 100000",
    }
    assert usable_cpus(container(tmp_path, "0::/a/b\n", files)) == 1


def test_a_quota_of_cgroup_v1_counts(tmp_path):
    files = {
        "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
    }
    cgroup = "3:memory:/a\n2:cpu,cpuacct:/a\n"
    assert usable_cpus(container(tmp_path, cgroup, files)) == 1


def test_without_a_quota_the_affinity_counts(tmp_path):
    assert usable_cpus(tmp_path) == ALLOWED


class Full:
    def write(self, text=""):
        raise OSError(28, "No space left on device")

    flush = write

    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [None, Full()])
def test_output_that_cannot_be_written_is_lost_without_an_error(stream):
    safe = SafeStream(stream)
    print("text", file=safe, flush=True)
    assert safe.isatty() is (stream is not None)


def test_a_closed_stream_is_no_terminal_and_takes_no_text(tmp_path):
    stream = (tmp_path / "file").open("w")
    stream.close()
    safe = SafeStream(stream)
    print("text", file=safe, flush=True)
    assert not safe.isatty()


def test_files_do_not_take_the_place_of_closed_standard_streams(tmp_path):
    code = (
        "import os, sys; from minillama.launch import open_missing_streams; "
        "open_missing_streams(); print('lost'); print('lost', file=sys.stderr); "
        f"file = open({str(tmp_path / 'file')!r}, 'w'); file.write(str(file.fileno()))"
    )
    subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code], check=True, timeout=60
    )
    assert int((tmp_path / "file").read_text()) > 2
