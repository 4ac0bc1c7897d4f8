"""Deliveries and devices for the tests of transport plans."""

from __future__ import annotations

from hypothesis import strategies as st

from numba_meta.memory.placement import round_up
from numba_meta.schedule.transport_plan import DeviceFacts
from numba_meta.schedule.transport_slots import Delivery, Ring, bucket_cells

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def delivery(cell_bytes: int, parts: tuple[int, ...], n_cells: int, n_full: int = 0, layer: int = 0, **how: object) -> Delivery:
    """K and V of the same size; device j holds `parts[j]` of `sum(parts)` of every cell."""
    pieces = tuple(cell_bytes * part // sum(parts) for part in parts)
    fields = {"layer": layer, "name": f"layer.{layer}", "consumer": layer, "n_cells_now": n_cells, "n_cells_full": n_full or n_cells}
    return Delivery(k_cell_bytes=cell_bytes, v_cell_bytes=cell_bytes, k_piece_bytes=pieces, v_piece_bytes=pieces, **{**fields, **how})


def mirrored(cell_bytes: int, n_devices: int, n_cells: int) -> Delivery:
    pieces = (cell_bytes,) * n_devices
    return Delivery(9, "mirrored", 9, cell_bytes, cell_bytes, pieces, pieces, n_cells, n_cells)


def devices(n: int, free_bytes: int | None = None) -> list[DeviceFacts]:
    return [DeviceFacts(f"cpu:{index}", free_bytes) for index in range(n)]


@st.composite
def models(draw: st.DrawFn) -> tuple[int, int, list[Delivery]]:
    """A number of devices, an alignment, and layers cut by heads at random, mirrored or on few devices, some with a sliding window."""
    n_devices = draw(st.integers(1, 4))
    alignment = draw(st.sampled_from([1, 16, 64, 128, 384, 512, 4096]))
    n_full = draw(st.one_of(st.integers(1, 40).map(lambda n: 256 * n), st.integers(1, 9000)))
    n_streams_full = draw(st.integers(1, 4))
    n_streams = draw(st.integers(1, n_streams_full))
    layers = []
    for layer in range(draw(st.integers(1, 4))):
        heads = tuple(draw(st.lists(st.integers(0, 3), min_size=n_devices, max_size=n_devices)))
        k_head, v_head = draw(st.integers(1, 300)), draw(st.integers(1, 300))
        is_mirrored = draw(st.booleans()) and draw(st.booleans())
        n_heads = max(1, max(heads) if is_mirrored else sum(heads))
        held = (n_heads,) * n_devices if is_mirrored else heads
        full = min(n_full, draw(st.sampled_from([256, 768, n_full])))
        now = min(full, bucket_cells(draw(st.integers(1, full))))
        pieces = [tuple(head * n for n in held) for head in (k_head, v_head)]
        layers.append(
            Delivery(layer, f"layer.{layer}", layer, k_head * n_heads, v_head * n_heads, *pieces, now, full, n_streams, n_streams_full)
        )
    return n_devices, alignment, layers


def assert_apart(ring: Ring, one: Delivery) -> None:
    """A brute-force check of what `bind` says: streams of K and V on each device, as intervals within the slot."""
    bindings = ring.bind(one)
    for device in range(one.n_devices):
        spans = []
        for binding, cell_bytes in zip(bindings, (one.k_piece_bytes[device], one.v_piece_bytes[device]), strict=True):
            pitch = round_up(cell_bytes * one.n_cells_now, ring.alignment)
            start = binding.offsets[device]
            spans += [(start + s * pitch, start + s * pitch + cell_bytes * one.n_cells_now) for s in range(one.n_streams) if cell_bytes]
        assert all(start % ring.alignment == 0 for start, _ in spans)
        assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
        assert all(stop <= ring.placement.simple_bytes(device) for _, stop in spans)
