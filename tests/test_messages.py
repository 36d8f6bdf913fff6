"""Messages of the page, and their translations."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_model import PROCESSOR, FakeModel
from PIL import Image

from paligemma.generation import StepCollector
from paligemma.paths import ASSETS
from paligemma.webapp import messages, tasks, ui
from paligemma.webapp.images import make_input_image
from paligemma.webapp.render import attention, candidates
from paligemma.webapp.runs import Run

PACKAGE = Path(messages.__file__).parents[1]
SCRIPTS = sorted((ASSETS / "page").glob("*.js"))
# Packages whose errors do not reach the page.
COMMAND_LINE = ("training", "benchmarks", "tools", "__main__.py")
ERRORS = ("CodedError", "InputError", "CheckpointError", "NonFiniteLogitsError")
CODE = re.compile(r"[a-z_0-9]+(\.[a-z_0-9]+)+")
FILTER_STAGES = ("kept", "greedy", "top-k", "top-p")
# Texts of Gradio 6, translated because it falls back to English for browsers with the language "zh".
GRADIO_TEXTS = {
    "Built with Gradio",
    "Capture from camera",
    "Drop an image file here to upload",
    "File upload",
    "Paste from clipboard",
    "Reset to default value",
    "Upload file",
    "Use via API",
}
# Prompts and names, the same in all languages.
UNTRANSLATED = {"caption en · detect dog · answer en what is this?"}


def reject_duplicates(pairs: list[tuple[str, str]]) -> dict[str, str]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.fixture(scope="module")
def chinese() -> dict[str, str]:
    text = (ASSETS / "page" / "messages.json").read_text(encoding="utf-8")
    return json.loads(text, object_pairs_hook=reject_duplicates)["zh"]


# Sources of messages


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def evaluate(node: ast.expr, path: Path) -> Any:
    """The value of a constant expression of a module; None if it is not constant."""
    if isinstance(node, ast.Constant):
        return node.value
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    try:
        return eval(compile(ast.Expression(node), str(path), "eval"), vars(module))
    except NameError:
        return None


def error_templates() -> dict[str, set[str]]:
    """The English templates of each error code: every call with a code and a template as its first arguments."""
    templates: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in COMMAND_LINE:
            continue
        for call in calls(path):
            if len(call.args) < 2 or not isinstance(call.args[0], ast.Constant):
                continue
            code = call.args[0].value
            if not isinstance(code, str) or not CODE.fullmatch(code):
                continue
            template = evaluate(call.args[1], path)
            if isinstance(template, str):
                templates.setdefault(code, set()).add(template)
            else:
                assert name_of(call) not in ERRORS, f"{path.name}, line {call.lineno}: the template is not constant"
    return templates


def script_texts() -> set[str]:
    """Texts that the scripts translate, and the codes of malformed objects."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
    found = re.findall(r'\bt\(\s*"([^"]+)"', code)
    found += re.findall(r'\blabel: "([^"]+)"', code)
    found += re.findall(r'\["([^"]+)", "(?:text|number|minor|label|share)"\]', code)
    found += re.findall(r'"(problem\.\w+)"', code)
    return set(found)


def component_texts() -> set[str]:
    """Labels, placeholders and other texts of the components in ui.py."""
    found = {title for _, title in ui.PANELS}
    path = Path(ui.__file__)
    for call in calls(path):
        if name_of(call) in ("Button", "UploadButton", "Accordion"):
            found.add(evaluate(call.args[0], path))
        is_part = name_of(call) == "part"
        for keyword in call.keywords:
            if keyword.arg in ("label", "placeholder", "info") or (is_part and keyword.arg in ("text", "name")):
                found.add(evaluate(keyword.value, path))
    return found - UNTRANSLATED


