"""Imports flow one way, and the rooms of a device need no torch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import processes
import smart_infinity

SOURCE = Path(smart_infinity.__file__).parent
ROOT = "smart_infinity"

# From the leaves to the roof: a module imports only from lower floors, and from its own room.
FLOORS: list[set[str]] = [
    {"errors", "layout", "interrupts"},
    {"kernels", "plain", "tensorfile", "trace"},
    {"storage"},
    {"devices"},
    {"link", "snapshots", "arrivals"},
    {"weights", "recipe", "recovery", "guard", "schedulers", "timeline"},
    {"ahead", "cuda"},
    {
        "gate",
        "pace",
        "reading",
        "gradients",
        "planning",
        "hyperparameters",
        "checkpointing",
        "beginning",
        "optimizer",
    },
    {"stream", "tools"},
    {"engine"},
    {"offloading"},
    {ROOT},  # the package's public names
    {"benchmarks"},
    {"cli"},
]
WITHOUT_TORCH = {
    "errors",
    "layout",
    "interrupts",
    "trace",
    "tensorfile",
    "kernels",
    "storage",
    "devices",
    "link",
    "arrivals",
}
MAX_LINES = 400


def module_name(path: Path) -> str:
    parts = [ROOT, *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def room(module: str) -> str:
    """The part of the house that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ROOT


def floor(module: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(module) in rooms)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    }


def imports_of(module: str) -> set[str]:
    """All modules that a module imports, wherever in the file, but for type checking."""
    found: set[str] = set()
    stack: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while stack:
        node = stack.pop()
        if is_type_checking(node):
            continue
        stack.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import on line {node.lineno}"
            assert node.module is not None
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in MODULES else node.module)
    return found


IMPORTS = {module: imports_of(module) for module in MODULES}


def ours(module: str) -> set[str]:
    return {name for name in IMPORTS[module] if name in MODULES}


def test_every_module_has_a_floor() -> None:
    known = set().union(*FLOORS)
    assert {room(module) for module in MODULES} <= known


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    for imported in ours(module):
        below = floor(imported) < floor(module)
        assert below or room(imported) == room(module), f"{module} imports {imported}"


def test_there_are_no_cycles() -> None:
    """Within a room as well."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for imported in sorted(ours(module)):
            visit(imported)
        path.pop()
        done.add(module)

    for module in MODULES:
        visit(module)
    assert done == set(MODULES)


@pytest.mark.parametrize("leaf", ["errors", "layout"])
def test_leaves_import_the_standard_library_only(leaf: str) -> None:
    assert {name.split(".")[0] for name in IMPORTS[f"{ROOT}.{leaf}"]} <= {
        "__future__",
        "collections",
        "dataclasses",
        "hashlib",
        "json",
        "math",
        "os",
        "re",
        "typing",
    }


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in WITHOUT_TORCH])
def test_no_torch_below_the_link(module: str) -> None:
    assert not any(name.split(".")[0] == "torch" for name in IMPORTS[module])


def test_a_device_runs_where_torch_is_not_installed() -> None:
    """A storage node has NumPy alone: import all of its rooms where importing torch fails."""
    out = processes.run(
        """
import importlib
sys.modules["torch"] = None  # importing it raises
for name in sys.argv[1:]:
    importlib.import_module(name)
from smart_infinity.kernels import OPTIMIZERS
print(sorted(OPTIMIZERS))
""",
        *[module for module in MODULES if room(module) in WITHOUT_TORCH],
    )
    assert out.strip() == "['adagrad', 'adam', 'adamw', 'sgd']"


def test_files_are_short() -> None:
    for path in MODULES.values():
        name = path.relative_to(SOURCE).as_posix()
        assert len(path.read_text().splitlines()) <= MAX_LINES, name
