"""Generation and prompts of random models on GPUs, by context: tokens per second, GB/s, and the part of the measured copy bandwidth.

    python benchmarks/gpu_generation.py --shape 8b --types q4_0,q8_0 --caches f16,q8_0 --contexts 0,4096,16384
    python benchmarks/gpu_generation.py --shape 163m --types q8_0 --contexts 0 --devices cuda:0,cuda:0

The files are headers alone: every matrix is a window of one pool of random blocks, packed and copied to the device as real weights are.
Contexts are random bytes instead of being computed. A step is timed from the call to its logits on the host; `replay` is the recorded step
alone, without what Python does before it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import synthetic
from command_line import count, listed, one_of, run_main

import numba_meta as nm
from numba_meta.dtypes import BY_NAME, CACHE_TYPES, DType
from numba_meta.kernels.cuda import packing
from numba_meta.models.files.gguf import GGUFFile
from numba_meta.models.files.gguf_header import TensorInfo
from numba_meta.models.running.recordings import Capacity

COPY_BYTES_PER_SECOND = 4.0e12  # of an H200, read and written (measured: 3,900 to 4,200 GB/s)
SHAPES = {  # layers, width, heads, KV heads, head dim, feed-forward width, vocabulary
    "8b": (32, 4096, 32, 8, 128, 14336, 32000),
    "163m": (30, 576, 9, 3, 64, 1536, 49152),
}
STEPS = 48


def write_header(path: Path, shape: str, type_name: str) -> None:
    """A GGUF file whose data is a hole."""
    n_layer, n_embd, n_head, n_kv, head_dim, n_ff, n_vocab = SHAPES[shape]
    sizes = synthetic.Shape("llama", n_layer, n_embd, n_head, n_kv, head_dim, n_ff, n_vocab, 131072, 0)
    writer = gguf.GGUFWriter(path, "llama")
    synthetic._add_common_keys(writer, sizes, synthetic.FILE_TYPES[type_name])
    synthetic._add_llama_keys(writer, sizes)
    synthetic._add_gpt2_tokenizer(writer, n_vocab)
    dtype, kind = BY_NAME[type_name], gguf.GGMLQuantizationType[type_name.upper()]
    end = 0

    def add(name: str, rows: int, cols: int) -> None:
        nonlocal end
        n_bytes = rows * dtype.row_bytes(cols)
        writer.add_tensor_info(name, (rows, dtype.row_bytes(cols)), np.dtype(np.uint8), n_bytes, raw_dtype=kind)
        end += -(-n_bytes // 32) * 32

    def norm(name: str) -> None:
        nonlocal end
        writer.add_tensor_info(name, (n_embd,), np.dtype(np.float32), 4 * n_embd)
        end += 4 * n_embd

    add("token_embd.weight", n_vocab, n_embd)
    norm("output_norm.weight")
    add("output.weight", n_vocab, n_embd)
    for i in range(n_layer):
        norm(f"blk.{i}.attn_norm.weight")
        add(f"blk.{i}.attn_q.weight", n_head * head_dim, n_embd)
        add(f"blk.{i}.attn_k.weight", n_kv * head_dim, n_embd)
        add(f"blk.{i}.attn_v.weight", n_kv * head_dim, n_embd)
        add(f"blk.{i}.attn_output.weight", n_embd, n_head * head_dim)
        norm(f"blk.{i}.ffn_norm.weight")
        add(f"blk.{i}.ffn_gate.weight", n_ff, n_embd)
        add(f"blk.{i}.ffn_up.weight", n_ff, n_embd)
        add(f"blk.{i}.ffn_down.weight", n_embd, n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    size = path.stat().st_size
    os.truncate(path, -(-size // 32) * 32 + end)


@contextmanager
def random_weights() -> Iterator[None]:
    """Files give random blocks instead of their own bytes."""
    read_rows, pack = GGUFFile.read_rows, packing.pack_part
    rng = np.random.default_rng(0)
    pools: dict[tuple[str, int], np.ndarray] = {}
    known: dict[tuple[str, int, int], np.ndarray] = {}

    def packed_once(rows: np.ndarray, dtype: DType, out: np.ndarray, first: int, n_out: int) -> None:
        """All matrices of a shape are the same pool."""
        key = (dtype.name, n_out, rows.shape[1])
        if first == 0 and key in known:
            out[:] = known[key]
        elif key not in known:
            pack(rows, dtype, out, first, n_out)
            if first + len(rows) == n_out:
                known[key] = out.copy()

    def pooled_rows(_file: GGUFFile, info: TensorInfo, first: int, out: np.ndarray) -> None:
        k = info.shape[0]
        if info.n_rows == 1:
            out[:] = np.ones(k, np.float32).view(np.uint8)
            return
        key = (info.dtype.name, k)
        if key not in pools:
            pools[key] = synthetic.random_matrix(rng, 512, k, info.dtype.name, k**-0.5)
        rows = pools[key].view(np.uint8).reshape(512, -1)
        out[:] = rows[np.arange(first, first + len(out)) % 512]

    GGUFFile.read_rows, packing.pack_part = pooled_rows, packed_once  # type: ignore[method-assign]
    try:
        yield
    finally:
        GGUFFile.read_rows, packing.pack_part = read_rows, pack  # type: ignore[method-assign]


def fill(model: nm.Model, n_tokens: int, context: Any = None) -> None:
    """Makes sequence 0 hold so many tokens, whatever they are."""
    cells = model.context.cells
    cells.clear()
    for at in range(0, n_tokens, 256):
        n = min(256, n_tokens - at)
        cells.take(0, n, [1] * n)
    model.context.cache.write_tables([0])


def random_cache(model: nm.Model) -> None:
    """Small positive numbers, of whatever type, in every cell on the devices."""
    data = np.random.default_rng(0).integers(1, 0x38, 64 << 20, dtype=np.uint8)
    for piece in model.context._memory._resident.pieces:
        for at in range(0, piece.n_bytes, data.size):
            n = min(data.size, piece.n_bytes - at)
            with piece.edit(at, n, keep=False) as out:
                out[:] = data[:n]


def weight_bytes(model: nm.Model) -> int:
    """Bytes of weights that a step of one token reads: all but the embedding, of which it reads a row."""
    plan = model.context.weight_plan
    whole = [sorted(offset[j] for offset in plan.offsets.values()) + [plan.n_bytes[j]] for j in range(len(plan.n_bytes))]
    first = plan.offsets["token_embd.weight"]
    embedding = sum(ends[ends.index(start) + 1] - start for ends, start in zip(whole, first, strict=True))
    return sum(plan.n_bytes) - embedding


def measure(model: nm.Model, n_context: int, cache_token_bytes: int) -> str:
    """A line of the table: a step of one token after so many."""
    fill(model, n_context)
    context = model.context
    wall = []
    for i in range(STEPS + 3):
        begin = time.perf_counter()
        context.decode((100 + i,), (0,), (0,))
        wall.append(time.perf_counter() - begin)
    step = context._recordings[Capacity(1, 1)]._step
    replay = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step.run()
        replay.append(time.perf_counter() - begin)
    seconds, alone = statistics.median(wall[3:]), statistics.median(replay)
    n_bytes = weight_bytes(model) + n_context * cache_token_bytes
    rate = n_bytes / seconds
    return (
        f"generation {n_context:7d}  {1 / seconds:8.1f} t/s  step {1e6 * seconds:8.1f} us  replay {1e6 * alone:8.1f} us  "
        f"{rate / 1e9:6.0f} GB/s  {100 * rate / COPY_BYTES_PER_SECOND:3.0f}%  launches {getattr(step, 'n_launches', 0)}"
    )


def measure_prompt(model: nm.Model, n_tokens: int) -> str:
    """A prompt computed in steps of the model's batch."""
    times = []
    ids = [int(i) for i in np.random.default_rng(1).integers(300, 1000, n_tokens)]
    for _ in range(4):
        model.context.cells.clear()
        begin = time.perf_counter()
        for at in range(0, n_tokens, model.context.ubatch_size):
            part = ids[at : at + model.context.ubatch_size]
            model.context.decode(part, [0] * len(part), [len(part) - 1])
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[1:])
    return f"prompt     {n_tokens:7d}  {n_tokens / seconds:8.0f} t/s  {1e3 * seconds:8.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--types", type=listed(one_of(synthetic.FILE_TYPES)), default="q4_0,q8_0")
    parser.add_argument("--caches", type=listed(one_of(dtype.name for dtype in CACHE_TYPES)), default="f16")
    parser.add_argument("--contexts", type=listed(count(0)), default="0,4096,16384")
    parser.add_argument("--prompts", type=listed(count(0)), default="512")
    parser.add_argument("--devices", default="cuda:0")
    parser.add_argument("--ubatch", type=count(), default=512)
    arguments = parser.parse_args()
    contexts, prompts = arguments.contexts, [n for n in arguments.prompts if n]
    for type_name in arguments.types:
        for cache in arguments.caches:
            with tempfile.TemporaryDirectory() as folder, random_weights():
                path = Path(folder) / "random.gguf"
                write_header(path, arguments.shape, type_name)
                begin = time.perf_counter()
                ctx_size = max([*contexts, *prompts]) + 512
                options = {"devices": arguments.devices, "ctx_size": ctx_size, "ubatch_size": arguments.ubatch}
                with nm.load(path, cache_type_k=cache, cache_type_v=cache, **options) as model:  # type: ignore[arg-type]
                    what = f"{arguments.shape} {type_name} cache {cache} on {arguments.devices}"
                    print(f"{what}: loaded in {time.perf_counter() - begin:.1f} s", flush=True)
                    random_cache(model)
                    n_layer, _, _, n_kv, head_dim, _, _ = SHAPES[arguments.shape]
                    token_bytes = 2 * n_layer * BY_NAME[cache].row_bytes(n_kv * head_dim)
                    for n in contexts:
                        print(f"  {measure(model, n, token_bytes)}", flush=True)
                    for n in prompts:
                        print(f"  {measure_prompt(model, n)}", flush=True)


if __name__ == "__main__":
    run_main(main)
