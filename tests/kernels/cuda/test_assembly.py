"""Every CUDA kernel compiles and assembles for each capability that it declares, spills nothing, and its largest block finds registers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kernels.cuda.assembly import CAPABILITIES, REGISTERS, kernel_modules, kernels_by_module, ptxas, resources_of_ptx

import numba_meta.kernels.cuda
from numba_meta.kernels import code_cache
from numba_meta.kernels.cuda import api
from numba_meta.kernels.cuda.device import load_f32, store_f32
from numba_meta.kernels.cuda.elementwise import swiglu_quantize
from numba_meta.kernels.cuda.kernel import CudaKernel, Launch, Ptr, cuda_kernel
from numba_meta.kernels.cuda.norm import rms_norm

needs_ptxas = pytest.mark.skipif(ptxas() is None, reason="needs ptxas (package nvidia-cuda-nvcc)")
FOLDER = Path(numba_meta.kernels.cuda.__path__[0])


def check(kernels: Iterable[CudaKernel], capability_of: Callable[[CudaKernel], tuple[int, int]]) -> None:
    """Compiles kernel after kernel; meanwhile ptxas assembles those before it."""
    with ThreadPoolExecutor(1) as pool:
        needs = []
        for kernel in kernels:
            ptx = kernel.ptx(capability_of(kernel))
            # Who lets the next kernel begin early may itself have begun early: it must wait for the one before it.
            assert "griddepcontrol.wait" in ptx or "griddepcontrol.launch_dependents" not in ptx, kernel
            needs.append((kernel, pool.submit(resources_of_ptx, ptx, capability_of(kernel))))
        for kernel, found in needs:
            need = found.result()
            assert need.spill_bytes == 0, (kernel, need)
            assert -(-need.registers // 8) * 8 * kernel.max_threads <= REGISTERS, (kernel, need)
            assert need.shared_bytes <= 48 << 10, (kernel, need)


MODULES = pytest.mark.parametrize("module", kernels_by_module())


@needs_ptxas
@MODULES
def test_kernels_assemble(module: str) -> None:
    """Each kernel for the first capability that it declares."""
    check(kernels_by_module()[module], lambda kernel: kernel.capability)


@pytest.mark.slow
@needs_ptxas
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@MODULES
def test_kernels_assemble_for_newer_ones(module: str, capability: tuple[int, int]) -> None:
    check((kernel for kernel in kernels_by_module()[module] if kernel.capability < capability), lambda kernel: capability)


def test_kernels_begin_early_where_they_can() -> None:
    for kernel in (rms_norm, swiglu_quantize):
        for capability, expected in (((8, 0), 0), ((9, 0), 1)):
            ptx = kernel.ptx(capability)
            assert [ptx.count(f"griddepcontrol.{what};") for what in ("launch_dependents", "wait")] == [expected, expected]


def test_modules_list_their_kernels() -> None:
    """No module that makes kernels lacks `all_kernels`, no kernel of a module and no factory is left out of it."""
    makers = {path.stem for path in FOLDER.glob("*.py") if path.stem != "kernel" and _calls(path, {"cuda_kernel", "CudaKernel"})}
    assert makers <= kernels_by_module().keys()
    for module in kernel_modules():
        kernels = module.all_kernels()
        assert all(isinstance(kernel, CudaKernel) for kernel in kernels)
        own = [value for value in vars(module).values() if isinstance(value, CudaKernel) and value.function.__module__ == module.__name__]
        assert all(kernel in kernels for kernel in own), module
        for name, value in vars(module).items():
            makes_kernels = str(getattr(value, "__annotations__", {}).get("return")) == "CudaKernel"
            if makes_kernels and hasattr(value, "cache_info") and value.__module__ == module.__name__:
                assert value.cache_info().currsize, f"{module.__name__}.all_kernels() leaves {name} out"


def test_kernels_are_told_apart_on_disk() -> None:
    names = [
        f"{kernel.name}-{code_cache.function_digest(kernel.function)}" for kernels in kernels_by_module().values() for kernel in kernels
    ]
    assert sorted(set(names)) == sorted(names)


def _calls(path: Path, functions: set[str]) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Name) and called.id in functions for called in calls)


@api.device_function
def _twice(x):  # type: ignore[no-untyped-def]
    return x + x


@cuda_kernel(launch=lambda arguments, n_rows, gpu: Launch((1, 1, 1), (1, 1, 1)), max_threads=1)
def double(x: Ptr):  # type: ignore[no-untyped-def]
    store_f32(x, _twice(load_f32(x)))


@needs_ptxas
def test_a_device_function_serves_capabilities_in_turn() -> None:
    texts = [double.ptx(capability) for capability in [(7, 5), (9, 0), (8, 0), (7, 5)]]
    targets = [re.findall(r"^\.target (\w+)", text, re.MULTILINE) for text in texts]
    assert targets == [["sm_75"], ["sm_90"], ["sm_80"], ["sm_75"]]
    for text, capability in zip(texts, [(7, 5), (9, 0), (8, 0), (7, 5)], strict=True):
        assert resources_of_ptx(text, capability).registers > 0
        assert "call" not in text  # inlined
