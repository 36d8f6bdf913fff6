"""The bundled model's evaluation, from scenes to the table, with a small untrained model and shapes drawn here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_training_data import shape

from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.training import evaluate as evaluate_module
from paligemma.training.evaluate import MASK_DECODER, QuickEvaluation, evaluate, mask_decoder_file, print_table
from paligemma.training.icons import COLORS, STYLES, Sprite, repaint
from paligemma.training.masks import MaskEncoder
from paligemma.training.tokenizer import build_tokenizer
from paligemma.training.train import demo_config, export

GROUPS = ("1-3", "4")


@pytest.fixture(scope="module")
def model() -> PaliGemmaForConditionalGeneration:
    tokenizer = build_tokenizer()
    config = demo_config(tokenizer.get_vocab_size(), tokenizer.token_to_id("<image>"))
    vision = replace(config.vision_config, num_hidden_layers=1)
    text = replace(config.text_config, num_hidden_layers=1, layer_types=None)
    torch.manual_seed(0)
    return PaliGemmaForConditionalGeneration(replace(config, vision_config=vision, text_config=text)).eval()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every style draws the same four shapes."""

    def load_sprites(folder: Path, size: int, styles=STYLES) -> dict[str, dict[str, list[Sprite]]]:
        names = {name: [Sprite(name, "shapes", 0, None, shape(name))] for name in ("dog", "cat", "tree")}
        names["car"] = [Sprite("car", "shapes", 0, color, repaint(shape("car"), color, "main")) for color in COLORS]
        return dict.fromkeys(styles, names)

    monkeypatch.setattr(evaluate_module, "load_sprites", load_sprites)


def test_a_checkpoint_is_measured_from_end_to_end(model, drawn, tmp_path, capsys):
    export(model, tmp_path / "model")
    report = evaluate(str(tmp_path / "model"), tmp_path, ["noto"], few=1, four=1, workers=1)
    assert set(report) == {"noto"} and set(report["noto"]) == set(GROUPS)
    for group in GROUPS:
        figures = report["noto"][group]
        assert figures["scenes"] == 1
        assert {"caption_en exact", "caption_en recall", "multi_detect f1_50", "detect iou"} <= set(figures)
        assert {"count exact", "present exact", "segment mask_iou"} <= set(figures)
        assert all(0 <= value <= 1 for name, value in figures.items() if name != "scenes")
        print_table(report, group)
    printed = capsys.readouterr().out
    assert "noto" in printed and "caption_zh exact" in printed


def test_the_mask_decoder_is_the_model_s_own_or_the_bundled_one(tmp_path):
    bundled = evaluate_module.BUNDLED_FOLDER / MASK_DECODER
    assert mask_decoder_file(None) == mask_decoder_file(str(tmp_path)) == bundled
    (tmp_path / MASK_DECODER).touch()
    assert mask_decoder_file(str(tmp_path)) == tmp_path / MASK_DECODER


def test_the_quick_evaluation_tells_trained_styles_from_the_others(model, drawn, tmp_path):
    save_file(MaskEncoder().state_dict(), tmp_path / "encoder.safetensors")
    figures = QuickEvaluation(tmp_path, tmp_path / "encoder.safetensors", few=1, four=1)(model)
    assert set(figures) == {f"{name} {group}" for name in ("trained", "emojione", "openmoji") for group in GROUPS}
    assert all(0 <= value <= 1 for group in figures.values() for value in group.values())
