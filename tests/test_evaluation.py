"""Evaluation of a checkpoint, with a small random model and simple shapes as sprites."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_training_data import shape

from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.training import evaluate as evaluate_module
from paligemma.training.classes import COLORS
from paligemma.training.evaluate import MASK_DECODER, QuickEvaluation, evaluate, find_mask_decoder, print_table
from paligemma.training.icons import STYLES, Sprite, recolor
from paligemma.training.masks import MaskEncoder
from paligemma.training.model import bundled_config, export_model
from paligemma.training.tokenizer import build_tokenizer

GROUPS = ("1-3", "4")


@pytest.fixture(scope="module")
def model() -> PaliGemmaForConditionalGeneration:
    tokenizer = build_tokenizer()
    config = bundled_config(tokenizer.get_vocab_size(), tokenizer.token_to_id("<image>"))
    vision = replace(config.vision_config, num_hidden_layers=1)
    text = replace(config.text_config, num_hidden_layers=1, layer_types=None)
    torch.manual_seed(0)
    return PaliGemmaForConditionalGeneration(replace(config, vision_config=vision, text_config=text)).eval()


@pytest.fixture
def shape_sprites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the sprites of every style by four shapes."""

    def load_sprites(folder: Path, size: int, styles=STYLES) -> dict[str, dict[str, list[Sprite]]]:
        names = {name: [Sprite(name, "shapes", 0, None, shape(name))] for name in ("dog", "cat", "tree")}
        names["car"] = [Sprite("car", "shapes", 0, color, recolor(shape("car"), color, "main")) for color in COLORS]
        return dict.fromkeys(styles, names)

    monkeypatch.setattr(evaluate_module, "load_sprites", load_sprites)


def test_evaluate_reports_all_metrics(model, shape_sprites, tmp_path, capsys):
    export_model(model, tmp_path / "model")
    report = evaluate(str(tmp_path / "model"), tmp_path, ["noto"], few=1, four=1, workers=1)
    assert set(report) == {"noto"} and set(report["noto"]) == set(GROUPS)
    for group in GROUPS:
        metrics = report["noto"][group]
        assert metrics["scenes"] == 1
        assert {"caption_en exact", "caption_en recall", "multi_detect f1_50", "detect iou"} <= set(metrics)
        assert {"count exact", "present exact", "segment mask_iou"} <= set(metrics)
        assert all(0 <= value <= 1 for name, value in metrics.items() if name != "scenes")
        print_table(report, group)
    printed = capsys.readouterr().out
    assert "noto" in printed and "caption_zh exact" in printed


def test_mask_decoder_of_the_checkpoint_takes_precedence(tmp_path):
    bundled = evaluate_module.BUNDLED_MODEL / MASK_DECODER
    assert find_mask_decoder(None) == find_mask_decoder(str(tmp_path)) == bundled
    (tmp_path / MASK_DECODER).touch()
    assert find_mask_decoder(str(tmp_path)) == tmp_path / MASK_DECODER


def test_quick_evaluation_reports_held_out_styles_separately(model, shape_sprites, tmp_path):
    save_file(MaskEncoder().state_dict(), tmp_path / "encoder.safetensors")
    metrics = QuickEvaluation(tmp_path, tmp_path / "encoder.safetensors", few=1, four=1)(model)
    assert set(metrics) == {f"{name} {group}" for name in ("trained", "emojione", "openmoji") for group in GROUPS}
    assert all(0 <= value <= 1 for group in metrics.values() for value in group.values())
