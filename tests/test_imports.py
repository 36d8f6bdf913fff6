"""Imports point one way, and `import paligemma` loads neither Gradio nor any model."""

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

# What each module or package may import from the others. Packages count as one module.
CORE = {"errors", "validation"}
MODEL = {"config", "kv_cache", "attention_mask"}
ALLOWED = {
    "errors": set(),
    "paths": set(),
    "validation": {"errors"},
    "config": CORE,
    "attention_mask": set(),
    "kv_cache": {"config"},
    "siglip": {"config"},
    "gemma": MODEL,
    "modeling": {*MODEL, "siglip", "gemma"},
    "image_processing": CORE,
    "tokenizer": CORE,
    "processing": {*CORE, "config", "image_processing", "tokenizer"},
    "image_features": set(),
    "sampling": CORE,
    "generation": {*CORE, *MODEL, "modeling", "processing", "sampling"},
    "parsing": set(),
    "masks": {*CORE, "parsing"},
    "kernels": {"errors"},
    "checkpoint": {*CORE, "config", "modeling", "kernels", "paths"},
    "lens": {*CORE, *MODEL, "gemma", "siglip", "modeling", "processing", "sampling", "generation"},
    "pipeline": {
        *(*CORE, "config", "modeling", "processing", "sampling", "generation", "image_features"),
        *("checkpoint", "kernels"),
    },
    "__init__": {*CORE, "checkpoint", "config", "generation", "modeling", "parsing", "pipeline", "processing", "lens"},
    "__main__": {*CORE, "__init__", "checkpoint", "generation", "sampling", "pipeline", "kernels"},
    # The web application uses the public API and what can be read from an answer; no part of the model.
    "webapp": {
        *(*CORE, "__init__", "paths", "parsing", "masks", "lens", "generation", "sampling", "pipeline", "checkpoint"),
        *("processing", "image_processing"),
    },
}
TOOLS = {"training", "benchmarks", "tools"}  # may import anything; nothing imports them
ALLOWED_IN_APP = {"webapp"}


def library_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if module_of(path) not in TOOLS]


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def executed_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A tree's nodes without the bodies of `if TYPE_CHECKING:`, which do not run."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from executed_nodes(child)


def imported_names(path: Path) -> set[str]:
    """Every dotted name that a file imports at run time, at the top level or inside a function."""
    names: set[str] = set()
    for node in executed_nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import; imports are written in full here"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def imported_modules(path: Path) -> set[str]:
    """The package's modules that a file imports; `__init__` for the public API."""
    modules = set()
    for name in imported_names(path):
        first, *rest = name.split(".")
        if first == "paligemma":
            is_module = rest and ((PACKAGE / rest[0]).is_dir() or (PACKAGE / f"{rest[0]}.py").exists())
            modules.add(rest[0] if is_module else "__init__")
    return modules


def test_every_module_has_an_entry():
    assert {module_of(path) for path in library_files()} <= ALLOWED.keys()


@pytest.mark.parametrize("path", library_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    module = module_of(path)
    assert imported_modules(path) <= ALLOWED[module] | {module}


def test_app_imports_the_web_application_only():
    assert imported_modules(ROOT / "app.py") <= ALLOWED_IN_APP


@pytest.mark.parametrize("path", library_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_web_application_imports_gradio(path):
    web = {
        name for name in imported_names(path) if name.split(".")[0] in ("gradio", "gradio_client", "fastapi", "spaces")
    }
    assert module_of(path) == "webapp" or not web


@pytest.mark.parametrize("path", library_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_transformers_is_imported_for_conversion_only(path):
    uses = any(name.split(".")[0] == "transformers" for name in imported_names(path))
    assert not uses or path.name == "tokenizer.py"


def test_parsing_imports_neither_torch_nor_numpy():
    assert not {name for name in imported_names(PACKAGE / "parsing.py") if name.split(".")[0] in ("torch", "numpy")}


def test_import_loads_neither_gradio_nor_the_web_application_nor_transformers_models():
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
    assert not [name for name in modules if name.split(".")[0] in ("gradio", "fastapi", "numba", "ray")]
    assert not [name for name in modules if name.startswith("paligemma.webapp")]
    assert not [name for name in modules if name.startswith("transformers.") and ".modeling_" in name]
