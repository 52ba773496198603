"""Building, caching and loading the C kernels, and reading their header."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minillama.model.kernels import library, rms_norm

HALF = torch.float16  # compiles in a tenth of float32's time: RMSNorm alone
FOLDER = Path(library.__file__).parent


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and nothing loaded or logged yet."""
    monkeypatch.setenv("MINILLAMA_CACHE", str(tmp_path))
    monkeypatch.delenv("MINILLAMA_KERNELS", raising=False)
    library.forget()
    yield tmp_path
    library.forget()


def has_compiler() -> bool:
    try:
        library.find_compiler()
    except library.BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C compiler here")


def exact(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


# ------------------------------------------------------------------------ without a usable compiler


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-compiler-here", "no C compiler was found"),
        ("false", "the C compiler failed"),
        ("gcc '", "cannot be read as a command"),
        ("true", "wrote no file"),
        ("/no such folder/gcc -O1", "no C compiler was found"),
    ],
)
def test_without_a_compiler_plain_pytorch_runs_and_warns_once(
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: str,
    reason: str,
) -> None:
    monkeypatch.setenv("CC", command)
    x = torch.randn(4, 63).double()
    with caplog.at_level(logging.INFO, logger="minillama"):
        for dtype in (torch.float32, torch.float64, torch.float32):
            y = rms_norm(x.to(dtype), None, 1e-6)
            torch.testing.assert_close(y.double(), exact(x), rtol=1e-5, atol=1e-5)
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert "MINILLAMA_KERNELS=0" in caplog.text


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_compiler_that_hangs_is_ended_with_its_children(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = fresh / "pid"
    compiler = script(fresh / "cc", f"sleep 1000 & echo $! > {started}; wait")
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(library, "_PROBE_TIMEOUT_S", 0.5)
    for dtype in (torch.float32, torch.float64):
        assert library.load(dtype) is None
    assert len(caplog.records) == 1
    assert "timed out" in caplog.text
    status = Path(f"/proc/{started.read_text().strip()}/status")
    end = time.monotonic() + 300  # the signal is delivered some time after kill returns
    while status.exists() and "zombie" not in status.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


@needs_compiler
def test_a_compiler_whose_library_lacks_the_kernels(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (fresh / "empty.c").write_text("int nothing;")
    compiler = " ".join(library.find_compiler())
    body = f'for last; do :; done; {compiler} -shared -fPIC {fresh}/empty.c -o "$last"'
    monkeypatch.setenv("CC", str(script(fresh / "cc", body)))
    assert library.load(HALF) is None
    assert "without the kernels" in caplog.text


def test_a_library_that_is_not_one(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = script(fresh / "cc", 'for last; do :; done; echo nonsense > "$last"')
    monkeypatch.setenv("CC", str(compiler))
    assert library.load(HALF) is None
    assert "cannot be loaded" in caplog.text


@needs_compiler
def test_a_compiler_in_a_folder_with_spaces(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "a folder").mkdir()
    compiler = " ".join(library.find_compiler())
    path = script(fresh / "a folder" / "my cc", f'exec {compiler} "$@"')
    monkeypatch.setenv("CC", str(path))
    assert library.load(HALF) is not None


@needs_compiler
def test_a_compiler_without_a_native_target(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = " ".join(library.find_compiler())
    body = f'case "$*" in *-march=native*) exit 1;; esac\nexec {compiler} "$@"'
    monkeypatch.setenv("CC", str(script(fresh / "old-cc", body)))
    assert library.load(HALF) is not None


def test_a_torch_that_lacks_a_private_name(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library.torch_private, "MISSING", "no attribute _has_storage")
    assert library.load(HALF) is None
    assert torch.__version__ in caplog.text


def test_compiled_kernels_can_be_forbidden(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MINILLAMA_KERNELS", "0")
    assert library.load(torch.float32) is None
    assert not caplog.records
    assert not list(fresh.iterdir())


# --------------------------------------------------------------------------------------- the cache


@needs_compiler
def test_compiled_once_and_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load(HALF) is not None
    (path,) = (fresh / "kernels").iterdir()
    written = path.stat().st_mtime_ns
    library.forget()
    assert library.load(HALF) is not None
    assert path.stat().st_mtime_ns == written
    monkeypatch.setattr(library, "_OPTIONS", [*library._OPTIONS, "-DOTHER"])
    library.forget()
    assert library.load(HALF) is not None
    assert len(list((fresh / "kernels").iterdir())) == 2


@needs_compiler
def test_any_changed_or_added_header_is_compiled_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = fresh / "sources"
    shutil.copytree(FOLDER, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(library, "_FOLDER", sources)
    for n_built, change in enumerate([None, "numbers.h", "rms_norm.c", "added.h"], start=1):
        if change is not None:
            with (sources / change).open("a") as file:
                file.write("/* changed */\n")
        library.forget()
        assert library.load(HALF) is not None
        assert len(list((fresh / "kernels").iterdir())) == n_built


@needs_compiler
def test_a_cache_that_cannot_be_written_does_not_matter(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("MINILLAMA_CACHE", str(fresh / "file"))
    assert library.load(HALF) is not None
    assert (fresh / "file").read_bytes() == b""
    ones = torch.ones(2, 3, dtype=HALF)
    torch.testing.assert_close(rms_norm(ones, None, 0.0), ones, rtol=0, atol=0)


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "overwritten", "empty"])
def test_processes_replace_a_damaged_library_at_the_same_time(fresh: Path, damage: str) -> None:
    assert library.load(HALF) is not None
    (path,) = (fresh / "kernels").iterdir()
    whole = path.read_bytes()
    # Another file, since this process has the old one mapped.
    path.unlink()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.write_bytes({"truncated": whole[:middle], "overwritten": changed, "empty": b""}[damage])
    code = (
        "import torch; from minillama.model.kernels import rms_norm, library; "
        "assert library.load(torch.float16); "
        "print(rms_norm(torch.arange(1.0, 64.0).half(), None, 1e-6).double().sum().item())"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0] == printed[1] != b""
    assert list((fresh / "kernels").iterdir()) == [path]
    assert path.read_bytes() == whole


# -------------------------------------------------------------------------------------- the header


def test_the_header_is_read_as_c_reads_it() -> None:
    functions, structs = library.read_header(
        """#define X(a) f(a);
        /* void not_this(int a); */
        void f(const wide *x, long n,
               double eps, int threads);
        long size(void);
        typedef struct {
            const wide *a, *b; /* two */
            long n, m;
            double eps;
        } job_t;
        int run(const job_t *job);
        """
    )
    assert set(functions) == {"f", "size", "run"}
    assert [p.ctype for p in functions["f"].parameters] == [
        ctypes.c_void_p, ctypes.c_long, ctypes.c_double, ctypes.c_int,
    ]  # fmt: skip
    assert functions["size"].parameters == []
    assert [(f.name, f.is_pointer) for f in structs["job_t"]] == [
        ("a", True), ("b", True), ("n", False), ("m", False), ("eps", False),
    ]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("declared", "planted"),
    [
        (
            "long rows, long dim,\n                      double eps",
            "long rows, double eps, long dim",
        ),
        ("int rms_norm_backward(const scalar *dy", "int rms_norm_backward(const wide *dy"),
    ],
)
def test_a_prototype_unlike_its_function_does_not_compile(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, declared: str, planted: str
) -> None:
    sources = fresh / "sources"
    shutil.copytree(FOLDER, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    header = (sources / "kernels.h").read_text()
    assert declared in header
    (sources / "kernels.h").write_text(header.replace(declared, planted))
    monkeypatch.setattr(library, "_FOLDER", sources)
    assert library.load(HALF) is None


@needs_compiler
def test_arguments_go_by_name_and_kind(fresh: Path) -> None:
    c = library.load(HALF)
    x, gain = torch.ones(2, 3, dtype=HALF), torch.ones(3)
    right = {
        "x": x, "gain": gain, "y": torch.empty_like(x), "r": None, "rows": 2, "dim": 3,
        "eps": 0.0, "cast_first": True, "threads": 1,
    }  # fmt: skip
    c.rms_norm_forward(**right)
    assert torch.equal(right["y"], x)
    for wrong in ({"rows": gain}, {"x": 2}, {"dim": 3.0}, {"dy": x}):
        with pytest.raises((TypeError, AttributeError, ctypes.ArgumentError)):
            c.rms_norm_forward(**right | wrong)
    with pytest.raises(TypeError):
        c.rms_norm_forward(*right.values())


@needs_compiler
def test_structs_are_as_large_in_python_as_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    c = library.load(torch.float32)
    assert c.decoder_size() == ctypes.sizeof(c.decoder_t)
    built = library._build("FLOAT32")
    header = (FOLDER / "kernels.h").read_text()
    with pytest.raises(AssertionError, match="decoder_t"):
        library._bind(built, header.replace("long rotation_stride;", ""))


def test_an_interrupt_is_not_taken_for_a_failed_compiler(monkeypatch):
    communicate = subprocess.Popen.communicate

    def interrupted(self, *args, **kwargs):
        monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
        communicate(self)  # the compiler has ended, so no process is left to kill
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        library._run([sys.executable, "-c", ""], 60)
