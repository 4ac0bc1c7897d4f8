"""Tables of a loaded model say what its plans say."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

import numba_meta
from numba_meta.devices.parse import format_bytes
from numba_meta.errors import UsageError
from numba_meta.inspect import Table, call_table, cut_table, facts, meeting_table
from numba_meta.tensor import Tensor

# Type, shape, state, then the piece of each device, for the Llama over 70,30.
EXPECTED = {
    "token_embd.weight": ("q4_0", "[384, 397]", "axis 1: 278|119", "[384, 278]", "[384, 119]"),
    "output_norm.weight": ("f32", "[384]", "mirrored", "[384]", "[384]"),
    "blk.1.attn_q.weight": ("q4_0", "[384, 384]", "axis 1: 256|128", "[384, 256]", "[384, 128]"),
    "blk.1.attn_v.weight": ("q8_0", "[384, 192]", "axis 1: 128|64", "[384, 128]", "[384, 64]"),
    "blk.1.attn_output.weight": ("q4_0", "[384, 384]", "axis 0: 256|128", "[256, 384]", "[128, 384]"),
    "blk.1.ffn_up.weight": ("q4_0", "[384, 512]", "axis 1: 352|160", "[384, 352]", "[384, 160]"),
    "blk.1.ffn_down.weight": ("q4_0", "[512, 384]", "axis 0: 352|160", "[352, 384]", "[160, 384]"),
    "cache_k.1": ("f16", "[192, 512]", "axis 0: 128|64", "[128, 512]", "[64, 512]"),
}


def without_bytes(row):
    return (*row[1:4], *(cell.partition("] ")[0] + "]" for cell in row[4:]))


def test_cuts_of_a_layer(model):
    table = cut_table(model, layer=1)
    assert table.header == ("tensor", "type", "shape", "state", "cpu:0", "cpu:0#1")
    rows = {row[0]: row for row in table.rows}
    assert {name: without_bytes(rows[name]) for name in EXPECTED} == EXPECTED
    assert not any(name.startswith("blk.0") or name.endswith(".0") for name in rows)


def test_all_cuts(model):
    names = [row[0] for row in cut_table(model, layer=None).rows]
    assert len(names) == len(set(names)) == 2 + 2 * 9 + 2 * 2


def test_an_empty_piece_is_a_dash(load):
    rows = {row[0]: row for row in cut_table(load("llama", (1, 0))).rows}
    assert rows["blk.0.attn_q.weight"][-1] == "-"
    assert rows["blk.0.attn_norm.weight"][-1] != "-"  # mirrored


def test_a_layer_that_is_not_there(model):
    with pytest.raises(UsageError, match="layer 2 .* expected 0 to 1"):
        cut_table(model, layer=2)


@pytest.mark.parametrize("split", [(1,), (70, 30), (1, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_bytes_of_pieces_add_up_to_the_buffers(load, name, split):
    model = load(name, split)
    weights = [sum(column) for column in zip(*(cut.piece_bytes for cut in facts.weight_cuts(model)), strict=True)]
    assert weights == [device.weight_bytes for device in model.plan.devices]
    for cut in facts.cache_cuts(model):
        assert cut.shape[0] * cut.shape[1] * 2 >= max(cut.piece_bytes)  # f16
        assert [n // (2 * cut.shape[1]) for n in cut.piece_bytes] == [cut.piece_shape(device)[0] for device in range(len(split))]


def test_meetings(model):
    kinds = [(row[1], row[2]) for row in meeting_table(model).rows]
    layers = [("all-reduce", f"blk.{i}.{name}") for i in range(2) for name in ("attn_output", "ffn_down")]
    assert kinds == [("all-reduce", "embedding"), *layers, ("gather", "logits")]
    assert meeting_table(model).rows[0][3:] == ("[384]", "1.5 KiB")
    assert meeting_table(model, n_rows=16).rows[0][3:] == ("[384, 16]", "24.0 KiB")


def test_one_device_meets_nobody(load):
    assert len(meeting_table(load("llama", (1,)))) == 0


@pytest.mark.parametrize("device", [0, 1])
def test_calls(model, device):
    table = call_table(model, device)
    assert [int(row[0]) for row in table.rows] == list(range(len(table)))
    meets = [row[0] for row in table.rows if row[1] == "meet"]
    assert len(meets) == len(meeting_table(model))
    if device == 0:
        assert meets == [row[0] for row in meeting_table(model).rows]
    product = next(row for row in table.rows if row[2] == "blk.0.ffn_gate" and row[1].startswith("matmul"))
    assert product[3].startswith("blk.0.ffn_gate.weight, ")
    assert product[4].startswith("blk.0.ffn_gate@")
    summing = next(row for row in table.rows if row[1] == "all_reduce")
    assert summing[3] == "embedding on device 0, embedding on device 1"


def test_a_range_of_calls(model):
    assert call_table(model, 1, 4, 9).rows == call_table(model, 1).rows[4:9]


@pytest.mark.parametrize("n_rows", [0, 65])
def test_impossible_steps(model, n_rows):
    with pytest.raises(UsageError, match=f"{n_rows} rows is impossible; expected 1 to 64"):
        meeting_table(model, n_rows)


def test_a_device_that_is_not_there(model):
    with pytest.raises(UsageError, match="device 2 .* expected 0 to 1"):
        call_table(model, 2)


@pytest.mark.parametrize("n_rows", [1, 16, 64])
@pytest.mark.parametrize("split", [(1,), (70, 30), (1, 0), (1, 1, 1, 1)])
def test_what_lives_at_one_time_does_not_overlap(load, split, n_rows):
    plan = facts.step_plan(load("llama", split), n_rows)
    for device, n_bytes in enumerate(plan.workspace.n_bytes):
        lives = facts.lifetimes(plan, device)
        assert lives
        assert max(life.offset + life.n_bytes for life in lives) <= n_bytes
        for i, one in enumerate(lives):
            for other in lives[:i]:
                at_once = one.first <= other.last and other.first <= one.last
                assert not (at_once and one.offset < other.offset + other.n_bytes and other.offset < one.offset + one.n_bytes), (one, other)


@pytest.mark.parametrize("n_rows", [1, 64])
@pytest.mark.parametrize("split", [(1,), (70, 30), (1, 1, 1, 1)])
def test_what_a_call_touches_lives(load, split, n_rows):
    plan = facts.step_plan(load("llama", split), n_rows)
    for device, own in enumerate(plan.devices):
        lives = {life.name: life for life in facts.lifetimes(plan, device)}
        touched = set()
        for i, call in enumerate(own.calls):
            for place in (*call.reads, *call.writes):
                storage = place.storage if isinstance(place, Tensor) else place
                if storage in own.places and storage.n_bytes:
                    assert lives[storage.name].first <= i <= lives[storage.name].last
                    touched.add(storage.name)
        assert touched == lives.keys()


def test_a_step_of_a_few_rows_is_that_of_its_capacity(model):
    assert meeting_table(model, n_rows=3).rows == meeting_table(model, n_rows=16).rows != meeting_table(model, n_rows=17).rows


def test_kinds_of_what_lives_in_a_workspace(model):
    lives = {life.name: life for life in facts.lifetimes(facts.step_plan(model), 1)}
    kinds = {name: lives[name].kind for name in ("embedding", "blk.1.ffn_down", "logits", "ffn_norm.1", "ffn_norm.1.q8")}
    assert list(kinds.values()) == ["summand", "summand", "piece", "tensor", "scratch"]
    assert "logits.gather" not in lives  # read from the first device alone


class Cells(HTMLParser):
    """The texts of a table's cells, row by row."""

    def __init__(self, html):
        super().__init__()
        self.rows = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        self.rows[-1][-1] += data


