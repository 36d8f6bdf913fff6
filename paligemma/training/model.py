"""The bundled model: configuration, initialization, export in the hub's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paligemma.checkpoint import save_model
from paligemma.config import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.parsing import LOCATION_BINS
from paligemma.training.batches import IMAGE_SIZE, PATCH_SIZE
from paligemma.training.tokenizer import BOS, EOS, PAD, save_tokenizer
from paligemma.training.vocabulary import Vocabulary

EMBEDDING_STD = 0.05
LOCATION_SMOOTHING = 24  # bins, standard deviation
RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight")


def bundled_config(vocab_size: int, image_token_index: int) -> PaliGemmaConfig:
    """Return the bundled model's configuration: 112 pixels, 64 image tokens, five decoder layers."""
    vision = SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    text = GemmaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
    )
    return PaliGemmaConfig(
        vision, text, image_token_index, bos_token_id=BOS, pad_token_id=PAD, eos_token_ids=(EOS,), dtype="bfloat16"
    )


def initialize_weights(model: PaliGemmaForConditionalGeneration, vocabulary: Vocabulary, seed: int) -> None:
    """Initialize the model with small residual branches and structured embeddings.

    Embeddings of neighboring `<loc>` tokens are similar, and so are those of `<seg>` tokens with similar shapes.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
            if name.endswith(RESIDUAL_OUTPUTS):
                parameter.data *= 0.3
        elif "embed" in name and parameter.ndim == 2:
            nn.init.normal_(parameter, std=EMBEDDING_STD, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    embeddings = model.language_model.get_input_embeddings().weight.data
    width = embeddings.shape[1]
    first = vocabulary.first_location
    embeddings[first : first + LOCATION_BINS] = _location_embeddings(width, generator)
    shapes = vocabulary.centroids - vocabulary.centroids.mean(0)
    projected = shapes @ torch.randn((shapes.shape[1], width), generator=generator)
    embeddings[vocabulary.first_mask_code : vocabulary.image] = EMBEDDING_STD * projected / projected.std()


def _location_embeddings(width: int, generator: torch.Generator) -> Tensor:
    """Sample noise that is smooth along the locations: (LOCATION_BINS, width)."""
    radius = 3 * LOCATION_SMOOTHING
    offsets = torch.arange(-radius, radius + 1) / LOCATION_SMOOTHING
    kernel = torch.exp(-0.5 * offsets**2)[None, None]
    noise = torch.randn((width, 1, LOCATION_BINS + 2 * radius), generator=generator)
    smooth = F.conv1d(noise, kernel)[:, 0].T
    return EMBEDDING_STD * smooth / smooth.std()


def export_model(model: PaliGemmaForConditionalGeneration, folder: Path) -> None:
    """Write the model in the hub's format: bfloat16 weights, tokenizer and configuration files."""
    save_tokenizer(folder)
    save_model(model, folder, dtype=torch.bfloat16)
    preprocessor = {
        "image_processor_type": "SiglipImageProcessor",
        "image_seq_length": model.config.vision_config.num_image_tokens,
        "do_resize": True,
        "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "PaliGemmaProcessor",
    }
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    for name, data in (("preprocessor_config", preprocessor), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
