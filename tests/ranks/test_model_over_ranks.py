"""One model over ranks gives what one process gives: tokens always, bits wherever summands are added in the same order."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from mpirun import Launch, check_failed, needs_mpi
from ranks.playing import Case, play
from synthetic import write_model

pytestmark = needs_mpi
PLAY = str(Path(__file__).parent / "programs" / "play.py")
slow = pytest.mark.slow


SIZES: dict[str, Any] = {"n_layer": 3, "n_embd": 128, "head_dim": 32, "n_ff": 256, "types": "q8_0", "context_length": 2048}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    llama = write_model(folder / "llama.gguf", n_head=8, n_head_kv=4, n_vocab=300, seed=41, **SIZES)
    gemma = write_model(folder / "gemma3.gguf", "gemma3", n_head=4, n_head_kv=2, n_vocab=320, seed=42, **SIZES)
    return {"llama": str(llama), "gemma3": str(gemma)}


@pytest.fixture(scope="module")
def real_models(request: pytest.FixtureRequest) -> dict[str, str]:
    return {name: str(request.getfixturevalue(f"{name}_path")) for name in ("smollm2", "gemma3")}


def over_ranks(n: int, folder: Path, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """What each rank played, by case and rank."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    ended = Launch(n, folder, str(folder), str(folder / "cases.json"), program=PLAY).end(240)
    assert ended.status == 0 and ended.ranks == dict.fromkeys(range(n), 0) and ended.left == [], ended.stderr
    by_rank = [json.loads((folder / f"played.{rank}.json").read_text()) for rank in range(n)]
    return [list(each) for each in zip(*by_rank, strict=True)]




def in_one_process(options: dict[str, Any], devices: str) -> dict[str, Any]:
    return {**options, "devices": devices.replace(";", ",")}


def check_same(models: dict[str, str], n: int, folder: Path, loads: list[dict[str, Any]], same_bits: bool = True) -> None:
    """Every load, on every rank, against one process with the same devices. Loads name the devices of every rank."""
    cases = [Case(path, options) for path in models.values() for options in loads]
    for case, by_rank in zip(cases, over_ranks(n, folder, cases), strict=True):
        alone = play(Case(case.path, in_one_process(case.options, case.options["devices"])))
        host = case.options.get("kv") == "host"
        for one in by_rank:
            assert one["ids"] == alone["ids"], case
            assert not same_bits or one["bits"] == alone["bits"], case
            assert one["path"] in (("pipelined", "ordered") if host else ("device",)), case
        assert sum(one["host_bytes"] for one in by_rank) == alone["host_bytes"] and (alone["host_bytes"] > 0) == host
        assert sum(one["weight_bytes"] for one in by_rank) == alone["weight_bytes"]
        staged = [one for one in by_rank if one["host_bytes"]]
        assert {one["path"] for one in staged} == ({"pipelined"} if host else set()), case


def both(*loads: dict[str, Any]) -> list[dict[str, Any]]:
    """Each load with the cache on the devices and in the hosts."""
    return [{**load, "kv": kv} for load in loads for kv in ("device", "host")]


ONE_EACH = {n: ";".join(["cpu:0"] * n) for n in range(1, 5)}


def test_two_ranks_give_what_one_process_gives(models, tmp_path):
    uneven = {"devices": "cpu:0,cpu:0;cpu:0", "tensor_split": "1,2,3"}
    check_same({"llama": models["llama"]}, 2, tmp_path, [{"devices": ONE_EACH[2]}, *both(uneven)])


@slow
@pytest.mark.parametrize(
    ("n", "loads"),
    [
        (1, both({"devices": "cpu:0"}, {"devices": "cpu:0,cpu:0"})),
        (2, both({"devices": ONE_EACH[2]}, {"devices": ONE_EACH[2], "tensor_split": "70,30"})),
        (2, both({"devices": ONE_EACH[2], "tensor_split": "1,0"}, {"devices": ONE_EACH[2], "tensor_split": "0,1"})),
        (2, both({"devices": "cpu:0,cpu:0;cpu:0"}, {"devices": "cpu:0,cpu:0;cpu:0", "tensor_split": "0,0,1"})),
        (3, both({"devices": ONE_EACH[3]}, {"devices": ONE_EACH[3], "tensor_split": "1,0,2"})),
        (4, both({"devices": ONE_EACH[4]}, {"devices": ONE_EACH[4], "tensor_split": "3,1,1,2"})),
    ],
)
def test_ranks_give_what_one_process_gives(models, n, loads, tmp_path):
    check_same(models, n, tmp_path, loads)


@slow
def test_ranks_of_several_devices_each(models, tmp_path):
    """Each rank adds its own summands first: another order of addition than one process has, so tokens alone are the same."""
    check_same(models, 2, tmp_path, both({"devices": "cpu:0,cpu:0;cpu:0,cpu:0"}, {"devices": "cpu:0;cpu:0,cpu:0"}), same_bits=False)


@slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_deterministic_bits_are_the_same_on_any_ranks(models, n, exact, tmp_path):
    options = {"deterministic": True, "exact": exact}
    devices = [ONE_EACH[n], *(["cpu:0,cpu:0;cpu:0"] if n == 2 else [])]
    loads = [{**options, "devices": each, "kv": kv} for each in devices for kv in ("device", "host")]
    cases = [Case(path, load) for path in models.values() for load in loads]
    for case, by_rank in zip(cases, over_ranks(n, tmp_path, cases), strict=True):
        alone = play(Case(case.path, {**options, "devices": "cpu:0"}))
        assert {(one["bits"], tuple(one["ids"])) for one in by_rank} == {(alone["bits"], tuple(alone["ids"]))}, case


@slow
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_deterministic_bits_of_real_models(real_models, n, tmp_path):
    """`n` devices and `n` ranks, each row alone and in a batch of four: the bits of one device. SmolLM2 has 3 KV heads, Gemma 1."""
    options = {"deterministic": True, "parallel": 4, "exact": False}
    splits = [None, {1: "5", 2: "70,30", 3: "1,0,2", 4: "3,1,0,2"}[n]]
    loads = [{**options, "devices": ONE_EACH[n], "tensor_split": split} for split in splits]
    cases = [Case(path, load, play="rows") for path in real_models.values() for load in loads]
    for case, by_rank in zip(cases, over_ranks(n, tmp_path, cases), strict=True):
        whole = play(Case(case.path, {**options, "devices": "cpu:0"}, play="rows"))
        assert whole["alone"] == whole["together"] and len(set(whole["alone"])) == 4
        for played in (*by_rank, play(Case(case.path, in_one_process(case.options, ONE_EACH[n]), play="rows"))):
            assert played == whole, case


@slow
def test_batches_and_edits_and_draws(models, tmp_path):
    """Sequences together; shift, copy and remove in a cache of which each rank has its heads; one seed for all ranks."""
    tight = {"parallel": 2, "ctx_size": 112, "kv_unified": False}  # room for 56 tokens each
    ways = [
        ("batch", {"parallel": 4}), ("batch", {"parallel": 4, "kv": "host"}), ("edited", tight), ("edited", {**tight, "kv": "host"}),
        ("sampled", {}),
    ]  # fmt: skip
    devices = {"devices": ONE_EACH[2], "tensor_split": "3,1"}
    cases = [Case(path, {**options, **devices}, play=way, n_tokens=24) for path in models.values() for way, options in ways]
    for case, by_rank in zip(cases, over_ranks(2, tmp_path, cases), strict=True):
        assert by_rank[0] == by_rank[1], case
        alone = play(Case(case.path, in_one_process(case.options, ONE_EACH[2]), play=case.play, n_tokens=24))
        if case.play == "sampled":
            assert by_rank[0]["seeded"] == alone["seeded"] and by_rank[0]["drawn"][0] != by_rank[0]["drawn"][1]
        else:
            assert by_rank[0] == alone, case


@slow
def test_all_ranks_take_the_ordered_path_where_one_must(models, tmp_path):
    load = {"devices": "cpu:0;cpu:0?pin=0", "kv": "host"}
    ((first, second),) = over_ranks(2, tmp_path, [Case(models["llama"], load)])
    assert first["ids"] == second["ids"] == play(Case(models["llama"]))["ids"]
    assert first["path"] == second["path"] == "ordered"
    assert "another rank has no ring" in first["reason"] and "not pinned" in second["reason"]


@slow
@pytest.mark.parametrize("room", [400_000, 700_000])
def test_ranks_leave_the_ring_together_when_one_has_no_room_for_it(models, room, tmp_path):
    """One rank has `room` bytes more than the ordered path takes: rings of 256 cells fit (384 KiB), those of 2048 do not (3 MiB)."""
    options = {"kv": "host", "ctx_size": 2048, "kv_pipeline_headroom": 0}
    ordered = play(Case(models["llama"], {**options, "devices": "cpu:0,cpu:0", "kv_pipeline_depth": 0}, play="growing"))
    load = {**options, "devices": f"cpu:0;cpu:0?mem={(ordered['memory'][1] + room) // 1024}K"}
    ((first, second),) = over_ranks(2, tmp_path, [Case(models["llama"], load, play="growing")])
    assert first["ids"] == second["ids"] == ordered["ids"]
    assert first["paths"] == second["paths"]
    assert first["paths"][0] == "pipelined" and first["paths"][2] == "ordered"


@slow
def test_what_ranks_cannot_do_yet(models, tmp_path):
    ((first, second),) = over_ranks(2, tmp_path, [Case(models["llama"], {}, play="refused")])
    assert first == second and first["ids"] == play(Case(models["llama"]))["ids"]
    assert [text.split(":")[0] for text in first["said"]] == ["2 ranks cannot save a state yet", "2 ranks cannot load a state yet"]


