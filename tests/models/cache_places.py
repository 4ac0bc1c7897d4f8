"""Where a cache may lie, as options of `load`: what the tests of cache operations go through. And random ids for the small models."""

from __future__ import annotations

from typing import Any

import numpy as np

N_VOCAB = 397
TWO, THREE = {"devices": "cpu:0,cpu:0", "tensor_split": "70,30"}, {"devices": "cpu:0,cpu:0,cpu:0", "tensor_split": "1,0,1"}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "device, own cells, three devices": {"kv_unified": False, **THREE},
    "host, two devices": {"kv": "host", **TWO},
    "host, own cells": {"kv": "host", "kv_unified": False, "kv_pipeline_depth": 0},
    "host but the first layer, two devices": {"kv": "host", "kv_gpu_layers": 1, **TWO},
    "host, late copies": {"kv": "host", "devices": "cpu:0?link=2&delay=500us,cpu:0?delay=1ms", "kv_pipeline_depth": 2},
}


def ids(seed: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, N_VOCAB, n)]
