"""Tests of how many CPUs a process may use; torchrun's part is tested with training."""

import os

import pytest

from minillama.launch import usable_cpus

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
