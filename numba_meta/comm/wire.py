"""In which type a reduction's float32 elements travel."""

from __future__ import annotations

from typing import Literal

WireType = Literal["f32", "bf16"]
_FROM_2, _FROM_3, _FROM_4 = 32_768, 131_072, 262_144  # elements from which bf16 pays, by the number of ranks


def choose_wire_type(
    n_elements: int, n_ranks: int, *, device: str = "cuda", pairwise: bool = False, exact: bool = False, deterministic: bool = False
) -> WireType:
    """`bf16` for large payloads, else `f32`: below the threshold the casts and the wait cost more than the bytes saved.

    `n_ranks` is the world size if processes are joined, else the number of local devices. Exact and deterministic runs keep f32, and so do
    CPU devices with every communicator: a CPU reduction sums in one order and type at every size, so that a row's bits do not depend on
    how many rows are reduced beside it.
    """
    if exact or deterministic or device == "cpu":
        return "f32"
    threshold = _FROM_2 if pairwise or n_ranks <= 2 else _FROM_3 if n_ranks == 3 else _FROM_4
    return "bf16" if n_elements >= threshold else "f32"