def test_a_table_as_text_and_html():
    table = Table(("a", "b<c"), (("1", "x & y"), ("long one", "")))
    assert str(table) == "a         b<c\n1         x & y\nlong one"
    assert Cells(table._repr_html_()).rows == [["a", "b<c"], ["1", "x & y"], ["long one", ""]]
    assert len(table) == 2
    assert table.head(1).rows == table.rows[:1]


def test_the_plan_as_text_and_html(model):
    plan = model.plan
    text = plan.table()
    assert "attention of layers 0-1: 3 x KV head with 2 query heads, unit 1: 2|1" in text
    assert "6 meetings of 2 devices per step" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["cpu:0", "cpu:0#1"]
    assert [row[0] for row in Cells(plan._repr_html_().partition("</p>")[2]).rows] == ["device", "cpu:0", "cpu:0#1"]


def test_one_device_is_counted_in_the_singular(load):
    assert "0 meetings of 1 device per step" in load("llama", (1,)).plan.table()


def test_the_plan_says_where_the_cache_lies(llama_path, model):
    assert "KV cache on the device: 512 cells" in model.plan.table()
    with numba_meta.load(llama_path, kv="host", kv_gpu_layers=1, ctx_size=512, ubatch_size=64, threads=1) as hosted:
        n_bytes = 2 * 512 * 192 * 2  # K and V of the other layer, f16
        assert hosted.plan.host_cache_bytes == n_bytes
        assert f"KV cache in the host ({format_bytes(n_bytes)}), of the first 1 layer on the device: 512 cells" in hosted.plan.table()
        assert hosted.plan.devices[0].cache_bytes == n_bytes, "and of the first"