@slow
@pytest.mark.parametrize(
    ("options", "of_rank", "reason"),
    [
        ({}, {"1": {"options": {"ctx_size": 256}}}, "has ctx_size 256, rank 0"),
        ({"devices": "cpu:0;cpu:0;cpu:0"}, {}, "are those of 3 ranks, and 2 ranks run"),
        ({"devices": "cpu:0;cpu:1"}, {}, "device cpu:1 is not there"),
        ({"devices": "cpu:0;cpu:0?mem=40K"}, {}, "): cpu:0: weights need"),
        ({"tensor_split": "1,2,3"}, {}, "3 entries for 2 devices"),
    ],
)
def test_a_load_that_fails_ends_all_ranks_with_one_reason(models, options, of_rank, reason, tmp_path):
    (tmp_path / "cases.json").write_text(json.dumps([asdict(Case(models["llama"], options, of_rank=of_rank))]))
    ended = Launch(2, tmp_path, str(tmp_path), str(tmp_path / "cases.json"), program=PLAY).end(60)
    check_failed(ended, 2, reason)


@slow
@pytest.mark.parametrize("content", ["another", "cut short", "garbage", "empty", "none"])
def test_a_file_that_one_rank_lacks_or_has_otherwise(models, content, tmp_path):
    data = Path(models["llama"]).read_bytes()
    path = tmp_path / "own.gguf"
    if content == "another":
        write_model(path, n_head=8, n_head_kv=4, n_vocab=301, **SIZES)
    elif content != "none":
        path.write_bytes({"cut short": data[: len(data) // 2], "garbage": data[::-1], "empty": b""}[content])
    (tmp_path / "cases.json").write_text(json.dumps([asdict(Case(models["llama"], of_rank={"1": {"path": str(path)}}))]))
    ended = Launch(2, tmp_path, str(tmp_path), str(tmp_path / "cases.json"), program=PLAY).end(60)
    check_failed(ended, 2, "has model header sha256" if content == "another" else "rank 1 (")
    assert content == "another" or "own.gguf" in ended.stderr


STORY = """
import sys
import numba_meta as nm

with nm.load(sys.argv[1], ctx_size=64, exact=True) as model:
    print(model.generate_ids((5, 6, 7), 8, ignore_eos=True), flush=True)
"""


@slow
def test_a_program_that_knows_nothing_of_ranks(models, tmp_path):
    (tmp_path / "story.py").write_text(STORY)
    ended = Launch(2, tmp_path, models["gemma3"], program=str(tmp_path / "story.py")).end(120)
    alone = play(Case(models["gemma3"], {"ctx_size": 64}, (5, 6, 7), 8))
    assert ended.stdout.splitlines() == [str(alone["ids"])] * 2, ended.stderr
    assert ended.status == 0 and ended.ranks == {0: 0, 1: 0} and ended.left == []


@slow
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "has gone without a word"), (signal.SIGTERM, "was told to end (SIGTERM)")]
)
def test_a_rank_that_ends_in_the_middle_of_a_text_ends_all(models, number, reason, tmp_path):
    launch = Launch(3, tmp_path, str(tmp_path), models["llama"], program=str(Path(PLAY).with_name("endless.py")))
    launch.wait_for("ready", 120)
    launch.signal_rank(1, number)
    ended = launch.end()
    check_failed(ended, 3, reason)
    assert "rank 1 (" in ended.stderr


REAL_LOADS: dict[int, list[dict[str, Any]]] = {
    1: [{"devices": "cpu:0,cpu:0", "tensor_split": "70,30"}],
    2: [
        {"devices": ONE_EACH[2]}, {"devices": ONE_EACH[2], "tensor_split": "0,1"},
        {"devices": "cpu:0,cpu:0;cpu:0", "tensor_split": "1,2,3"},
    ],
    3: [{"devices": ONE_EACH[3], "tensor_split": "1,0,2"}, {"devices": "cpu:0;cpu:0,cpu:0;cpu:0", "tensor_split": "5,1,2,3"}],
    4: [{"devices": ONE_EACH[4]}, {"devices": ONE_EACH[4], "tensor_split": "10,60,5,25"}],  # 3 KV heads, and 1: a rank has none
}  # fmt: skip


@slow
@pytest.mark.parametrize("n", REAL_LOADS)
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_give_the_reference_ids(name, n, tmp_path, real_models, data_folder):
    """In exact mode, the cache on the devices and in the hosts: the ids of the numpy reference, which one process gives too."""
    one = json.loads((data_folder / f"numpy_f32_{name}.json").read_text())["prompts"][0]
    ids = next(p["ids"] for p in json.loads((data_folder / f"{name}.json").read_text())["prompts"] if p["name"] == one["name"])
    cases = [Case(real_models[name], load, ids, 48) for load in both(*REAL_LOADS[n])]
    for case, by_rank in zip(cases, over_ranks(n, tmp_path, cases), strict=True):
        assert [played["ids"] for played in by_rank] == [one["greedy_ids"]] * n, case
