"""Graphs evaluated in float64 numpy: whole, or piece by piece on every device with the collectives between them.

Arrays have the shapes of their tensors (index i0 first). `evaluate` computes one graph; `evaluate_split` a split one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from numba_meta.graph import Graph
from numba_meta.schedule.infer import SplitGraph
from numba_meta.schedule.localize import localize
from numba_meta.split.state import SplitState
from numba_meta.tensor import Tensor

Array = npt.NDArray[Any]
Values = dict[Tensor, Array]


def evaluate(graph: Graph, leaves: Mapping[Tensor, Array]) -> Values:
    """Every tensor of a graph without collectives."""
    values = dict(leaves)
    for node in graph.nodes:
        values[node] = compute(node, [values[source] for source in node.sources])
    return values


def evaluate_split(split: SplitGraph, pieces: Mapping[Tensor, Sequence[Array]], n_devices: int) -> dict[Tensor, list[Array]]:
    """What every device holds of every tensor of a split graph; `pieces[leaf][device]` is what it is given."""
    graphs = [localize(split, device) for device in range(n_devices)]
    held = {leaf: list(pieces[leaf]) for leaf in split.graph.leaves}
    for node in split.graph.nodes:
        (*sources,) = (held[source] for source in node.sources)
        if node.op == "all_reduce":
            held[node] = [np.sum(sources[0], axis=0)] * n_devices
        elif node.op == "gather":
            held[node] = [np.concatenate(sources[0], axis=0)] * n_devices
        else:
            held[node] = [compute(graphs[j].simple[node], [source[j] for source in sources]) for j in range(n_devices)]
        for graph, value in zip(graphs, held[node], strict=True):
            assert value.shape == graph.simple[node].shape, f"{node} on device {graph.device}"
    return held


def piece_of(value: Array, state: SplitState, device: int) -> Array:
    """What a device holds of a tensor that is cut on an axis or MIRRORED."""
    if not state.is_split:
        return value
    indices = [i for start, stop in state.ranges(device) for i in range(start, stop)]
    return np.take(value, np.array(indices, int), axis=state.axis)


def compute(node: Tensor, sources: Sequence[Array]) -> Array:
    """One operation."""
    return _OPERATIONS[node.op](dict(node.params), *sources)


# ---- operations ------------------------------------------------------------------------------------------------------------------------

_UNARY: dict[str, Callable[[Array, float, float], Array]] = {
    "silu": lambda x, p, q: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x, p, q: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x, p, q: np.maximum(x, 0),
    "relu_squared": lambda x, p, q: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x, p, q: 1 / (1 + np.exp(-x)),
    "tanh": lambda x, p, q: np.tanh(x),
    "clamp": lambda x, p, q: np.clip(x, p, q),
    "softcap": lambda x, p, q: p * np.tanh(x / p),
    "scale_add": lambda x, p, q: x * p + q,
}
_GATES = {"swiglu": "silu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "sigmoid_gate": "sigmoid"}


def _unary(params: dict[str, Any], x: Array) -> Array:
    return _UNARY[params["kind"]](x, params["p"], params["q"])


def _glu(params: dict[str, Any], gate: Array, up: Array) -> Array:
    return _UNARY[_GATES[params["kind"]]](gate, 0.0, 0.0) * up


def _rms_norm(params: dict[str, Any], x: Array, weight: Array) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=0, keepdims=True) + params["epsilon"]) * weight


def _softmax(params: dict[str, Any], x: Array) -> Array:
    scaled = x * params["scale"]
    weights = np.exp(scaled - scaled.max(axis=0, keepdims=True, initial=-np.inf))
    return weights / weights.sum(axis=0, keepdims=True)


def _argmax(params: dict[str, Any], x: Array) -> Array:
    return np.argmax(x, axis=0).reshape(x.shape[1], 1, 1, 1)


def _matmul(params: dict[str, Any], weight: Array, x: Array) -> Array:
    return np.einsum("knab,ktab->ntab", weight, x)


def _rope_angles(params: dict[str, Any], positions: Array) -> Array:
    angles = np.outer(np.array(params["inverse_frequencies"]), positions.reshape(-1))
    return params["magnitude"] * np.concatenate([np.cos(angles), np.sin(angles)])[:, :, None, None]


def _rope(params: dict[str, Any], x: Array, angles: Array) -> Array:
    half = angles.shape[0] // 2
    cosine, sine = angles[:half, :, 0, 0][:, None, :, None], angles[half:, :, 0, 0][:, None, :, None]  # [half, 1, t, 1]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if params["interleaved"] else (slice(half), slice(half, 2 * half))
    y = x.copy()
    y[first] = x[first] * cosine - x[second] * sine
    y[second] = x[first] * sine + x[second] * cosine
    return y


def _get_rows(params: dict[str, Any], table: Array, ids: Array) -> Array:
    """Rows that another device holds are zeros here."""
    y = np.zeros((table.shape[0], ids.shape[0], 1, 1))
    for t, row in enumerate(ids.reshape(-1) - params.get("first", 0)):
        if 0 <= row < table.shape[1]:
            y[:, t] = table[:, row]
    return y


def _set_rows(params: dict[str, Any], cache: Array, rows: Array, ids: Array) -> Array:
    y = cache.copy()
    for t, cell in enumerate(ids.reshape(-1)):
        if cell >= 0:
            y[:, cell] = rows[:, t]
    return y


def _store_cells(params: dict[str, Any], table: Array, sequences: Array, positions: Array, cells: Array) -> Array:
    y = table.copy()
    y[positions.reshape(-1), sequences.reshape(-1)] = cells.reshape(-1, 1, 1)
    return y


def _attention(
    params: dict[str, Any], q: Array, k: Array, v: Array, table: Array, sequences: Array, positions: Array, sinks: Array | None = None
) -> Array:
    y = np.zeros((v.shape[0], q.shape[2], q.shape[1], 1))
    for t in range(q.shape[1]):
        position = int(positions[t, 0, 0, 0])
        start = max(0, position + 1 - params["window"]) if params["window"] else 0
        cells = table[start : position + 1, int(sequences[t, 0, 0, 0]), 0, 0]
        for head in range(q.shape[2]):
            kv = (params["first_head"] + head) // params["group"] - params["first_kv"]
            scores = k[:, cells, kv, 0].T @ q[:, t, head, 0]
            if params["softcap"]:
                scores = params["softcap"] / params["scale"] * np.tanh(scores * params["scale"] / params["softcap"])
            if sinks is not None:  # one more score without a value
                scores = np.append(scores, sinks[head] / params["scale"])
            weights = _softmax({"scale": params["scale"]}, scores)
            y[:, head, t, 0] = v[:, cells, kv, 0] @ weights[: len(cells)]
    return y


def _permute(params: dict[str, Any], x: Array) -> Array:
    return np.transpose(x, [params["axes"].index(axis) for axis in range(4)])


def _slice(params: dict[str, Any], x: Array) -> Array:
    return np.take(x, range(params["start"], params["stop"]), axis=params["axis"])


def _concat(params: dict[str, Any], *parts: Array) -> Array:
    cut_axis, ranges, mirrored = params.get("cut", (0, (), ()))
    indices = np.array([i for start, stop in ranges for i in range(start, stop)], int)
    own = [np.take(part, indices, axis=cut_axis) if i in mirrored else part for i, part in enumerate(parts)]
    return np.concatenate(own, axis=params["axis"])


_OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": lambda params, x, y: x + y,
    "sub": lambda params, x, y: x - y,
    "mul": lambda params, x, y: x * y,
    "div": lambda params, x, y: x / y,
    "scale": lambda params, x: x * params["factor"],
    "unary": _unary,
    "glu": _glu,
    "rms_norm": _rms_norm,
    "center": lambda params, x: x - x.mean(axis=0, keepdims=True),
    "softmax": _softmax,
    "argmax": _argmax,
    "matmul": _matmul,
    "rope_angles": _rope_angles,
    "rope": _rope,
    "get_rows": _get_rows,
    "set_rows": _set_rows,
    "store_cells": _store_cells,
    "attention": _attention,
    "reshape": lambda params, x: x.reshape(params["shape"], order="F"),
    "permute": _permute,
    "slice": _slice,
    "contiguous": lambda params, x: x,
    "concat": _concat,
}
