"""A model over ranks that share one GPU, or have one each, gives the tokens of a float64 reference; a killed rank ends the others."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from models.numpy_reference import ReferenceModel
from mpirun import Launch, needs_mpi
from ranks.playing import Case
from synthetic import write_model

pytestmark = [pytest.mark.gpu, needs_mpi]
PROGRAMS = Path(__file__).parent / "programs"
# Processes on one GPU take turns of milliseconds, and each reduction takes some: little is computed.
KINDS = ("device", "host")
PROMPT, N_TOKENS = tuple((31 * i) % 290 + 5 for i in range(20)), 16
OPTIONS: dict[str, Any] = {"ctx_size": 128, "ubatch_size": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {"n_layer": 2, "n_embd": 128, "head_dim": 32, "n_ff": 256, "types": "q8_0", "n_vocab": 300, "tied": False}
    llama = write_model(folder / "llama.gguf", n_head=8, n_head_kv=4, seed=51, **sizes)
    gemma = write_model(folder / "gemma3.gguf", "gemma3", n_head=4, n_head_kv=2, seed=52, **sizes)
    return {"llama": str(llama), "gemma3": str(gemma)}


def greedy_tokens(path: str) -> list[int]:
    """What float64 arithmetic goes on with."""
    model, ids = ReferenceModel.read(Path(path)), list(PROMPT)
    while len(ids) < len(PROMPT) + N_TOKENS:
        ids.append(int(model.logits(ids)[-1].argmax()))
    assert len(set(ids[len(PROMPT) :])) > N_TOKENS // 2, "tokens that say something"
    return ids[len(PROMPT) :]


def check_ranks(models: list[str], loads: list[dict[str, Any]], folder: Path, **variables: str) -> None:
    """Two ranks with these loads of each model, in exact mode: the tokens of the reference, and the same bits on both."""
    cases = [Case(path, OPTIONS | load, PROMPT, N_TOKENS) for path in models for load in loads]
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    arguments = (str(folder), str(folder / "cases.json"))
    ended = Launch(2, folder, *arguments, program=str(PROGRAMS / "play.py"), **variables).end(100)
    assert ended.status == 0 and ended.ranks == {0: 0, 1: 0} and ended.left == [], ended.stderr
    by_rank = [json.loads((folder / f"played.{rank}.json").read_text()) for rank in range(2)]
    wanted = {path: greedy_tokens(path) for path in models}
    for case, played in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert [one["ids"] for one in played] == [wanted[case.path]] * 2, case
        assert played[0]["bits"] == played[1]["bits"], case
        host = case.options.get("kv") == "host"
        assert {one["path"] for one in played} <= ({"pipelined", "ordered"} if host else {"device"}), case


def test_ranks_on_one_gpu_share_memory(models: dict[str, str], tmp_path: Path) -> None:
    loads = [{"devices": "cuda:0", "kv": kv} for kv in KINDS]
    check_ranks(list(models.values()), loads, tmp_path, NUMBA_META_COMM="ipc")


def test_more_devices_and_gathers(models: dict[str, str], tmp_path: Path) -> None:
    """Devices of a rank sum first, its first one exchanges; where no sum crosses devices, pieces are gathered. ipc is chosen."""
    loads = [{"devices": "cuda:0,cuda:0;cuda:0", "tensor_split": "1,1,2"}, {"devices": "cuda:0", "deterministic": True}]
    check_ranks([models["llama"]], loads, tmp_path)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ("ipc", "nccl", "mpi"))
def test_a_gpu_for_each_rank(name: str, models: dict[str, str], tmp_path: Path) -> None:
    """Through every communicator, plain and in the order of devices."""
    loads = [{"devices": "cuda:0;cuda:1", "deterministic": deterministic, "kv": kv} for deterministic in (False, True) for kv in KINDS]
    check_ranks(list(models.values()), loads, tmp_path, NUMBA_META_COMM=name)


def test_mpi_through_pinned_memory(models: dict[str, str], tmp_path: Path) -> None:
    """Also beside a rank that computes on the CPU, where nothing else works."""
    loads = [{"devices": "cuda:0"}, {"devices": "cuda:0", "deterministic": True}, *({"devices": "cpu:0;cuda:0", "kv": kv} for kv in KINDS)]
    check_ranks([models["llama"]], loads, tmp_path, NUMBA_META_COMM="mpi")


def test_a_killed_rank_ends_the_other(models: dict[str, str], tmp_path: Path) -> None:
    """The one that waits in a kernel is ended within seconds, with the reason."""
    launch = Launch(2, tmp_path, str(tmp_path), models["llama"], "cuda:0", program=str(PROGRAMS / "endless.py"))
    launch.wait_for("ready", 100)
    launch.signal_rank(1, signal.SIGKILL)
    ended = launch.end(30)
    said = [line for line in ended.stderr.splitlines() if line.startswith("numba-meta: ")]
    assert len(said) == 1 and "rank 1 (" in said[0] and "has gone without a word" in said[0], ended.stderr
    assert ended.seconds < 10 and ended.status != 0 and ended.left == []
    assert sorted(ended.ranks) == [0, 1] and all(ended.ranks.values())
