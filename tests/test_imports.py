"""Imports point one way, and importing the library loads neither Gradio nor any model."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "paligemma"

# What each module of the library may import from it. A folder counts as one module; `scripts` may import anything.
MODEL = {"config", "kv_cache"}
ALLOWED = {
    "config": set(),
    "hub": set(),
    "memory": set(),
    "kv_cache": {"config"},
    "siglip": MODEL,
    "gemma": MODEL,
    "modeling": {*MODEL, "siglip", "gemma"},
    "processing": {"config"},
    "linears": set(),
    "quantize": {"linears"},
    "checkpoint": {"config", "hub", "memory", "modeling", "linears", "quantize"},
    "picture_features": set(),
    "generation": {*MODEL, "modeling", "processing"},
    "parsing": set(),
    "masks": {"parsing"},
    "lens": {*MODEL, "gemma", "siglip", "modeling", "processing", "generation"},
    "pipeline": {
        *("config", "modeling", "generation", "processing", "checkpoint", "quantize", "lens", "picture_features"),
    },
    "view": {"hub", "parsing", "masks", "generation", "processing", "lens"},
    "__init__": {"checkpoint", "config", "generation", "modeling", "parsing", "pipeline", "processing", "lens"},
    "__main__": {"__init__", "checkpoint", "generation", "quantize"},
}
# app.py knows the public API and the view; of what else it may need, only names that are no part of the model.
ALLOWED_IN_APP = {"__init__", "view", "parsing", "masks", "lens", "generation", "checkpoint", "pipeline"}


def library_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "scripts" not in path.relative_to(PACKAGE).parts]


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A tree's nodes without the bodies of `if TYPE_CHECKING:`, whose imports never happen."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from executed_nodes(child)


def imported_names(path: Path) -> set[str]:
    """Every dotted name that a file imports when it runs, at its top or inside a function."""
    names: set[str] = set()
    for node in executed_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import; imports are written in full here"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def imported_modules(path: Path) -> set[str]:
    """The library's modules that a file imports; `__init__` for the public API."""
    modules = set()
    for name in imported_names(path):
        first, *rest = name.split(".")
        if first == "paligemma":
            is_module = rest and ((PACKAGE / rest[0]).is_dir() or (PACKAGE / f"{rest[0]}.py").exists())
            modules.add(rest[0] if is_module else "__init__")
    return modules


def test_the_table_names_every_module():
    assert {module_of(path) for path in library_files()} <= ALLOWED.keys()


@pytest.mark.parametrize("path", library_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    module = module_of(path)
    assert imported_modules(path) <= ALLOWED[module] | {module}


def test_the_app_imports_the_public_api_and_the_view():
    app = ROOT / "app.py"
    if not app.exists():
        pytest.skip("there is no app.py yet")
    assert imported_modules(app) <= ALLOWED_IN_APP


@pytest.mark.parametrize("path", library_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_library_knows_nothing_of_gradio(path):
    assert not {name for name in imported_names(path) if name.split(".")[0] in ("gradio", "gradio_client", "spaces")}


def test_parsing_needs_no_torch():
    assert not {name for name in imported_names(PACKAGE / "parsing.py") if name.split(".")[0] in ("torch", "numpy")}


def test_importing_loads_no_gradio_no_model_of_transformers_and_opens_nothing():
    script = """
import json, socket, sys
def refuse(*arguments, **options):
    raise AssertionError("a connection is opened at import")
socket.socket.connect = refuse
import safetensors, safetensors.torch
safetensors.safe_open = safetensors.torch.load_file = refuse
import paligemma
print(json.dumps(sorted(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    modules = json.loads(ended.stdout)
    assert not [name for name in modules if name.split(".")[0] == "gradio"]
    assert not [name for name in modules if name.startswith("transformers.") and ".modeling_" in name]
