"""What every CUDA kernel shares: arguments, launches, machine code on disk, errors where a package is missing. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_processes import environment

from numba_meta.errors import DeviceError, NumbaMetaError
from numba_meta.kernels import code_cache, kernel_set
from numba_meta.kernels.cuda import api
from numba_meta.kernels.cuda.copy import fill_zero
from numba_meta.kernels.cuda.device import load_f32, load_i64, store_f32
from numba_meta.kernels.cuda.kernel import CudaKernel, Float, Gpu, Int, Launch, Ptr, assemble, cuda_kernel


def one_thread_per_row(arguments: Any, n_rows: int, gpu: Gpu) -> Launch:
    return Launch((n_rows, 1, 1), (1, 1, 1), arguments["n"])


@cuda_kernel(launch=one_thread_per_row, max_threads=1)
def scaled(x: Ptr, n: Int, factor: Float, n_rows: Ptr):  # type: ignore[no-untyped-def]
    if load_i64(n_rows) > n:
        store_f32(x, load_f32(x) * factor)


GOOD: dict[str, Any] = {"x": 1 << 40, "n": -5, "factor": 1.5, "n_rows": np.int64(7)}


# ---- arguments and launches ------------------------------------------------------------------------------------------------------------


def test_pack() -> None:
    """Integers as int64, a float32 in the low half of its word; each value's address."""
    packed = scaled.pack(**GOOD)
    assert packed.values.tolist()[:2] == [1 << 40, -5] and packed.values[3] == 7
    assert packed.values[2:3].view(np.float32).tolist() == [1.5, 0.0]
    assert packed.addresses.tolist() == [packed.values.ctypes.data + 8 * i for i in range(4)]
    in_order = dict(reversed(GOOD.items()))
    assert scaled.pack(**in_order).values.tolist() == packed.values.tolist()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("x", 1.0, "an integer within int64"),
        ("x", None, "an integer within int64"),
        ("n", "5", "an integer within int64"),
        ("n", 1 << 63, "an integer within int64"),
        ("n", -(1 << 63) - 1, "an integer within int64"),
        ("factor", "much", "a number within float32"),
        ("factor", None, "a number within float32"),
        ("factor", [1.0], "a number within float32"),
        ("factor", 1e39, "a number within float32"),
        ("factor", 1 << 200, "a number within float32"),
    ],
)
def test_pack_refuses_what_does_not_fit(name: str, value: Any, expected: str) -> None:
    with pytest.raises(NumbaMetaError) as caught:
        scaled.pack(**{**GOOD, name: value})
    text = str(caught.value)
    assert text == f"kernel scaled: argument {name}={value!r} does not fit; expected {expected}"


def test_pack_wants_every_argument_and_no_other() -> None:
    with pytest.raises(NumbaMetaError, match=r"^kernel scaled: arguments \['factor'\] do not fit its parameters \['x', 'n', 'factor', 'n"):
        scaled.pack(**{name: value for name, value in GOOD.items() if name != "factor"})
    with pytest.raises(NumbaMetaError, match=r"^kernel scaled: arguments \['m'\] do not fit"):
        scaled.pack(**GOOD, m=3)


def test_parameters_must_be_annotated() -> None:
    with pytest.raises(TypeError, match="annotate parameter y as Ptr, Int or Float"):

        @cuda_kernel(launch=one_thread_per_row, max_threads=1)
        def bare(x: Ptr, y):  # type: ignore[no-untyped-def]
            pass


def test_a_launch_needs_a_capability_and_shared_memory() -> None:
    newer = CudaKernel(scaled.function, "newer", one_thread_per_row, 1, (8, 0))
    arguments = {**GOOD, "n": 1000}
    assert newer.launch(arguments, 3, Gpu((8, 0), 1)) == Launch((3, 1, 1), (1, 1, 1), 1000)
    with pytest.raises(DeviceError, match=r"^kernel newer needs compute capability 8\.0, this GPU has 7\.5; it has no variant for it$"):
        newer.launch(arguments, 3, Gpu((7, 5), 1))
    with pytest.raises(DeviceError, match=r"^kernel newer needs 49153 bytes of shared memory; a block has 49152$"):
        newer.launch({**GOOD, "n": 49153}, 3, Gpu((9, 0), 1))
    assert newer.launch({**GOOD, "n": 49153}, 3, Gpu((9, 0), 1, 100 << 10)).shared_bytes == 49153


# ---- machine code on disk --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that are compiled from now on, with an empty cache."""
    monkeypatch.setenv("NUMBA_META_CACHE", str(tmp_path))
    names: list[str] = []
    monkeypatch.setattr(code_cache, "on_compile", [names.append])
    return names


def again(kernel: CudaKernel) -> CudaKernel:
    """The kernel as another process finds it."""
    return CudaKernel(kernel.function, kernel.name, kernel._launch, kernel.max_threads, kernel.capability)


