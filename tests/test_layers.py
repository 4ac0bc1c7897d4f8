"""Dependencies point one way: no circle among modules, also not for types, and none among the rooms of `models/`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import numba_meta

ROOT = Path(numba_meta.__file__).parent
MODULES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in ROOT.rglob("*.py")}


def imports_of(module: str) -> Iterator[str]:
    """The modules of this package that one imports when it is loaded, or names for its types; not what a function imports when it runs."""
    pending: list[ast.AST] = list(ast.parse(MODULES[module].read_text(encoding="utf-8")).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                found = f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in MODULES else node.module
                if found in MODULES:
                    yield found
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)


def order(graph: Mapping[str, set[str]]) -> list[str]:
    """What is used before what uses it; fails with the circle, where there is one."""
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_modules_import_each_other_without_circles() -> None:
    in_order = order({module: set(imports_of(module)) for module in MODULES})
    assert in_order.index("numba_meta.tensor") < in_order.index("numba_meta.graph") < in_order.index("numba_meta.models.model")


def test_the_rooms_of_models_stand_in_their_order() -> None:
    rooms = [path.name for path in (ROOT / "models").iterdir() if (path / "__init__.py").exists()]
    graph: dict[str, set[str]] = {room: set() for room in rooms}
    for room in rooms:
        for module in (m for m in MODULES if m.startswith(f"numba_meta.models.{room}.")):
            used = {name.split(".")[2] for name in imports_of(module) if name.startswith("numba_meta.models.")}
            assert used <= set(rooms), f"{module} uses what stands above the rooms: {used - set(rooms)}"
            graph[room] |= used - {room}
    assert set(order(graph)) == {"files", "text", "architectures", "cache", "running", "loading", "generation"}
