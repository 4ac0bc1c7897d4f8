"""What kernels need once they are assembled, told by ptxas: no GPU is needed."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import numba_meta.kernels.cuda
from numba_meta.kernels.cuda.kernel import CudaKernel

REGISTERS = 65536  # of a multiprocessor; a block must find room
CAPABILITIES = [(7, 5), (8, 0), (9, 0)]


@dataclass(frozen=True)
class Resources:
    """Of a kernel: registers of a thread, bytes a thread spills (stored and loaded), static shared memory of a block in bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@cache
def ptxas() -> Path | None:
    """The assembler of the package nvidia-cuda-nvcc, or one on the path; None where there is none."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(root).glob("*/bin/ptxas")):
            return found
    on_path = shutil.which("ptxas")
    return Path(on_path) if on_path else None


def resources(kernel: CudaKernel, capability: tuple[int, int]) -> Resources:
    """Compiles and assembles a kernel; fails with the assembler's words."""
    return resources_of_ptx(kernel.ptx(capability), capability)


def resources_of_ptx(ptx: str, capability: tuple[int, int]) -> Resources:
    """What the one kernel of a PTX text needs."""
    program = ptxas()
    assert program is not None, "no ptxas: install nvidia-cuda-nvcc"
    command = [program, "-v", f"-arch=sm_{capability[0]}{capability[1]}", "-o", "/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    registers = re.findall(r"Used (\d+) registers", told)
    assert len(registers) == 1, told
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", told)
    shared = re.search(r"(\d+) bytes smem", told)
    return Resources(int(registers[0]), sum(map(int, spills)), int(shared[1]) if shared else 0)


def kernel_modules() -> list[ModuleType]:
    """The modules of kernels: those that have `all_kernels`."""
    names = [info.name for info in pkgutil.iter_modules(numba_meta.kernels.cuda.__path__) if info.name != "simulated"]
    modules = [importlib.import_module(f"numba_meta.kernels.cuda.{name}") for name in names]
    return [module for module in modules if hasattr(module, "all_kernels")]


@cache
def kernels_by_module() -> dict[str, list[CudaKernel]]:
    """Every kernel once, under the first module (by name) that lists it."""
    found: dict[str, list[CudaKernel]] = {}
    seen: set[int] = set()
    for module in kernel_modules():
        kernels = [kernel for kernel in module.all_kernels() if id(kernel) not in seen]
        seen.update(map(id, kernels))
        found[module.__name__.rsplit(".", 1)[1]] = kernels
    return found
