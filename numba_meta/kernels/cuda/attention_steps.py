"""What all kernels of attention share: which chunks a row has, which heads a block takes, what a chunk leaves and how it is folded."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_meta.kernels.cuda.attention_intrinsics import quotient_u32
from numba_meta.kernels.cuda.device import add, device_function, exp2, fma, load_f32, load_i32, maximum, mul

MIN_CHUNK, CHUNK_STEP = 128, 32  # positions; chunks begin at multiples of their size, which is MIN_CHUNK or a larger multiple of CHUNK_STEP
MOST_CHUNKS = 32  # a row with more positions has larger chunks
TILE_HEADS = 8  # query heads of one KV head that a block takes
LOWEST = np.float32(-1e30)  # below every score; finite, so that differences are never NaN
LOG2_E = np.float32(math.log2(math.e))


@functools.cache
def cap_score(softcap: float) -> Any:
    """A device function: a score times log2(e) becomes softcap * tanh(score / softcap) times log2(e); with a softcap of 0 it stays."""
    capped, most = softcap > 0, np.float32(softcap * math.log2(math.e))

    @device_function
    def cap(score):  # type: ignore[no-untyped-def]
        if capped:
            return mul(most, math.tanh(score / most))
        return score

    return cap


def chunk_positions(n_positions: int) -> int:
    """Positions of a chunk, for a row that attends to so many: as few as MOST_CHUNKS chunks need to hold them all."""
    return max(MIN_CHUNK, ((n_positions + MOST_CHUNKS - 1) // MOST_CHUNKS + CHUNK_STEP - 1) // CHUNK_STEP * CHUNK_STEP)


def record_bytes(head_dim_v: int) -> int:
    """Bytes of what a chunk gives for one head of one row: weighted values, largest score m, weight l, as float32; 8 unused."""
    return 4 * head_dim_v + 16


def head_tiles(arguments: Mapping[str, Any]) -> int:
    """Tiles of at most TILE_HEADS heads over the KV heads that n_head heads from first_head on read."""
    first, n, group = arguments["first_head"], arguments["n_head"], arguments["group"]
    n_kv = (first + n - 1) // group + 1 - first // group if n else 0
    return n_kv * -(-group // TILE_HEADS)


_chunk_positions = device_function(chunk_positions)


@device_function
def first_attended(position, window):  # type: ignore[no-untyped-def]
    """The lowest position that a row attends to."""
    return max(np.int64(0), position - window + 1) if window > 0 else np.int64(0)


@device_function
def row_chunks(positions, row, window):  # type: ignore[no-untyped-def]
    """(first attended position, end of them, positions of a chunk, the first chunk) of a row; the end is 0 for one at position -1."""
    position = np.int64(load_i32(positions + 4 * row))
    first = first_attended(position, window)
    size = _chunk_positions(position + 1 - first)
    return first, position + 1, size, np.int64(quotient_u32(np.int32(first), np.int32(size)))


@device_function
def chunks_of_row(positions, row, window):  # type: ignore[no-untyped-def]
    """How many chunks a row has: from the one that holds its first attended position on."""
    first, stop, size, first_chunk = row_chunks(positions, row, window)
    return quotient_u32(np.int32(stop - 1), np.int32(size)) - np.int32(first_chunk) + 1 if first < stop else np.int32(0)


@device_function
def tile_heads(tile, first_head, n_head, group):  # type: ignore[no-untyped-def]
    """(KV head, head of the tile's first place, first head, end of heads) of a tile; the last three count from the device's first head.

    The place of a head in its tile does not depend on which heads the device has.
    """
    per_kv = (group + TILE_HEADS - 1) // TILE_HEADS
    kv = first_head // group + tile // per_kv
    place = kv * group + tile % per_kv * TILE_HEADS - first_head
    end = min(min(place + TILE_HEADS, (kv + 1) * group - first_head), n_head)
    return kv, place, max(place, np.int64(0)), end


@device_function
def fold_factors(m, part_m):  # type: ignore[no-untyped-def]
    """(new largest score, factor of what was folded before, factor of the part)."""
    largest = maximum(m, part_m)
    return largest, exp2(m - largest), exp2(part_m - largest)


@device_function
def folded(total, part, by_total, by_part):  # type: ignore[no-untyped-def]
    """One element of a fold: the same bits wherever it is done."""
    return fma(part, by_part, mul(total, by_total))


@device_function
def with_sink(weight, m, sinks, head):  # type: ignore[no-untyped-def]
    """A row's sum of weights with that of the head's sink, which has no value; 0 stays where nothing was attended to. m: in base 2."""
    if sinks == 0 or weight == np.float32(0.0):
        return weight
    return add(weight, exp2(fma(load_f32(sinks + 4 * head), LOG2_E, -m)))


@device_function
def quotient(total, weight):  # type: ignore[no-untyped-def]
    """total / weight; 0 where nothing was attended to."""
    return total / (weight if weight != np.float32(0.0) else np.float32(1.0))