def cached(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_code_is_kept_on_disk(compiled: list[str], tmp_path: Path) -> None:
    kernel = again(scaled)
    entry, cubin = kernel.binary((8, 0))
    assert cubin[:4] == b"\x7fELF" and entry.encode() in cubin
    assert kernel.binary((8, 0)) == (entry, cubin)
    assert again(scaled).binary((8, 0)) == (entry, cubin)
    assert compiled == ["scaled"] and len(cached(tmp_path)) == 1


def test_each_capability_has_its_own(compiled: list[str], tmp_path: Path) -> None:
    kernel = again(scaled)
    old, new = kernel.binary((7, 5)), kernel.binary((9, 0))
    assert old != new and compiled == ["scaled"] * 2
    assert [path.stem.rsplit("-", 1)[1] for path in cached(tmp_path)] == ["sm_75", "sm_90"]
    assert again(scaled).binary((7, 5)) == old and again(scaled).binary((9, 0)) == new and len(compiled) == 2


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:]])
def test_a_damaged_file_is_compiled_again(compiled: list[str], tmp_path: Path, damage: Any) -> None:
    again(scaled).binary((8, 0))
    (path,) = cached(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert again(scaled).binary((8, 0))[1][:4] == b"\x7fELF"
    assert compiled == ["scaled"] * 2
    assert path.read_bytes() != damage(whole)
    again(scaled).binary((8, 0))
    assert len(compiled) == 2


def test_kernels_of_one_name_are_told_apart(compiled: list[str]) -> None:
    def made(factor: float) -> CudaKernel:
        by = np.float32(factor)

        @cuda_kernel(launch=one_thread_per_row, max_threads=1)
        def variant(x: Ptr):  # type: ignore[no-untyped-def]
            store_f32(x, load_f32(x) * by)

        return variant

    assert made(2.0).binary((8, 0))[1] != made(3.0).binary((8, 0))[1]
    made(2.0).binary((8, 0))
    assert compiled == ["variant"] * 2


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    program = (
        "from numba_meta.kernels import code_cache\n"
        "code_cache.on_compile.append(lambda name: print('compiled', name))\n"
        "from numba_meta.kernels.cuda.copy import fill_zero\n"
        "print(len(fill_zero.binary((8, 0))[1]) > 0)\n"
    )
    variables = environment(NUMBA_META_CACHE=str(tmp_path))
    said = [
        subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True).stdout.split("\n")
        for _ in range(2)
    ]
    assert said == [["compiled fill_zero", "True", ""], ["True", ""]]


def test_what_does_not_assemble_is_told_in_a_line() -> None:
    with pytest.raises(DeviceError) as caught:
        assemble(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f() { nonsense; }\n", (8, 0), "f")
    assert str(caught.value).startswith("kernel f does not assemble for sm_80: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("Failure finding libnvrtc.so\nlooked at: x"), OSError("libnvvm.so.4: cannot open")])
def test_what_nvidias_compiler_refuses_is_told_in_a_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise error

    monkeypatch.setattr(api, "compile_ptx", refuse)
    with pytest.raises(DeviceError, match=r"kernel fill_zero does not compile for sm_80 \(.*\); install numba-meta\[cuda13\]") as caught:
        fill_zero.ptx((8, 0))
    assert "\n" not in str(caught.value)


def test_a_gpu_that_the_linker_does_not_know() -> None:
    with pytest.raises(DeviceError, match=r"kernel f does not assemble for sm_999 \(.*\); install .* in versions that know this GPU"):
        assemble("", (99, 9), "f")


def test_kinds_that_have_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="no kernels for devices of kind 'rocm'; expected cpu or cuda"):
        kernel_set("rocm")
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    kernel_set.cache_clear()
    with pytest.raises(DeviceError, match="simulator runs no models.*; unset it"):
        kernel_set("cuda")
    monkeypatch.undo()
    assert kernel_set("cuda").kind == "cuda"


# ---- packages that are missing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "what"),
    [
        ("numba.cuda", "CUDA kernels need numba-cuda and its packages ("),
        ("cuda.bindings", "CUDA kernels need numba-cuda and its packages (NVIDIA CUDA Python bindings not found"),
        ("cuda.bindings.nvjitlink", "CUDA kernels need numba-cuda and its packages (import of cuda.bindings.nvjitlink"),
    ],
)
def test_a_missing_package_is_told_in_a_line(tmp_path: Path, package: str, what: str) -> None:
    """An import that is blocked, as where the package is not installed."""
    line = _told_without(package, "from numba_meta.kernels.cuda.copy import fill_zero; fill_zero.binary((8, 0))", tmp_path)
    assert line.startswith(what) and line.endswith("install numba-meta[cuda13] or numba-meta[cuda12]")


def test_a_missing_assembler_is_told_in_a_line(tmp_path: Path) -> None:
    line = _told_without("cuda.bindings", "from numba_meta.kernels.cuda.kernel import assemble; assemble('', (8, 0), 'f')", tmp_path)
    assert line.startswith("CUDA kernels need the package cuda-bindings (") and line.endswith("install numba-meta[cuda13] or [cuda12]")


def _told_without(package: str, statement: str, cache: Path) -> str:
    """The one line that a `DeviceError` says where a package cannot be imported."""
    program = f"""
import sys
sys.modules[{package!r}] = None
from numba_meta.errors import DeviceError
try:
    {statement}
except DeviceError as error:
    print(error)
"""
    variables = environment(NUMBA_META_CACHE=str(cache))
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return line
