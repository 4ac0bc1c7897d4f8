"""Ranks whose programs differ: the launch ends soon with one line that says how, and programs that take turns are not disturbed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from mpirun import Ended, Launch, check_failed, needs_mpi, said_in
from synthetic import write_model

pytestmark = needs_mpi
PROGRAM = str(Path(__file__).parent / "programs" / "faults.py")
ALIKE = "; all ranks must make the same calls of a model in the same order"
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model") / "model.gguf", n_layer=3))


def launch(scenario: str, model: str, folder: Path) -> Ended:
    return Launch(2, folder, str(folder), model, scenario, program=PROGRAM).end(60)


QUICK: dict[str, tuple[str, ...]] = {
    "length": ("rank 1 (", "made call 3: generate with 2 prompt tokens; rank 0 (", "): generate with 3 prompt tokens" + ALIKE),
    "exits_later": ("rank 1 (", "ended after call 2, rank 0 (", "made call 3: generate" + ALIKE),
}
SLOW: dict[str, tuple[str, ...]] = {
    "exits": ("rank 1 (", "ended after call 1, rank 0 (", "made call 2: generate" + ALIKE),
    "rank_0_exits": ("rank 0 (", "ended after call 1, rank 1 (", "made call 2: generate" + ALIKE),
    "text": ("rank 1 (", "made call 2: generate with prompt ids 5 6 8; rank 0 (", "): generate with prompt ids 5 6 7" + ALIKE),
    "temperature": ("made call 2: generate with temperature 0.5; rank 0 (", "): generate with temperature 0" + ALIKE),
    "limit": ("made call 2: generate_ids with max_tokens 9; rank 0 (", "): generate_ids with max_tokens 8" + ALIKE),
    "seed": ("made call 2: generate_many with seed 7; rank 0 (", "): generate_many with seed None" + ALIKE),
    "other_call": ("made call 2: logits; rank 0 (", "): generate_ids" + ALIKE),
    "cache": ("made call 3: cache.remove; rank 0 (", "): generate_ids" + ALIKE),
    "half_then_another": ("rank 1 (", ") left call 2 (generate) after ", "rank 0 (", "goes on with it" + ALIKE),
    "half": ("rank 1 (", ") left call 2 (generate) after ", "rank 0 (", "goes on with it" + ALIKE),
    "half_held": ("rank 1 (", ") ended in call 2 (generate) after ", "rank 0 (", "goes on with it" + ALIKE),
    "another_model": ("made call 2: load; rank 0 (", "): generate" + ALIKE),
    "wrong_model": ("made call 3: generate_ids of model 2; rank 0 (", "): generate_ids of model 1" + ALIKE),
    "threads": ("a second thread would use a model; over ranks one thread of the program loads models and makes all calls of them",),
    "caught": ("rank 1 (", "ended after call 1, rank 0 (", "made call 2: generate_ids" + ALIKE),
    "interrupted_wait": ("rank 1 (", "left call 2 (generate_ids) with TimeoutError while it waited for the others" + ALIKE),
    "hangs_up": ("rank 1 (", "was told to end (SIGHUP)"),
    "early": ("rank 1 (", "ended before it loaded a model, which the others do" + ALIKE),
}


@pytest.mark.parametrize("scenario", [*QUICK, *(pytest.param(name, marks=slow) for name in SLOW)])
def test_one_line_says_what_differs(scenario: str, model: str, tmp_path: Path) -> None:
    ended = launch(scenario, model, tmp_path)
    parts = (QUICK | SLOW)[scenario]
    check_failed(ended, 2, parts[0])
    (said,) = said_in(ended.stderr)
    assert all(part in said for part in parts), said


@slow
def test_a_rank_that_ends_without_a_word(model: str, tmp_path: Path) -> None:
    """`os._exit(0)`: its own status is all that does not say so."""
    ended = launch("exits_at_once", model, tmp_path)
    (said,) = said_in(ended.stderr)
    assert "rank 1 (" in said and "has gone without a word" in said and "os._exit" in said
    assert ended.status != 0 and ended.ranks[0] != 0 and ended.ranks[1] == 0 and ended.left == [] and ended.seconds < 10


@slow
def test_generations_of_two_models_take_turns(model: str, tmp_path: Path) -> None:
    ended = launch("take_turns", model, tmp_path)
    assert ended.status == 0 and ended.ranks == {0: 0, 1: 0} and ended.left == [] and said_in(ended.stderr) == [], ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == second


@slow
def test_forked_children_are_no_ranks(model: str, tmp_path: Path) -> None:
    ended = launch("forks", model, tmp_path)
    assert ended.status == 0 and ended.ranks == {0: 0, 1: 0} and ended.left == [] and said_in(ended.stderr) == [], ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == second


@slow
def test_a_call_after_the_end_hangs_nobody(model: str, tmp_path: Path) -> None:
    ended = launch("after_the_end", model, tmp_path)
    assert ended.seconds < 20 and ended.left == [] and "called after the ranks have parted, at the end of the program" in ended.stderr


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_was_stopped_is_ended_too(rank: int, model: str, tmp_path: Path) -> None:
    """Supervisors stand between launcher and ranks here, as scripts do: the launcher's signals do not reach the stopped one."""
    begun: Any = Launch(2, tmp_path, str(tmp_path), model, "goes_on", program=PROGRAM)
    begun.wait_for("ready")
    begun.signal_rank(rank, signal.SIGSTOP)
    ended = begun.end(60)
    check_failed(ended, 2, f"rank {rank} (", soon=40)
    assert "sent no sign of life for 30 s" in ended.stderr and ended.seconds > 25
    assert ended.ranks[rank] == -signal.SIGKILL
