"""CUDA kernels: functions over raw addresses, compiled once per compute capability and kept on disk.

    @cuda_kernel(launch=one_thread_per_element, max_threads=256)
    def scale(x: Ptr, y: Ptr, n: Int, factor: Float, n_rows: Ptr): ...

Every parameter is annotated `Ptr` (an address in bytes), `Int` (both int64) or `Float` (float32), as the CPU's are. `launch` is a pure
function that says how many blocks of how many threads run, from the arguments, the most rows that can be live and what the GPU is like: a
recorded step has one launch for every number of live rows, which kernels read from memory.
"""

from __future__ import annotations

import functools
import inspect
import operator
import pickle
import re
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from numba_meta.errors import DeviceError, NumbaMetaError
from numba_meta.interrupts import let_through
from numba_meta.kernels import code_cache
from numba_meta.kernels.code_cache import Float, Int, Ptr

__all__ = ["CudaArguments", "CudaKernel", "Float", "Gpu", "Int", "Launch", "Ptr", "cuda_kernel"]

Capability = tuple[int, int]
OLDEST: Capability = (7, 5)
EARLY: Capability = (9, 0)  # from here on a kernel may be launched while the one before it still runs


@dataclass(frozen=True)
class Gpu:
    """What a launch depends on: compute capability, multiprocessors, bytes of shared memory that a block may have at most."""

    capability: Capability
    n_multiprocessors: int
    max_shared_bytes: int = 48 << 10