def status_texts() -> set[str]:
    """Constant texts of `messages.status(kind, text)`, and of (text, values) tuples in messages.py."""
    found = set(messages.FINISHED.values())
    for path in (PACKAGE / "webapp").glob("*.py"):
        for call in calls(path):
            if name_of(call) == "status" and len(call.args) == 2 and isinstance(call.args[1], ast.Constant):
                found.add(call.args[1].value)
    for node in ast.walk(ast.parse(Path(messages.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[1], ast.Dict):
            text = node.elts[0]
            found |= {text.value} if isinstance(text, ast.Constant) else set()
    return found


def data_texts() -> set[str]:
    """Titles, metrics, tasks and notes that Python sends as data."""
    columns = (*candidates.CANDIDATE_COLUMNS, *attention.LENS_COLUMNS, ("soft-capped logit", "number"))
    found = {title for title, _ in columns} | set(FILTER_STAGES)
    found |= {name for name, _ in candidates.step_metrics(make_run("▁a").steps[0])}
    found |= {task.name for task in (*tasks.BUNDLED_TASKS, *tasks.MIX_TASKS)}
    return found | {tasks.BUNDLED_NOTE, *tasks.NOTES.values()}


def placeholders(text: str) -> set[str]:
    """Names of the placeholders, without conversions and formats."""
    return set(re.findall(r"\{(\w+)[^{}]*\}", text))


# Translations


def test_each_error_code_has_one_template():
    assert {code: found for code, found in error_templates().items() if len(found) > 1} == {}


def test_each_error_has_a_chinese_translation_with_the_same_placeholders(chinese):
    untranslated, different = {}, {}
    for code, (template, *_) in error_templates().items():
        if template == "{message}":  # a message of another library, shown as it is
            continue
        if code not in chinese:
            untranslated[code] = template
        elif placeholders(chinese[code]) != placeholders(template):
            different[code] = (template, chinese[code])
    assert (untranslated, different) == ({}, {})


def test_each_text_of_the_page_has_a_chinese_translation(chinese):
    texts = script_texts() | component_texts() | status_texts() | data_texts()
    assert sorted(texts - chinese.keys()) == []


def test_translations_keep_the_placeholders_of_texts(chinese):
    texts = {key for key in chinese if not CODE.fullmatch(key)}
    assert [text for text in texts if placeholders(text) != placeholders(chinese[text])] == []


def test_no_translation_is_unused(chinese):
    texts = script_texts() | component_texts() | status_texts() | data_texts() | GRADIO_TEXTS
    assert sorted(chinese.keys() - texts - error_templates().keys()) == []


# Statuses


def make_run(*pieces: str, **request: Any) -> Run:
    image = make_input_image(Image.new("RGB", (80, 40)), PROCESSOR)
    request = {"prompt": "detect cat", "temperature": 0, "top_k": 0, "top_p": 1, "seed": 7, **request}
    run = Run(1, image, request, {"name": "m"})
    steps = StepCollector(FakeModel(pieces).stream(image.model_input, "detect cat", top_n=3))
    run.steps = list(steps)
    run.finish(steps.result)
    return run


def test_summary_has_timing_but_no_sampling_settings_for_greedy_decoding():
    text = messages.format_message(messages.summary(make_run("▁a")))
    assert text == "The answer is complete · 2 tokens · image encoding 0.01 s · first token 0.02 s · 50.0 tokens/s"


@pytest.mark.parametrize(
    ("request_fields", "end"),
    [
        ({"temperature": 0.5, "top_k": 40}, " · temperature 0.5 · top-k 40 · seed 7"),
        ({"temperature": 0.5, "top_p": 0.9}, " · temperature 0.5 · top-p 0.9 · seed 7"),
    ],
)
def test_summary_has_the_sampling_settings_that_are_on(request_fields, end):
    run = make_run("▁a", **request_fields)
    assert messages.format_message(messages.summary(run)).endswith(end)
    assert messages.format_message(messages.run_shown(run)) == "Run 1 · 2 tokens" + end
    run.finish(None)
    assert messages.format_message(messages.summary(run)) == "Stopped · 2 tokens" + end


def test_badge_of_a_loaded_model():
    ready = messages.model_ready("m", 3_700_000, "bfloat16", "cpu", None)
    assert messages.format_message(ready) == "m · 3.7 M · bfloat16 · cpu"
    ready = messages.model_ready("m", 2_923_335_408, "float32", "cuda:0", 30.0)
    assert messages.format_message(ready) == "m · 2.92 B · float32 · cuda:0 · logits soft-capped at ±30"


def test_a_value_of_a_status_may_be_a_status():
    reason = messages.status("error", "{name} is missing", name="config.json")
    status = messages.status("error", "{name} could not be loaded. {reason}", name="{m}", reason=reason)
    assert messages.format_message(status) == "{m} could not be loaded. config.json is missing"
