"""Joins calls that a device can do in one launch: a launch costs a microsecond, and what stays in registers is not read again.

A pure pass over the calls of one device, where its kind has joined kernels: they give the bits of the kernels that they replace. A result
in between that others read too is not joined away. Rules, in this order:

    products of the same activations             several matrix products
    (norms of heads,) ropes of Q and K, stores    one kernel between projections and attention
    (sum over devices | norm,) residual, norm     one kernel behind a block
    ..., or the end of attention, then quantized  the same, which writes quantized activations
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numba_meta.schedule.calls import AddressList, Call, Place, storage_of
from numba_meta.tensor import Tensor

if TYPE_CHECKING:
    from numba_meta.kernels import KernelSet

_ROPES = ("rope_halves", "rope_interleaved")
_NEAR = 8  # calls within which those of one block lie


def fuse(calls: Sequence[Call], kernels: KernelSet, exact: bool, kept: Collection[Place]) -> list[Call]:
    """Fewer calls that do the same. `kept`: storages that somebody else reads, another device or the host."""
    joined = _Joined(calls, kernels, exact, kept)
    joined.products()
    joined.ropes_and_stores()
    joined.sums_and_norms()
    joined.quantized()
    return joined.calls


class _Joined:
    """The calls so far. A rule marks calls as gone and puts the joined one where the last of them stood."""

    def __init__(self, calls: Sequence[Call], kernels: KernelSet, exact: bool, kept: Collection[Place]) -> None:
        self._kernels = kernels
        self._exact = exact
        self._kept = set(kept)
        self._set(list(calls))

    def _set(self, calls: list[Call]) -> None:
        self.calls = calls
        self._readers: dict[Place, list[int]] = {}
        self._writers: dict[Place, list[int]] = {}
        for index, call in enumerate(calls):
            for place in dict.fromkeys(storage_of(place) for place in call.reads):
                self._readers.setdefault(place, []).append(index)
            for place in dict.fromkeys(storage_of(place) for place in call.writes):
                self._writers.setdefault(place, []).append(index)

    def _replace(self, changes: dict[int, Call | None]) -> None:
        """Puts calls in the place of others, or nothing."""
        if changes:
            new = [changes.get(index, call) for index, call in enumerate(self.calls)]
            self._set([call for call in new if call is not None])

    def _name(self, index: int) -> str:
        kernel = self.calls[index].kernel
        return kernel.name if kernel else ""

    def _writer(self, place: Any, before: int, names: Sequence[str]) -> int | None:
        """The one call that writes a tensor, if it is one of these kernels and comes before."""
        if not isinstance(place, Tensor):
            return None
        found = self._writers.get(storage_of(place), [])
        return found[0] if len(found) == 1 and found[0] < before and self._name(found[0]) in names else None

    def _is_read_by(self, place: Any, indices: Sequence[int]) -> bool:
        """Whether these calls alone read a place."""
        storage = storage_of(place)
        return storage not in self._kept and self._readers.get(storage, []) == sorted(indices)

    def _is_free_of_meetings(self, start: int, stop: int) -> bool:
        return not any(call.meets or call.waits or call.records for call in self.calls[start:stop])

    # ---- rules -------------------------------------------------------------------------------------------------------------------------

    def products(self) -> None:
        """Matrix products that follow each other, of the same activations and weights of one layout."""
        changes: dict[int, Call | None] = {}
        at = 0
        while at < len(self.calls):
            group = [at]
            while len(group) < 3 and self._is_same_product(at, group[-1] + 1):
                group.append(group[-1] + 1)
            if len(group) > 1:
                changes |= {**dict.fromkeys(group[:-1]), group[-1]: self._several(group)}
            at = group[-1] + 1
        self._replace(changes)

    def _is_same_product(self, first: int, other: int) -> bool:
        name = self._name(first)
        if other >= len(self.calls) or not name.startswith("matmul_") or self._name(other) != name:
            return False
        one, two = self.calls[first], self.calls[other]
        columns = self._kernels.matmul.choose_columns(one.max_rows)
        return columns <= self._kernels.packed.MOST_VECTOR_COLUMNS and all(
            one.arguments[key] is two.arguments[key] or one.arguments[key] == two.arguments[key] for key in ("x", "x_stride", "k", "n_rows")
        )

    def _several(self, group: Sequence[int]) -> Call:
        calls = [self.calls[index] for index in group]
        first = calls[0]
        weight = first.arguments["w"]
        packed, columns = self._kernels.packed, self._kernels.matmul.choose_columns(first.max_rows)
        exact = packed.activation_format(weight.dtype, self._exact, columns) == "f32"
        most = self._kernels.matmul_vector.most_columns(packed.same_layout(weight.dtype), exact)
        kernel = self._kernels.matmul_several.several_kernel(packed.same_layout(weight.dtype), exact, min(columns, most))
        arguments = {key: first.arguments[key] for key in ("x", "x_stride", "k", "n_rows")}
        for i in range(3):
            own = calls[min(i, len(calls) - 1)].arguments
            arguments |= {f"w{i}": own["w"], f"y{i}": own["y"], f"y{i}_stride": own["y_stride"]}
            arguments[f"n{i}"] = own["n_out"] if i < len(calls) else 0
        return _joined(kernel, arguments, calls)

    def ropes_and_stores(self) -> None:
        """Rotations of Q and K, and the stores of K and V."""
        changes: dict[int, Call | None] = {}
        for store in range(len(self.calls)):
            if not self._name(store).startswith("set_rows_"):
                continue
            k = self._writer(self.calls[store].arguments["x"], store, _ROPES)
            if k is None or not self._is_read_by(self.calls[k].arguments["y"], [store]):
                continue
            found = self._rope_and_store(k, store)
            if found:
                changes |= found
        self._replace(changes)

    def _rope_and_store(self, k: int, store_k: int) -> dict[int, Call | None] | None:
        calls = self.calls
        rope, store = calls[k].arguments, calls[store_k].arguments
        stores = [i for i in range(store_k + 1, min(store_k + _NEAR, len(calls))) if self._name(i) == self._name(store_k)]
        ropes = [i for i in range(max(0, k - _NEAR), k) if self._name(i) == self._name(k)]
        if not stores or not ropes:
            return None
        q, store_v = ropes[-1], stores[0]
        query, value = calls[q].arguments, calls[store_v].arguments
        same = query["table"] is rope["table"] and query["n_rows"] is rope["n_rows"] is store["n_rows"] is value["n_rows"]
        same = same and value["cells"] is store["cells"] and query["head_dim"] == rope["head_dim"] and query["half"] == rope["half"]
        whole = store["n"] == rope["n_head"] * rope["head_dim"] and rope["y_head_stride"] == 4 * rope["head_dim"]
        # All happens where V is stored: nobody may read Q or K's cache before, nor devices meet, who read of each other.
        early = [i for place in (query["y"], store["cache"]) for i in self._readers.get(storage_of(place), []) if q < i < store_v]
        if not (same and whole) or early or any(call.meets for call in calls[q:store_v]):
            return None
        dtype, interleaved = store["cache"].dtype, self._name(k) == "rope_interleaved"
        arguments = {
            "q": query["x"], "q_stride": query["x_stride"], "q_head_stride": query["x_head_stride"], "q_out": query["y"],
            "q_out_stride": query["y_stride"], "q_out_head_stride": query["y_head_stride"], "n_head": query["n_head"],
            "k": rope["x"], "k_stride": rope["x_stride"], "k_head_stride": rope["x_head_stride"], "n_head_kv": rope["n_head"],
            "v": value["x"], "v_stride": value["x_stride"], "n_v": value["n"], "head_dim": rope["head_dim"], "half": rope["half"],
            "table": rope["table"], "table_stride": rope["table_stride"], "cells": store["cells"], "k_cache": store["cache"],
            "k_cell_stride": store["cell_stride"], "v_cache": value["cache"], "v_cell_stride": value["cell_stride"],
            "n_rows": store["n_rows"],
        }  # fmt: skip
        gone, kernel = [q, k, store_k], self._kernels.rope_store.rope_store_kernel(dtype, interleaved)
        norms = self._head_norms(q, k)
        if norms:
            of_q, of_k = (calls[i].arguments for i in norms)
            arguments |= {"q": of_q["x"], "q_head_stride": of_q["x_stride"], "q_stride": of_q["x_stride"] * of_q["rows_per_token"]}
            arguments |= {"k": of_k["x"], "k_head_stride": of_k["x_stride"], "k_stride": of_k["x_stride"] * of_k["rows_per_token"]}
            arguments |= {"q_weight": of_q["weight"], "k_weight": of_k["weight"], "eps": of_q["eps"]}
            gone, kernel = [*norms, *gone], self._kernels.norm_rope_store.norm_rope_store_kernel(dtype, interleaved)
        return {**dict.fromkeys(gone), store_v: _joined(kernel, arguments, [calls[i] for i in (*gone, store_v)])}

    def _head_norms(self, q: int, k: int) -> tuple[int, int] | None:
        """The norms of the heads that two ropes turn, where nothing else reads them."""
        found = []
        for rope in (q, k):
            x, n_head = self.calls[rope].arguments["x"], self.calls[rope].arguments["n_head"]
            norm = self._writer(x, rope, ("rms_norm",))
            if norm is None or not self._is_read_by(x, [rope]) or self.calls[norm].arguments["rows_per_token"] != n_head:
                return None
            found.append(norm)
        of_q, of_k = (self.calls[i].arguments for i in found)
        widest = self._kernels.norm_rope_store.MOST_HEAD_DIM
        fits = of_q["eps"] == of_k["eps"] and of_q["n"] == self.calls[q].arguments["head_dim"] <= widest
        return (found[0], found[1]) if fits else None

    def sums_and_norms(self) -> None:
        """A residual and the norm of it; before it the sum over devices, or another norm."""
        changes: dict[int, Call | None] = {}
        for norm in range(len(self.calls)):
            if self._name(norm) != "rms_norm" or self.calls[norm].arguments["rows_per_token"] != 1:
                continue
            add = self._writer(self.calls[norm].arguments["x"], norm, ("add",))
            if add is not None and add not in changes and self._is_residual(add, norm):
                changes |= self._sum_and_norm(add, norm, changes)
        self._replace(changes)

    def _is_residual(self, add: int, norm: int) -> bool:
        a, n = self.calls[add].arguments, self.calls[norm].arguments
        fits = a["n"] == n["n"] and a["n_rows"] is n["n_rows"] and a["out_stride"] == n["x_stride"] and a["y_stride"] == a["x_stride"]
        return bool(fits) and self._is_free_of_meetings(add, norm)

    def _sum_and_norm(self, add: int, norm: int, changes: Collection[int]) -> dict[int, Call | None]:
        a, n = self.calls[add].arguments, self.calls[norm].arguments
        arguments = {
            "total": a["out"], "total_stride": a["out_stride"], "weight": n["weight"], "y": n["y"], "y_stride": n["y_stride"], "n": n["n"],
            "n_rows": n["n_rows"], "eps": n["eps"],
        }  # fmt: skip
        for x, other in (("x", "y"), ("y", "x")):
            before = self._writer(a[x], add, ("all_reduce", "rms_norm"))
            if before is None or before in changes or not self._is_read_by(a[x], [add]) or not self._is_free_of_meetings(before, add):
                continue
            if storage_of(a[other]) is storage_of(a[x]):
                continue  # doubled: the joined kernel would read what is not written any more
            p = self.calls[before].arguments
            arguments |= {"other": a[other], "other_stride": a[f"{other}_stride"]}
            if p["n"] != a["n"] or p["n_rows"] is not a["n_rows"]:
                continue
            if self._name(before) == "all_reduce":
                arguments |= {"parts": p["parts"], "n_parts": p["n_parts"], "part_stride": p["part_stride"]}
                kernel = self._kernels.reduce_norm.all_reduce_add_rms_norm
            elif p["rows_per_token"] == 1:
                arguments |= {"x": p["x"], "x_stride": p["x_stride"], "x_weight": p["weight"], "x_eps": p["eps"]}
                kernel = self._kernels.norm.norm_add_rms_norm
            else:
                continue
            joined = _joined(kernel, arguments, [self.calls[i] for i in (before, add, norm)])
            return {before: None, add: joined, norm: None}
        arguments |= {"x": a["x"], "x_stride": a["x_stride"], "other": a["y"], "other_stride": a["y_stride"]}
        return {add: _joined(self._kernels.norm.add_rms_norm, arguments, [self.calls[add], self.calls[norm]]), norm: None}

    def quantized(self) -> None:
        """Results that are read by their quantization alone."""
        norm, elementwise, reduce_norm = (getattr(self._kernels, name) for name in ("norm", "elementwise", "reduce_norm"))
        outputs = {"rms_norm": "y", "add_rms_norm": "y", "norm_add_rms_norm": "y", "all_reduce_add_rms_norm": "y"}
        outputs |= dict.fromkeys(("swiglu", "geglu_tanh", "geglu_erf", "reglu", "sigmoid_gate"), "out")
        changes: dict[int, Call | None] = {}
        for index in range(len(self.calls)):
            if self._name(index) != "quantize_rows":
                continue
            q = self.calls[index].arguments
            writers = self._writers.get(storage_of(q["x"]), []) if isinstance(q["x"], Tensor) else []
            if len(writers) != 1 or writers[0] > index or not self._is_read_by(q["x"], [index]):
                continue
            before = writers[0]
            call, name = self.calls[before], self._name(before)
            p, out = call.arguments, outputs.get(name, "y")
            if name in outputs:
                n = p["n"] if p.get("rows_per_token", 1) == 1 else 0
                module = elementwise if out == "out" else reduce_norm if name.startswith("all_reduce") else norm
                kernel = getattr(module, f"{name}_quantize")
            elif name.startswith("attention_combine_"):
                head_dim = p["y_head_stride"] // 4
                n = p["n_head"] * head_dim if name == f"attention_combine_{head_dim}" else 0
                kernel = self._kernels.attention.attention_combine_quantize(head_dim)
            else:
                continue
            if n != q["n"] or p["n_rows"] is not q["n_rows"] or p[f"{out}_stride"] != q["x_stride"]:
                continue
            arguments = {**p, out: q["y"], f"{out}_stride": q["y_stride"]}
            writes = tuple(place for place in call.writes if storage_of(place) is not storage_of(q["x"]))
            changes[before] = replace(call, kernel=kernel, arguments=arguments, writes=(*writes, q["y"]))
            changes[index] = None
        self._replace(changes)


def _joined(kernel: Any, arguments: dict[str, Any], calls: Sequence[Call]) -> Call:
    """One call in place of several: what they wrote is written, unless it is no argument any more."""
    places = [value for value in arguments.values() if isinstance(value, Place)]
    written = {storage_of(place) for call in calls for place in call.writes}
    writes = tuple(place for place in places if storage_of(place) in written)
    peers = tuple(peer for place in places if isinstance(place, AddressList) for peer in place.peers)
    reads = (*(place for place in places if storage_of(place) not in written), *peers)
    last = calls[-1]
    return Call(kernel, arguments, reads, writes, node=last.node, max_rows=last.max_rows)
