"""Recording on a GPU: what Python throws away meanwhile does not end a recording."""

from __future__ import annotations

import numpy as np
import pytest

from numba_meta.devices.cuda_driver import PinnedMemory, open_gpu
from numba_meta.devices.cuda_graph import capture

pytestmark = pytest.mark.gpu


def test_memory_that_becomes_garbage_while_a_stream_is_recorded() -> None:
    """Pinned and device memory of a model that nobody closed, say: a collection of garbage may come at any time."""
    gpu = open_gpu(0)
    stream, target = gpu.create_stream(), gpu.allocate(4000)
    source, other, garbage = PinnedMemory(gpu, 4000), gpu.allocate(10), PinnedMemory(gpu, 4000)
    source.data[:] = np.random.default_rng().integers(0, 256, 4000)
    try:
        with capture(gpu, stream) as recorded:
            del garbage
            gpu.free(other)
            gpu.copy_async(target, source.address, 4000, stream)
        recorded.graph.launch(stream)
        gpu.synchronize(stream)
        out = np.zeros(4000, np.uint8)
        gpu.read(target, out)
        assert out.tobytes() == source.data.tobytes()
        recorded.graph.destroy()
    finally:
        gpu.free(target)
        gpu.destroy_stream(stream)
        source.free()
