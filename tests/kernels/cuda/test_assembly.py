"""Every CUDA kernel compiles and assembles for each capability that it declares, spills nothing, and its largest block finds registers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from kernels.cuda.assembly import CAPABILITIES, REGISTERS, kernel_modules, ptxas, resources, resources_of_ptx

import numba_meta.kernels.cuda
from numba_meta.kernels.cuda import api
from numba_meta.kernels.cuda.device import load_f32, store_f32
from numba_meta.kernels.cuda.kernel import CudaKernel, Launch, Ptr, cuda_kernel

needs_ptxas = pytest.mark.skipif(ptxas() is None, reason="needs ptxas (package nvidia-cuda-nvcc)")
FOLDER = Path(numba_meta.kernels.cuda.__path__[0])


def every_kernel() -> list[CudaKernel]:
    return [kernel for module in kernel_modules() for kernel in module.all_kernels()]


@needs_ptxas
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("module", kernel_modules(), ids=lambda m: m.__name__.rsplit(".", 1)[1])
def test_kernels_assemble(module: object, capability: tuple[int, int]) -> None:
    for kernel in module.all_kernels():  # type: ignore[attr-defined]
        if kernel.capability > capability:
            continue
        need = resources(kernel, capability)
        assert need.spill_bytes == 0, (kernel, need)
        assert -(-need.registers // 8) * 8 * kernel.max_threads <= REGISTERS, (kernel, need)
        assert need.shared_bytes <= 48 << 10, (kernel, need)


def test_modules_list_their_kernels() -> None:
    """No module that makes kernels lacks `all_kernels`, no kernel of a module and no factory is left out of it."""
    listed = {module.__name__.rsplit(".", 1)[1] for module in kernel_modules()}
    makers = {path.stem for path in FOLDER.glob("*.py") if path.stem != "kernel" and _calls(path, {"cuda_kernel", "CudaKernel"})}
    assert makers == listed
    for module in kernel_modules():
        kernels = module.all_kernels()
        assert all(isinstance(kernel, CudaKernel) for kernel in kernels)
        own = [value for value in vars(module).values() if isinstance(value, CudaKernel) and value.function.__module__ == module.__name__]
        assert all(kernel in kernels for kernel in own), module
        for name, value in vars(module).items():
            makes_kernels = str(getattr(value, "__annotations__", {}).get("return")) == "CudaKernel"
            if makes_kernels and hasattr(value, "cache_info") and value.__module__ == module.__name__:
                assert value.cache_info().currsize, f"{module.__name__}.all_kernels() leaves {name} out"


def test_names_tell_kernels_apart() -> None:
    names = [kernel.name for kernel in every_kernel()]
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
