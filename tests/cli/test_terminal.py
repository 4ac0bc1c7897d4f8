"""Progress on a terminal and in a pipe; tables."""

from __future__ import annotations

from numba_meta.cli.terminal import ERASE_LINE, Progress, table


def test_a_pipe_gets_no_progress_but_one_line_about_compiling(capsys):
    progress = Progress()
    for done in range(5):
        progress("loading", done, 4)
        progress("compiling kernels", done, 4)
    progress.clear()
    assert capsys.readouterr().err == "numba-meta: compiling kernels\n"


def test_a_terminal_sees_progress_which_is_erased_at_the_end(capsys, monkeypatch):
    monkeypatch.setattr("numba_meta.cli.terminal.REDRAW_SECONDS", 0.0)
    progress = Progress()
    progress.on_terminal = True
    progress("loading", 1, 4)
    progress("reading", 7, 0)
    progress("loading", 4, 4)
    progress.clear()
    assert capsys.readouterr().err == f"{ERASE_LINE}loading 25%{ERASE_LINE}reading 7{ERASE_LINE}"


def test_a_terminal_is_not_redrawn_at_every_call(capsys):
    progress = Progress()
    progress.on_terminal = True
    for done in range(1000):
        progress("loading", done, 1_000_000)
    assert capsys.readouterr().err.count(ERASE_LINE) < 100


def test_table_columns():
    assert table(("name", "t/s"), [("a", "1.0"), ("bc", "10.0")]).splitlines() == ["name   t/s", "a      1.0", "bc    10.0"]
