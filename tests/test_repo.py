"""What the README and the requirements say is so."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from paligemma.__main__ import build_parser
from paligemma.webapp import cli, ui
from paligemma.webapp.served_models import ServedModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DISTRIBUTIONS = {
    "PIL": "pillow",
    "fastapi": "gradio",
    "gradio_client": "gradio",
    "mcp": "gradio",
    "resvg_py": "resvg-py",
}
REQUIREMENT_FILES = ("requirements.txt", "paligemma/training/requirements.txt", "tests/requirements.txt")


def tree_in_readme() -> set[str]:
    """The paths of the README's tree, folders with a slash at their end."""
    block = re.search(r"## Files\n+```\n(.*?)```", README, re.S)[1]
    paths, folders = set(), []
    for line in block.splitlines():
        name = line.split()[0]
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        paths.add("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths


def files_of_the_repository() -> set[str]:
    """What the tree has to name: code, styles and texts; of tests only their folder, of assets only the page's."""
    found = [path for pattern in ("*", "paligemma/**/*", "assets/*", ".ci/*") for path in ROOT.glob(pattern)]
    names = {path.relative_to(ROOT).as_posix() for path in found if path.is_file() and "__pycache__" not in path.parts}
    return {name for name in names if not name.startswith((".git", ".DS_Store"))} - {"README.md"}


def requirements(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([A-Za-z][\w-]*)([^#]*)", line) for line in lines)
    return {match[1].lower().replace("_", "-"): match[2].strip() for match in found if match}


def test_the_tree_names_every_file_and_no_other():
    tree = tree_in_readme()
    assert files_of_the_repository() - tree == set()
    assert {path for path in tree if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("parser", [cli.build_parser(), build_parser()], ids=["app.py", "python -m paligemma"])
def test_every_flag_is_in_the_readme(parser):
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {flag for flag in flags if f"`{flag}`" not in README} == set()


def test_every_environment_variable_is_in_the_readme():
    names = set()
    for path in (ROOT / "app.py", *ROOT.glob("paligemma/*.py"), *ROOT.glob("paligemma/view/*.py")):
        names |= set(re.findall(r"environ(?:ment)?(?:\.get\(|\[|, )\"(\w+)\"", path.read_text(encoding="utf-8")))
    assert names >= {"MODEL_ID", "SIGN_IN", "MAX_SECONDS", "GRADIO_TEMP_DIR"}
    assert all(f"`{name}`" in README for name in names)


def test_every_file_that_the_readme_names_exists():
    named = set(re.findall(r"`((?:paligemma|assets|tests)/[\w./]+)`", README))
    assert named and {path for path in named if not (ROOT / path).exists()} == set()


def rows_of_the_table() -> list[str]:
    """The last cells of the table "What happens when…"; rows that only head a group have none."""
    table = re.search(r"## What happens when…\n(.*?)\n## ", README, re.S)[1]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ") and "| --- |" not in line]
    return [row[2].strip(" |") for row in rows[1:] if not row[0].startswith("| **")]


def test_every_row_of_what_happens_when_names_a_test_that_exists():
    rows = rows_of_the_table()
    assert len(rows) > 3
    for row in rows:
        named = re.findall(r"`(\w+\.py)::(test_\w+)`", row)
        assert named, f"no test in {row!r}"
        for file, name in named:
            functions = ast.walk(ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")))
            assert name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_every_endpoint_is_in_the_readme():
    blocks = ui.build_app(ServedModel("none", None))
    endpoints = blocks.get_api_info()["named_endpoints"]
    assert all(f"`{name}`" in README for name in endpoints)
    for parameter in endpoints["/generate"]["parameters"]:
        assert f"`{parameter['parameter_name']}`" in README


def test_ci_runs_the_readme_s_test_command():
    commands = re.findall(r"^python -m pip install .* && python -m pytest$", README, re.M)
    assert commands == ["python -m pip install -r tests/requirements.txt && python -m pytest"]
    assert "grep -m 1 -E '^python -m pip install .* && python -m pytest' README.md" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("file", REQUIREMENT_FILES)
def test_every_requirement_has_a_lower_and_an_upper_end(file):
    for name, versions in requirements(file).items():
        assert "==" in versions or (">=" in versions and "<" in versions), f"{name} {versions}"


def third_party_imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    own = {"paligemma", "app", *(other.stem for other in (ROOT / "tests").glob("*.py"))}
    return {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in names - set(sys.stdlib_module_names) - own}


def test_what_is_imported_is_required():
    needed = requirements("requirements.txt").keys() | {"spaces"}  # ZeroGPU brings it; elsewhere nobody needs it
    library = [path for path in ROOT.glob("paligemma/**/*.py") if "scripts" not in path.parts]
    for path in (ROOT / "app.py", *library):
        assert third_party_imports(path) <= needed, path.name
    needed |= requirements("paligemma/training/requirements.txt").keys()
    for path in ROOT.glob("paligemma/scripts/*.py"):
        assert third_party_imports(path) <= needed, path.name
    needed |= requirements("tests/requirements.txt").keys()
    for path in (ROOT / "tests").glob("*.py"):
        assert third_party_imports(path) <= needed, path.name


def test_nothing_reads_a_pickle_or_runs_foreign_code():
    forbidden = re.compile(
        r"\bimport pickle|trust_remote_code=True|allow_pickle=True|weights_only=False|strict=False|(?<![.\w`])eval\("
    )
    for path in (ROOT / "app.py", *ROOT.glob("paligemma/**/*.py")):
        assert not forbidden.findall(path.read_text(encoding="utf-8")), path.name
