"""Element by element functions in float64, by the kernels' names: y the second operand, p = 1.5 and q = 2.5 the kernels' numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

_erf = np.vectorize(math.erf)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_erf(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "swiglu": lambda x, y: x / (1 + np.exp(-x)) * y,
    "geglu_tanh": lambda x, y: _gelu_tanh(x) * y,
    "geglu_erf": lambda x, y: _gelu_erf(x) * y,
    "reglu": lambda x, y: np.maximum(x, 0) * y,
    "sigmoid_gate": lambda x, y: y / (1 + np.exp(-x)),
}
UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "scale": lambda x: x * 1.5,
    "scale_add": lambda x: x * 1.5 + 2.5,
    "clamp": lambda x: np.clip(x, 1.5, 2.5),
    "softcap": lambda x: 1.5 * np.tanh(x / 1.5),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": _gelu_tanh,
    "gelu_erf": _gelu_erf,
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "exp": np.exp,
}


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """In float64, over the last axis."""
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, theta: np.ndarray, interleaved: bool) -> np.ndarray:
    """x `[row, head, dim]` in float64, turned by theta `[row, half]`."""
    half = theta.shape[1]
    out = x.astype(np.float64)
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    c, s = np.cos(theta)[:, None], np.sin(theta)[:, None]
    out[..., a] = x[..., a] * c - x[..., b] * s
    out[..., b] = x[..., a] * s + x[..., b] * c
    return out
