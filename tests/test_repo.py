"""Claims of the documentation, sizes of the code, linters, and the language guide."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paligemma.__main__ import build_parser
from paligemma.webapp import cli, ui
from paligemma.webapp.served_models import ServedModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
SOURCES = [ROOT / "app.py", *sorted((ROOT / "paligemma").rglob("*.py"))]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "pydantic_core": "pydantic",
    "google": "protobuf",
    "fastapi": "gradio",
    "gradio_client": "gradio",
    "mcp": "gradio",
    "resvg_py": "resvg-py",
    "starlette": "gradio",
    "uvicorn": "gradio",
}
REQUIREMENT_FILES = ("requirements.txt", "paligemma/training/requirements.txt", "tests/requirements.txt")
TOOL_FOLDERS = {"training", "benchmarks", "tools"}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    "command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join
)
def test_linters_and_type_checker_pass(command):
    ended = run(*command)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]


# Sizes ------------------------------------------------------------------------------------------------------------


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_modules_and_functions_stay_short():
    assert count_lines(ROOT / "app.py") <= 100
    assert [path.name for path in SOURCES if count_lines(path) > 450] == []
    model = ("siglip", "gemma", "modeling", "kv_cache")
    assert sum(count_lines(ROOT / "paligemma" / f"{name}.py") for name in model) <= 750
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 45
    ]
    assert long == []


def test_the_readme_fits_one_screen():
    assert len(README.encode()) <= 10_000


# Language ---------------------------------------------------------------------------------------------------------

# Terms that the field does not use, or uses differently; see CONTRIBUTING.md.
AVOIDED = re.compile(
    r"\b(anew|whoever|to be had|cannot be had|lends?|lent|loan|visitors?|pictures?|side by side|means nothing|"
    r"colou?red by chance|widened?|inspector|side_by_side|carry_out|normalis\w+|colour\w*|behaviour\w*|licence|grey)\b",
    re.IGNORECASE,
)
# Fields of the API and the run file, trained words of the bundled model, and names of other libraries.
ALLOWED_TERMS = re.compile(
    r"picture_share|picture[.:]|document\.picture|\"picture (?:must|最多)|[\"'`]picture[\"'`]|"
    r"\"colour\"|what colour color|a picture of"
)


def test_the_code_and_the_docs_use_the_field_s_terms():
    files = [*SOURCES, *(ROOT / "assets/page").glob("*"), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    found = [
        f"{path.relative_to(ROOT)}:{number} {match[0]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in AVOIDED.finditer(ALLOWED_TERMS.sub("", line))
    ]
    assert found == []


# Documentation ----------------------------------------------------------------------------------------------------


def files_in_tree() -> set[str]:
    """The paths in the file tree of docs/architecture.md; folders end with a slash."""
    block = re.search(r"## Files\n+```\n(.*?)```", DOCS["architecture.md"], re.S)[1]
    paths, folders = set(), []
    for line in block.splitlines():
        name = line.split()[0]
        del folders[(len(line) - len(line.lstrip())) // 2 :]
        paths.add("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return paths


def files_in_repository() -> set[str]:
    """The files the tree must list: code, page files, documentation; of tests only the folder."""
    patterns = ("*", "paligemma/**/*", "assets/*", "assets/page/*", "docs/*", ".ci/*")
    found = [path for pattern in patterns for path in ROOT.glob(pattern)]
    names = {path.relative_to(ROOT).as_posix() for path in found if path.is_file() and "__pycache__" not in path.parts}
    empty = {name for name in names if name.endswith("__init__.py") and not (ROOT / name).read_text(encoding="utf-8")}
    return {name for name in names if not name.startswith((".git", ".DS_Store", ".pre-commit"))} - empty


def test_the_tree_lists_every_file_and_no_other():
    tree = files_in_tree()
    assert files_in_repository() - tree == set()
    assert {path for path in tree if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("parser", [cli.build_parser(), build_parser()], ids=["app.py", "python -m paligemma"])
def test_every_option_is_documented(parser):
    options = {option for action in parser._actions for option in action.option_strings}
    assert {option for option in options if f"`{option}`" not in DOCS["deploy.md"]} == set()


def test_every_environment_variable_is_documented():
    names = set()
    for path in SOURCES:
        if not TOOL_FOLDERS & set(path.parts):
            pattern = r"environ(?:ment)?(?:\.get\(|\[|, )\"(\w+)\""
            names |= set(re.findall(pattern, path.read_text(encoding="utf-8")))
    assert names >= {"MODEL_ID", "SIGN_IN", "MAX_SECONDS", "GRADIO_TEMP_DIR"}
    assert {name for name in names if f"`{name}`" not in DOCS["deploy.md"]} == set()


@pytest.mark.parametrize("name", ["README.md", "README.zh.md", "CONTRIBUTING.md", *(f"docs/{name}" for name in DOCS)])
def test_linked_and_named_files_exist(name):
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    links = {path.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)}
    named = {
        ROOT / file for file in re.findall(r"`((?:paligemma|assets|tests|docs)/[\w./]+)`", text) if "NAME" not in file
    }
    modules = {ROOT / (module.replace(".", "/")) for module in re.findall(r"python -m (paligemma[\w.]*)", text)}
    missing = {file for file in links | named if not file.exists()}
    missing |= {file for file in modules if not (file.is_dir() or file.with_suffix(".py").exists())}
    assert missing == set()


def rows_of_behavior() -> list[str]:
    """The test column of the table in docs/behavior.md; rows that only head a group have an empty one."""
    table = DOCS["behavior.md"].split("## What happens when\n")[1]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    return [row[-1] for row in rows[1:] if not (row[0].startswith("**") and "test_" not in row[-1])]


def test_every_row_of_the_behavior_table_names_a_test():
    rows = rows_of_behavior()
    assert len(rows) > 90
    for row in rows:
        named = re.findall(r"`(\w+\.py)::(test_\w+)`", row)
        assert named, f"no test in {row!r}"
        for file, name in named:
            path = ROOT / "tests" / file
            assert path.exists(), row
            functions = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            assert name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_every_endpoint_and_its_inputs_are_documented():
    blocks = ui.build_app(ServedModel("none", None))
    endpoints = blocks.get_api_info()["named_endpoints"]
    assert all(f"`{name}`" in DOCS["api.md"] for name in endpoints)
    for parameter in endpoints["/generate"]["parameters"]:
        assert f"`{parameter['parameter_name']}`" in DOCS["api.md"]


def test_ci_runs_the_readme_s_test_command():
    commands = re.findall(r"^python -m pip install .* && python -m pytest$", README, re.M)
    assert commands == ["python -m pip install -r tests/requirements.txt && python -m pytest"]
    assert "grep -m 1 -E '^python -m pip install .* && python -m pytest' README.md" in (ROOT / ".ci/run").read_text()


# Dependencies -----------------------------------------------------------------------------------------------------


def requirements(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = (re.match(r"([A-Za-z][\w-]*)([^#]*)", line) for line in lines)
    return {match[1].lower().replace("_", "-"): match[2].strip() for match in found if match}


@pytest.mark.parametrize("file", REQUIREMENT_FILES)
def test_every_requirement_has_a_lower_and_an_upper_bound(file):
    for name, versions in requirements(file).items():
        assert "==" in versions or (">=" in versions and "<" in versions), f"{name} {versions}"


def third_party_imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    own = {"paligemma", "app", *(other.stem for other in (ROOT / "tests").glob("*.py"))}
    return {DISTRIBUTIONS.get(name, name).replace("_", "-") for name in names - set(sys.stdlib_module_names) - own}


def test_every_import_is_required():
    needed = requirements("requirements.txt").keys() | {"spaces"}  # installed by ZeroGPU Spaces only
    for path in SOURCES:
        if not TOOL_FOLDERS & set(path.parts):
            assert third_party_imports(path) <= needed, path.name
    parity = {
        "parity.py",
        "reference.py",
        "full_size.py",
        "process_cost.py",
        "random_checkpoints.py",
        "tiny_tokenizer.py",
    }
    for name in parity:  # the parity tool runs from the app's own environment
        assert third_party_imports(ROOT / "paligemma/benchmarks" / name) <= needed, name
    needed |= requirements("paligemma/training/requirements.txt").keys()
    for path in SOURCES:
        assert third_party_imports(path) <= needed, path.name
    needed |= requirements("tests/requirements.txt").keys()
    for path in (ROOT / "tests").glob("*.py"):
        assert third_party_imports(path) <= needed, path.name


def test_no_pickle_and_no_remote_code():
    forbidden = re.compile(
        r"\bimport pickle|trust_remote_code=True|allow_pickle=True|weights_only=False|strict=False|(?<![.\w`])eval\("
    )
    for path in SOURCES:
        assert not forbidden.findall(path.read_text(encoding="utf-8")), path.name
