"""Training: sequences, attention masks, losses, schedule and resume files."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from paligemma.attention_mask import additive_mask
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.training.batches import IGNORED, NUM_PATCHES, pack, packed_positions, packed_visible, single_inputs
from paligemma.training.command_line import parse_options
from paligemma.training.losses import location_loss, text_loss
from paligemma.training.masks import MaskEncoder
from paligemma.training.model import bundled_config, initialize_weights
from paligemma.training.options import TrainOptions
from paligemma.training.resume import BEFORE_COOLDOWN, LATEST, find_resume_file, save_state
from paligemma.training.train import LOG_EVERY, LogWriter
from paligemma.training.vocabulary import Vocabulary

QUESTIONS = [([2, 300, 301, 260], [310, 311, 1]), ([2, 302, 260], [1]), ([2, 303, 304, 260], [312, 313, 314, 1])]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    encoder = MaskEncoder()
    encoder.centroids.copy_(torch.rand(128, 256, generator=torch.Generator().manual_seed(0)))
    return Vocabulary(encoder)


@pytest.fixture(scope="module")
def model(vocabulary: Vocabulary) -> PaliGemmaForConditionalGeneration:
    model = PaliGemmaForConditionalGeneration(bundled_config(vocabulary.size, vocabulary.image))
    initialize_weights(model, vocabulary, seed=0)
    return model.eval()


def as_tensors(sequence: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values)[None] for name, values in sequence.items()}


def test_corruption_replaces_some_locations_and_mask_codes_by_similar_ones(vocabulary):
    torch.manual_seed(0)
    codes = torch.arange(vocabulary.first_mask_code, vocabulary.image).repeat(40, 1)
    locations = vocabulary.location_ids[:-1].repeat(40, 1)
    text = torch.arange(2, 200).repeat(40, 1)
    assert torch.equal(vocabulary.corrupt(text), text)
    corrupted = vocabulary.corrupt(codes)
    assert vocabulary.is_mask_code(corrupted).all() and 0.15 < (corrupted != codes).float().mean() < 0.4
    shifted = vocabulary.corrupt(locations)
    assert torch.isin(shifted, vocabulary.location_ids).all()
    error = (shifted - locations).float()
    assert 0.1 < (error != 0).float().mean() < 0.4 and 3 < error[error != 0].abs().mean() < 12


def test_packed_sequence_contains_the_questions_that_fit_and_targets_for_answers():
    sequence = pack(QUESTIONS, 14)
    assert sequence["ids"].tolist() == [2, 300, 301, 260, 310, 311, 1, 2, 302, 260, 1, 0, 0, 0]
    assert sequence["segment"].tolist() == [0] * 7 + [1] * 4 + [-1] * 3
    assert sequence["token_types"].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0]
    targets = {index: token for index, token in enumerate(sequence["targets"].tolist()) if token != IGNORED}
    assert targets == {3: 310, 4: 311, 5: 1, 9: 1}


def test_positions_of_every_question_continue_from_the_image():
    positions = packed_positions(torch.from_numpy(pack(QUESTIONS, 14)["segment"])[None])[0].tolist()
    first = NUM_PATCHES + 1
    assert positions[:NUM_PATCHES] == list(range(1, first))
    assert positions[NUM_PATCHES : NUM_PATCHES + 11] == [first + n for n in (0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3)]


def packed_logits(model: PaliGemmaForConditionalGeneration, questions: list, features: torch.Tensor) -> torch.Tensor:
    text = as_tensors(pack(questions, 24))
    decoder = model.language_model.model
    inputs = torch.cat((features, decoder.scale_embeddings(decoder.embed_tokens(text["ids"]))), dim=1)
    visible = packed_visible(text["segment"], text["token_types"])
    mask = additive_mask(visible, torch.float32)
    hidden_states = decoder(inputs, mask, position_ids=packed_positions(text["segment"]))
    return model.language_model.compute_logits(hidden_states[:, NUM_PATCHES:])[0]


@torch.inference_mode()
def test_packed_questions_do_not_attend_to_each_other(model):
    features = torch.randn(1, NUM_PATCHES, 192, generator=torch.Generator().manual_seed(1))
    together = packed_logits(model, QUESTIONS, features)
    starts = [0, 7, 11]
    for question, start in zip(QUESTIONS, starts, strict=True):
        length = sum(map(len, question))
        alone = packed_logits(model, [question], features)[:length]
        torch.testing.assert_close(together[start : start + length], alone, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_single_sequences_equal_the_training_forward_pass(model):
    """Padding after the answer has no effect, and the loss of the targets equals the loss of the labels."""
    features = torch.randn(1, NUM_PATCHES, 192, generator=torch.Generator().manual_seed(2))
    prefix, suffix = QUESTIONS[0]
    text = as_tensors(pack([QUESTIONS[0]], 16))
    padded = model(**single_inputs(text, model.config.image_token_index), image_features=features)["logits"]
    ids = torch.tensor([[model.config.image_token_index] * NUM_PATCHES + prefix + suffix])
    labels = torch.tensor([[IGNORED] * (NUM_PATCHES + len(prefix)) + suffix])
    types = (labels != IGNORED).long()
    exact = model(ids, token_type_ids=types, labels=labels, image_features=features)
    torch.testing.assert_close(padded[:, : ids.shape[1]], exact["logits"], atol=1e-4, rtol=1e-4)
    learned = text["targets"] != IGNORED
    loss = torch.nn.functional.cross_entropy(padded[:, NUM_PATCHES:][learned], text["targets"][learned])
    torch.testing.assert_close(loss, exact["loss"], atol=1e-5, rtol=1e-5)


def test_location_loss_grows_with_the_distance_to_the_true_bin():
    bins = torch.tensor([496])
    predictions = [torch.zeros(1, 257).index_fill(1, torch.tensor([index]), 9.0) for index in (124, 126, 160)]
    losses = [location_loss(logits, bins, 8.0) for logits in predictions]
    assert losses[0] < losses[1] < losses[2]


def test_text_loss_decreases_with_the_probability_of_the_targets(vocabulary):
    targets = torch.tensor([310, vocabulary.first_location + 40, vocabulary.first_mask_code + 3, 1])
    flat = torch.zeros(4, vocabulary.size)
    better = flat.scatter(1, targets[:, None], 5.0)
    assert text_loss(better, targets, vocabulary, 0.5)[0] < text_loss(flat, targets, vocabulary, 0.5)[0]
    loss, means = text_loss(flat[:1], targets[:1], vocabulary, 0.0)
    assert torch.isfinite(loss), "NaN without location targets"
    assert list(means) == ["words"]


def test_text_loss_penalizes_locations_outside_the_grid(vocabulary):
    targets = torch.tensor([vocabulary.first_location + 40])
    flat = torch.zeros(1, vocabulary.size)
    off_grid = flat.index_fill(1, targets + 1, 12.0)
    assert text_loss(off_grid, targets, vocabulary, 0.5)[0] > text_loss(flat, targets, vocabulary, 0.5)[0] + 1


def test_schedule_ends_with_single_sequences_and_a_learning_rate_near_zero():
    options = TrainOptions(vision_steps=10, steps=30, cooldown_steps=9, warmup_steps=2)
    stages = [options.stage(step) for step in range(options.total_steps)]
    assert stages[:10] == ["vision"] * 10 and set(stages[10:31]) == {"packed", "single"}
    assert stages[31:37].count("single") == 3
    assert stages[37:] == ["single"] * 3
    factors = [options.learning_rate_factor(step) for step in range(options.total_steps)]
    assert factors[0] < 1 and factors[15] == 1 and factors[-1] == pytest.approx(1 / 9)
    longer = dataclasses.replace(options, steps=60)
    assert [longer.stage(step) for step in range(31)] == stages[:31], "extending the run must not change its beginning"


def test_extended_run_resumes_from_before_the_cooldown(tmp_path):
    options = TrainOptions(work=tmp_path, steps=30)
    assert find_resume_file(options) is None
    save_state({"total_steps": options.total_steps}, tmp_path / LATEST)
    longer = dataclasses.replace(options, steps=60)
    assert find_resume_file(longer) == tmp_path / LATEST, "before the cooldown, the latest state is used"
    save_state({"total_steps": options.total_steps}, tmp_path / BEFORE_COOLDOWN)
    assert find_resume_file(options) == tmp_path / LATEST
    assert find_resume_file(longer) == tmp_path / BEFORE_COOLDOWN


def test_options_are_parsed_by_type_with_defaults_in_the_help(capsys):
    options = parse_options(TrainOptions, "train", "", ["--steps", "5", "--rate", "1e-3", "--no-compile"])
    assert options == TrainOptions(steps=5, rate=1e-3, compile=False)
    with pytest.raises(SystemExit):
        parse_options(TrainOptions, "train", "", ["--help"])
    assert "steps of the vision stage (default: 1300)" in capsys.readouterr().out


def test_unknown_precision_raises():
    with pytest.raises(ValueError, match="float16"):
        TrainOptions(precision="float16")


def test_log_contains_mean_losses_and_evaluations(tmp_path):
    log = LogWriter(tmp_path / "work" / "log.jsonl")
    log.add_losses(LOG_EVERY - 1, "vision", {"total": 1.0})
    log.add_losses(LOG_EVERY, "vision", {"total": 2.0})
    log.write({"step": LOG_EVERY, "evaluation": {}})
    losses, evaluation = map(json.loads, log.path.read_text(encoding="utf-8").splitlines())
    assert (losses["step"], losses["vision_total"], "seconds" in losses) == (LOG_EVERY, 1.5, True)
    assert evaluation == {"step": LOG_EVERY, "evaluation": {}}
