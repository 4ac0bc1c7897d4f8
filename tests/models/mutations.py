"""Damaged copies of a small model, and a process that tries each: every one must load and generate, or end in one NumbaMetaError.

    python tests/models/mutations.py SOURCE.gguf FOLDER SEED COUNT      # one JSON line per mutation

A process of its own, so that a crash, a hang or a huge allocation of one mutation is a failed test and not the end of the test run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import resource
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

SECONDS_EACH = 120  # with a kernel to compile, on a busy machine
ADDRESS_SPACE = 24 << 30  # bytes
VALUE = gguf.GGUFValueType


def metadata_values(architecture: str) -> list[tuple[str, object]]:
    """(key, (value, type)) that a model must refuse, or can live with."""
    integers = ["block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv"]
    integers += ["context_length", "attention.key_length", "attention.value_length", "rope.dimension_count"]
    integers += ["attention.sliding_window", "attention.sliding_window_pattern"] if architecture == "gemma3" else []
    floats = ["attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.freq_base_swa"]
    found: list[tuple[str, object]] = []
    for key in integers:
        found += [(f"{architecture}.{key}", (value, VALUE.UINT32)) for value in (0, 1, 3, 7, 1 << 20, (1 << 31) - 1, (1 << 32) - 1)]
        found += [(f"{architecture}.{key}", (-1, VALUE.INT32)), (f"{architecture}.{key}", ("many", VALUE.STRING))]
        found += [(f"{architecture}.{key}", (2.5, VALUE.FLOAT32)), (f"{architecture}.{key}", (1 << 63, VALUE.UINT64))]
    for key in floats:
        found += [(f"{architecture}.{key}", (value, VALUE.FLOAT32)) for value in (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-30, 1e30)]
        found += [(f"{architecture}.{key}", ("small", VALUE.STRING))]
    found += [("general.architecture", (name, VALUE.STRING)) for name in ("mamba9", "", "LLAMA", "llama\nx")]
    found += [("general.alignment", (value, VALUE.UINT32)) for value in (0, 3, 1 << 30)]
    found += [("tokenizer.ggml.model", ("wordpiece9", VALUE.STRING)), ("tokenizer.ggml.eos_token_id", (1 << 20, VALUE.UINT32))]
    found += [(f"{architecture}.rope.scaling.type", (kind, VALUE.STRING)) for kind in ("yarn", "linear", "a\nb")]
    return found


def tensor_values(source: Path, rng: np.random.Generator) -> list[tuple[str, object]]:
    """(name, stand-in): missing, of another shape or type, of numbers that are none."""
    from models.rewriting import REMOVED

    found: list[tuple[str, object]] = []
    for tensor in gguf.GGUFReader(source).tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        found.append((tensor.name, REMOVED))
        wrong = [shape[::-1]] if len(set(shape)) > 1 else [[*shape, 2]]
        wrong += [[n + 32 for n in shape], [max(1, shape[0] // 2), *shape[1:]], [1]]
        found += [(tensor.name, np.zeros(dims, np.float32)) for dims in wrong]
        found += [(tensor.name, np.full(shape, value, np.float32)) for value in (np.nan, np.inf, 0.0, 1e38)]
        found.append((tensor.name, rng.integers(0, 9, shape).astype(np.int32)))
        found.append((tensor.name, rng.standard_normal(shape).astype(np.float64)))
    return found


def mutations(source: Path, folder: Path, seed: int, count: int) -> Iterator[tuple[str, Path]]:
    """(label, file): as many of each kind, drawn by `seed`; a file is gone when the next is asked for."""
    from models.rewriting import REMOVED, rewrite

    rng, raw, path = np.random.default_rng(seed), source.read_bytes(), folder / "mutated.gguf"
    reader = gguf.GGUFReader(source)
    header = reader.data_offset
    architecture = reader.get_field("general.architecture").contents()
    by_key, by_tensor = metadata_values(architecture), tensor_values(source, rng)
    by_key += [(key, REMOVED) for key in reader.fields if not key.startswith("GGUF.")]
    for i in range(count):
        kind = i % 4
        if kind == 0:
            stop = int(rng.integers(0, header if i % 8 else len(raw)))
            path.write_bytes(raw[:stop])
            yield f"the first {stop} of {len(raw)} bytes", path
        elif kind == 1:
            data, n = bytearray(raw), int(rng.integers(1, 4))
            for at in rng.integers(0, header, n):
                data[at] = int(rng.integers(0, 256))
            path.write_bytes(bytes(data))
            yield f"{n} bytes of the header, number {i}", path
        elif kind == 2:
            key, value = by_key[int(rng.integers(len(by_key)))]
            if key == "general.architecture" and value is REMOVED:
                continue
            path.unlink(missing_ok=True)
            yield f"{key} = {'none' if value is REMOVED else value}", rewrite(source, path, {key: value})
        else:
            name, stand_in = by_tensor[int(rng.integers(len(by_tensor)))]
            text = "none" if stand_in is REMOVED else f"{stand_in.dtype} {stand_in.shape} {stand_in.flat[0]}"
            yield f"{name} = {text}", rewrite(source, path, tensors={name: stand_in})


def outcome(path: Path) -> str:
    """`generated`, the line of a NumbaMetaError, or the traceback of anything else."""
    import numba_meta as nm
    from numba_meta.errors import NumbaMetaError

    try:
        with nm.load(path, devices="cpu:0,cpu:0", tensor_split="2,1", parallel=2) as model:
            ids = model.generate_ids([5, 7, 9], 3, ignore_eos=True)
            model.detokenize(ids)
            model.tokenize("the sea")
        return "generated"
    except NumbaMetaError as error:
        return f"error: {error}"
    except Exception:
        return f"failed: {traceback.format_exc()}"


def main(source: Path, folder: Path, seed: int, count: int) -> None:
    """Prints [label, outcome] per mutation."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    for label, path in mutations(source, folder, seed, count):
        faulthandler.dump_traceback_later(SECONDS_EACH, exit=True)
        with contextlib.redirect_stdout(sys.stderr):
            result = outcome(path)
        print(json.dumps([label, result]), flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
