"""Whole models on a driver without a GPU: what is recorded and launched fits the GPU, and all is given back.

What kernels compute is not seen: nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.step_driver import SHARED_KIB, StepDriver
from synthetic import write_model

import numba_meta as nm
from numba_meta.kernels.cuda.kernel import CudaKernel

SIZES: dict[str, Any] = {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 256, "types": "q8_0"}
OPTIONS: dict[str, Any] = {"ctx_size": 512, "ubatch_size": 64}
HOST: dict[str, Any] = {"kv": "host", "kv_pipeline_budget": 0, "kv_pipeline_headroom": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "devices", "gpus", "reach_each_other"),
    [
        ("llama", "cuda:0,cuda:0", [(7, 5)], True),
        ("gemma3", "cuda:0,cuda:1", [(9, 0), (9, 0)], False),
        ("gemma3", "cuda:0", [(12, 0)], True),
        ("llama", "cuda:0,cuda:1", [(7, 5), (9, 0)], False),
    ],
    ids=["sm_75", "sm_90", "sm_120", "unequal"],
)
def test_a_model_is_loaded_and_runs(
    architecture: str, devices: str, gpus: list[tuple[int, int]], reach_each_other: bool,
    make_driver: Callable[..., StepDriver], tmp_path: Path,
) -> None:  # fmt: skip
    """A prompt and steps, with the cache on the devices and in the host; heads of 256 need the most shared memory."""
    path = write_model(tmp_path / "model.gguf", architecture, head_dim=256 if architecture == "gemma3" else 64, **SIZES)
    driver = make_driver(gpus, reach_each_other)
    for options in ({}, HOST):
        with nm.load(path, devices=devices, **OPTIONS, **options) as model:
            assert len(model.generate_ids(list(range(5, 75)), 3, ignore_eos=True)) == 3
            assert model.transport.stats["path"] == ("pipelined" if options else "device")
        assert not driver.held and not driver.pinned and not any(driver.live.values()), options
    assert (driver.calls["cuLaunchKernelEx"] > 0) == (max(gpus) >= (9, 0)), "kernels begin early where they can"
    code: dict[str, set[bytes]] = {}
    driver.check_launches()
    for launch in driver.launches:
        code.setdefault(launch.context, set()).add(launch.code)
    assert len(code) == len(gpus)
    if len(set(gpus)) == 2:
        assert not set.intersection(*code.values()), "each GPU runs machine code of its own"


@pytest.mark.parametrize("gpu", SHARED_KIB, ids="sm_{0[0]}{0[1]}".format)
def test_every_gpu_has_room_for_every_kernel(
    gpu: tuple[int, int], make_driver: Callable[..., StepDriver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiling: kernels are chosen and launched for all cache types and sizes of heads, fast and exact."""
    monkeypatch.setattr(CudaKernel, "binary", lambda self, capability: (self.name, self.name.encode()))
    driver = make_driver([gpu], True)
    for head_dim in (64, 128, 192, 256):
        path = write_model(tmp_path / f"{head_dim}.gguf", "gemma3" if head_dim == 256 else "llama", head_dim=head_dim, **SIZES)
        for cache_type in ("f32", "f16", "bf16", "q8_0", "q4_0"):
            for exact in (False, True):
                types = {"cache_type_k": cache_type, "cache_type_v": cache_type}
                with nm.load(path, devices="cuda:0", exact=exact, **types, **OPTIONS) as model:
                    model.generate_ids(list(range(5, 75)), 2, ignore_eos=True)
    driver.check_launches()
    assert len({launch.code for launch in driver.launches}) > 30
