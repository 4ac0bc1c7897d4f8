"""Drawings show every piece once, to scale and at its offset, and no label lies over another."""

from __future__ import annotations

import sys
from itertools import combinations

import pytest

from numba_meta.errors import NumbaMetaError, UsageError
from numba_meta.inspect import canvas, draw_cuts, draw_placement, draw_workspace, facts

pytest.importorskip("matplotlib", reason="drawings need the extra 'plots'")

SPLITS = [(1,), (70, 30), (1, 0), (5, 3, 2), (1, 1, 1, 1)]
DRAWINGS = {"cuts": draw_cuts, "placement": draw_placement, "workspace": draw_workspace}


def rectangles(figure, kind=""):
    """Rectangles that stand for a piece, by their names."""
    found = {}
    for axes in figure.axes:
        for patch in axes.patches:
            name = patch.get_gid()
            if name and name.startswith(kind) and hasattr(patch, "get_width"):
                assert name not in found
                found[name] = patch
    return found


def texts(figure):
    return [text for axes in figure.axes for text in axes.texts]


def overlap(a, b, tolerance):
    """Whether two boxes have more in common than an edge."""
    return min(a.x1, b.x1) - max(a.x0, b.x0) > tolerance and min(a.y1, b.y1) - max(a.y0, b.y0) > tolerance


def names_of_pieces(cuts, n_devices):
    """One rectangle per piece that is not empty; one for all devices of what they hold whole."""
    split = {f"{cut.name}/{j}" for cut in cuts if cut.state.is_split for j in range(n_devices) if cut.state.extent(j)}
    return split | {f"{cut.name}/all" for cut in cuts if not cut.state.is_split}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_cuts_show_every_piece_of_a_layer(load, name, split):
    model = load(name, split)
    drawn = rectangles(draw_cuts(model, 1))
    matrices = [cut for cut in (*facts.weight_cuts(model), *facts.cache_cuts(model)) if cut.layer in (None, 1) and len(cut.shape) > 1]
    reduced = {f"blk.1.{part}.weight/all-reduce" for part in ("attn_output", "ffn_down")} if len(split) > 1 else set()
    assert drawn.keys() == names_of_pieces(matrices, len(split)) | reduced


def test_cuts_are_to_scale_and_labelled(model):
    figure = draw_cuts(model)
    drawn = rectangles(figure, "blk.0")
    scale = drawn["blk.0.attn_q.weight/0"].get_width() / 384
    sizes = {name: (patch.get_width() / scale, patch.get_height() / scale) for name, patch in drawn.items()}
    assert sizes["blk.0.attn_q.weight/0"] == pytest.approx((384, 256))
    assert sizes["blk.0.attn_q.weight/1"] == pytest.approx((384, 128))
    assert sizes["blk.0.attn_output.weight/1"] == pytest.approx((128, 384))
    assert sizes["blk.0.ffn_up.weight/1"] == pytest.approx((384, 160))
    assert sizes["blk.0.ffn_down.weight/0"] == pytest.approx((352, 384))
    shown = [text.get_text() for text in texts(figure)]
    for label, n in {"256": 2, "352": 3, "160": 3, "gives summands": 2, "q4_0 [384, 384]": 2, "cpu:0#1": 1}.items():
        assert shown.count(label) == n, label
    assert "Vectors, whole on every device unless said otherwise: attn_norm [384], ffn_norm [384]" in shown


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_placement_shows_pieces_at_their_offsets(load, name, split):
    model = load(name, split)
    figure = draw_placement(model)
    weights, plan = rectangles(figure, "weights/"), model.context.weight_plan
    pieces = {f"weights/{cut.name}/{j}": (cut, j) for cut in facts.weight_cuts(model) for j, n in enumerate(cut.piece_bytes) if n}
    assert weights.keys() == pieces.keys()
    for gid, (cut, j) in pieces.items():
        assert weights[gid].get_x() * 2**20 == pytest.approx(plan.offsets[cut.name][j])
        assert weights[gid].get_width() * 2**20 == pytest.approx(cut.piece_bytes[j])
    caches, placement = rectangles(figure, "cache/cache"), model.context.cache_plan.placement
    assert len(caches) == sum(n > 0 for binding in model.context.cache_plan.bindings for n in binding.entry.piece_bytes)
    for j in range(len(split)):
        ends = [patch.get_x() + patch.get_width() for gid, patch in caches.items() if gid.endswith(f"/{j}")]
        assert max(ends, default=0) * 2**20 <= placement.simple_bytes(j) * (1 + 1e-9)
        assert rectangles(figure, "cache/whole/")[f"cache/whole/{j}"].get_width() * 2**20 == pytest.approx(placement.n_bytes)


@pytest.mark.parametrize("layer", [0, 1, None])
@pytest.mark.parametrize("n_rows", [1, 64])
def test_workspace_shows_what_lives_during_a_layer(model, layer, n_rows):
    figure = draw_workspace(model, layer, n_rows)
    drawn, plan = rectangles(figure, "workspace/"), facts.step_plan(model, n_rows)
    expected = set()
    for device in range(2):
        numbers = [i for i, call in enumerate(plan.devices[device].calls) if layer is None or str(layer) in call.node.split(".")]
        lives = [life for life in facts.lifetimes(plan, device) if life.first <= numbers[-1] and life.last >= numbers[0]]
        expected |= {f"workspace/{life.name}/{device}" for life in lives}
        own = [patch.get_bbox() for gid, patch in drawn.items() if gid.endswith(f"/{device}")]
        assert len(own) == len(lives)
        for a, b in combinations(own, 2):
            assert not overlap(a, b, 1e-9), "two tensors at one place and time"
    assert drawn.keys() == expected
    lines = [line for axes in figure.axes for line in axes.lines if (line.get_gid() or "").startswith("meeting/")]
    assert len(lines) == 2 * (len(plan.split.collectives) if layer is None else 2)


@pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS.keys())
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_no_label_lies_over_another(load, name, split, draw):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = draw(load(name, split))
    agg = FigureCanvasAgg(figure)
    agg.draw()
    boxes = [(text.get_text(), text.get_window_extent(agg.get_renderer())) for text in texts(figure) if text.get_text()]
    assert len(boxes) > 5
    for (one, a), (other, b) in combinations(boxes, 2):
        assert not overlap(a, b, 0.5), (one, other)
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= agg.renderer.width and box.y1 <= agg.renderer.height, text


def test_a_notebook_shows_a_drawing(model):
    assert draw_placement(model)._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("draw", [draw_cuts, draw_workspace])
def test_a_layer_that_is_not_there(model, draw):
    with pytest.raises(UsageError, match="layer 7 .* expected 0 to 1"):
        draw(model, 7)


def test_without_matplotlib(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    canvas._figure_class.cache_clear()
    with pytest.raises(NumbaMetaError, match="extra 'plots'") as caught:
        draw_cuts(model)
    assert "\n" not in str(caught.value)


def test_ink_stands_out():
    assert canvas.readable_ink("#0072B2") == canvas.readable_ink("#000000") == "white"
    assert canvas.readable_ink("#E69F00") == canvas.readable_ink("#FFFFFF") == canvas.INK


def test_devices_have_colours_of_their_own():
    assert len({canvas.device_colour(device, 0.35) for device in range(6)}) == 6
    assert canvas.device_colour(0) == canvas.DEVICE_COLOURS[0] == canvas.device_colour(6)
    assert canvas.device_colour(3, 0.0) == "#FFFFFF"