@dataclass(frozen=True)
class Launch:
    """Blocks, threads of a block, bytes of dynamic shared memory. No blocks: nothing to do."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0


@dataclass(frozen=True)
class CudaArguments:
    """What a launch passes on: `values` int64 `[n]` (a float32 in the low half), `addresses` int64 `[n]`, that of each value."""

    values: np.ndarray
    addresses: np.ndarray


class CudaKernel:
    """One kernel: its parameters, its machine code per compute capability, how it is launched."""

    def __init__(
        self,
        function: Callable[..., None],
        name: str,
        launch: Callable[[Mapping[str, Any], int, Gpu], Launch],
        max_threads: int,
        capability: Capability,
        shared_bytes: int = 0,
    ) -> None:
        self.name = name
        self.function = function
        self.max_threads = max_threads
        self.capability = capability
        self.shared_bytes = shared_bytes
        self.parameters = {p.name: code_cache.kind_of(name, p) for p in inspect.signature(function).parameters.values()}
        self._launch = launch
        self._binaries: dict[Capability, tuple[str, bytes]] = {}

    def __repr__(self) -> str:
        return f"CudaKernel({self.name})"

    def for_gpu(self, gpu: Gpu) -> CudaKernel:
        """The kernel that this GPU runs: itself. See `VariantKernel`."""
        return self

    def launch(self, arguments: Mapping[str, Any], n_rows: int, gpu: Gpu) -> Launch:
        """The launch for these arguments and at most `n_rows` live rows. Raises `DeviceError` where the GPU cannot do it."""
        if gpu.capability < self.capability:
            have, need = ("{}.{}".format(*each) for each in (gpu.capability, self.capability))
            raise DeviceError(f"kernel {self.name} needs compute capability {need}, this GPU has {have}; it has no variant for it")
        found = self._launch(arguments, n_rows, gpu)
        if found.shared_bytes > gpu.max_shared_bytes:
            raise DeviceError(f"kernel {self.name} needs {found.shared_bytes} bytes of shared memory; a block has {gpu.max_shared_bytes}")
        return found

    def pack(self, **values: Any) -> CudaArguments:
        """The arguments of a launch; every parameter must be given. Addresses and integers must be integers."""
        if values.keys() != self.parameters.keys():
            wrong = sorted(values.keys() ^ self.parameters.keys())
            raise NumbaMetaError(f"kernel {self.name}: arguments {wrong} do not fit its parameters {list(self.parameters)}")
        packed = np.zeros(max(1, len(self.parameters)), np.int64)
        for i, (name, kind) in enumerate(self.parameters.items()):
            try:
                packed[i] = struct.unpack("<q", struct.pack("<f4x", values[name]))[0] if kind is Float else operator.index(values[name])
            except (TypeError, OverflowError, struct.error):
                expected = "a number within float32" if kind is Float else "an integer within int64"
                raise NumbaMetaError(f"kernel {self.name}: argument {name}={values[name]!r} does not fit; expected {expected}") from None
        return CudaArguments(packed, packed.ctypes.data + 8 * np.arange(len(packed)))

    def ptx(self, capability: Capability) -> str:
        """PTX for a compute capability, compiled now."""
        from numba_meta.kernels.cuda import api

        kinds = [api.types.float32 if kind is Float else api.types.int64 for kind in self.parameters.values()]
        with _compiler:
            try:
                ptx = api.compile_ptx(self.function, kinds, capability, self.max_threads)
            except (RuntimeError, OSError) as error:  # of NVIDIA's libraries: not there, or older than the GPU
                raise _does_not_fit(self.name, capability, "compile", error) from None
        return _beginning_early(ptx) if capability >= EARLY else ptx

    def binary(self, capability: Capability) -> tuple[str, bytes]:
        """(name of the entry, cubin) for a compute capability: from disk, or compiled and kept there."""
        with _compiler:
            if capability not in self._binaries:
                self._binaries[capability] = self._load_or_compile(capability)
            return self._binaries[capability]

    def _load_or_compile(self, capability: Capability) -> tuple[str, bytes]:
        digest = code_cache.function_digest(self.function)
        path = code_cache.cache_folder() / _code_digest() / f"{self.name}-{digest}-sm_{capability[0]}{capability[1]}.bin"
        payload = code_cache.read(path)
        if payload is not None:
            name, cubin = pickle.loads(payload)
            return str(name), bytes(cubin)
        let_through()  # compiling takes seconds
        for listener in code_cache.on_compile:
            listener(self.name)
        ptx = self.ptx(capability)
        entry = re.search(r"\.visible \.entry (\w+)\(", ptx)
        assert entry is not None
        cubin = assemble(ptx, capability, self.name)
        code_cache.write(path, pickle.dumps((entry[1], cubin)))
        return entry[1], cubin


def cuda_kernel(
    *,
    launch: Callable[[Mapping[str, Any], int, Gpu], Launch],
    max_threads: int,
    capability: Capability = OLDEST,
    name: str | None = None,
    shared_bytes: int = 0,
) -> Callable[[Callable[..., None]], CudaKernel]:
    """Makes a `CudaKernel` of a function. `name` tells variants that a factory makes apart; `max_threads`: of a block, at most.

    `shared_bytes`: dynamic shared memory that each launch needs, where one of several variants is chosen by it.
    """
    return lambda function: CudaKernel(function, name or function.__name__, launch, max_threads, capability, shared_bytes)


def assemble(ptx: str, capability: Capability, name: str) -> bytes:
    """A cubin of PTX text. Needs no GPU. Raises `DeviceError`."""
    try:
        from cuda.bindings import nvjitlink

        handle = nvjitlink.create(1, [f"-arch=sm_{capability[0]}{capability[1]}"])
    except ImportError as error:
        raise DeviceError(f"CUDA kernels need the package cuda-bindings ({error}); install numba-meta[cuda13] or [cuda12]") from None
    except Exception as error:  # the library is missing, or does not know the GPU
        raise _does_not_fit(name, capability, "assemble", error) from None
    code = ptx.encode()
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, code, len(code), name)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        told = bytes(log).decode(errors="replace").strip("\0 \n").splitlines()
        raise DeviceError(f"kernel {name} does not assemble for sm_{capability[0]}{capability[1]}: {told[0] if told else error}") from None
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)


def _does_not_fit(name: str, capability: Capability, what: str, error: Exception) -> DeviceError:
    told = " ".join(str(error).split()) or type(error).__name__
    return DeviceError(
        f"kernel {name} does not {what} for sm_{capability[0]}{capability[1]} ({told}); install numba-meta[cuda13] (or [cuda12]) anew, "
        "in versions that know this GPU"
    )


def _beginning_early(ptx: str) -> str:
    """PTX whose kernel lets the next one begin, and waits for the one before, unless it says itself where it waits.

    So a kernel may be launched before the one in front of it has ended (`early` launches): its start costs nothing.
    """
    if "griddepcontrol.wait" in ptx:
        return ptx
    begin = ptx.index("{", ptx.index(".visible .entry"))
    first = re.compile(r"^\t(?!\.)\S", re.MULTILINE).search(ptx, begin)  # behind the declarations
    assert first is not None
    return f"{ptx[: first.start()]}\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;\n{ptx[first.start() :]}"


_compiler = threading.RLock()


@functools.cache
def _code_digest() -> str:
    """What the machine code of all CUDA kernels depends on: their sources and the compiler's version."""
    import importlib.metadata as metadata

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""

    compilers = ("nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12")  # of CUDA 13 and of 12
    parts = [code_cache.source_digest(Path(__file__).parent), *map(version, ("numba-cuda", "llvmlite", *compilers))]
    return f"cuda-{code_cache.digest_of(parts)}"
