"""`import numba_meta` stays light: nothing heavy is loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import numba_meta

HEAVY = ("click", "cuda", "gguf", "jinja2", "llvmlite", "matplotlib", "mpi4py", "numba", "numba_cuda", "numpy", "tokenizers")


def loaded_after(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    program = f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(process.stdout.splitlines()[-1].split())


def test_the_package_loads_nothing_heavy():
    assert loaded_after("import numba_meta").isdisjoint(HEAVY)


def test_the_help_of_the_command_line_loads_click_alone():
    loaded = loaded_after("from numba_meta.cli import main\nmain(['generate', '--help'])")
    assert loaded & set(HEAVY) == {"click"}


def test_public_names():
    assert set(numba_meta.__all__) <= set(dir(numba_meta))
    for name in numba_meta.__all__:
        assert getattr(numba_meta, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = numba_meta.nonsense
