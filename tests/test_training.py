"""The bundled model's training: rows, masks, losses and the plan."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.training.batches import NUM_PATCHES, pack, packed_positions, packed_visible, single_inputs
from paligemma.training.masks import MaskEncoder
from paligemma.training.train import (
    TrainOptions,
    Vocabulary,
    demo_config,
    find_state,
    initialize,
    location_loss,
    text_loss,
)

QUESTIONS = [([2, 300, 301, 260], [310, 311, 1]), ([2, 302, 260], [1]), ([2, 303, 304, 260], [312, 313, 314, 1])]


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    encoder = MaskEncoder()
    encoder.centres.copy_(torch.rand(128, 256, generator=torch.Generator().manual_seed(0)))
    return Vocabulary(encoder)


@pytest.fixture(scope="module")
def model(words: Vocabulary) -> PaliGemmaForConditionalGeneration:
    model = PaliGemmaForConditionalGeneration(demo_config(words.size, words.image))
    initialize(model, words, seed=0)
    return model.eval()


def as_tensors(row: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values)[None] for name, values in row.items()}


def test_only_places_and_codes_are_disturbed_and_not_by_much(words):
    torch.manual_seed(0)
    codes = torch.arange(words.first_mask_code, words.image).repeat(40, 1)
    places = words.location_ids[:-1].repeat(40, 1)
    plain = torch.arange(2, 200).repeat(40, 1)
    assert torch.equal(words.disturbed(plain), plain)
    found = words.disturbed(codes)
    assert words.is_mask_code(found).all() and 0.15 < (found != codes).float().mean() < 0.4
    shifted = words.disturbed(places)
    assert torch.isin(shifted, words.location_ids).all()
    off = (shifted - places).float()
    assert 0.1 < (off != 0).float().mean() < 0.4 and 3 < off[off != 0].abs().mean() < 12


def test_a_row_holds_the_questions_that_fit_and_learns_only_answers():
    row = pack(QUESTIONS, 14)
    assert row["ids"].tolist() == [2, 300, 301, 260, 310, 311, 1, 2, 302, 260, 1, 0, 0, 0]
    assert row["segment"].tolist() == [0] * 7 + [1] * 4 + [-1] * 3
    assert row["kind"].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0]
    learned = {place: token for place, token in enumerate(row["targets"].tolist()) if token != -100}
    assert learned == {3: 310, 4: 311, 5: 1, 9: 1}


def test_positions_start_anew_behind_the_picture_for_each_question():
    positions = packed_positions(torch.from_numpy(pack(QUESTIONS, 14)["segment"])[None])[0].tolist()
    first = NUM_PATCHES + 1
    assert positions[:NUM_PATCHES] == list(range(1, first))
    assert positions[NUM_PATCHES : NUM_PATCHES + 11] == [first + n for n in (0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3)]


def packed_logits(model: PaliGemmaForConditionalGeneration, questions: list, features: torch.Tensor) -> torch.Tensor:
    text = as_tensors(pack(questions, 24))
    decoder = model.language_model.model
    rows = torch.cat((features, decoder.scale_embeddings(decoder.embed_tokens(text["ids"]))), dim=1)
    visible = packed_visible(text["segment"], text["kind"])
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    hidden = decoder(rows, mask, position_ids=packed_positions(text["segment"]))
    return model.language_model.compute_logits(hidden[:, NUM_PATCHES:])[0]


@torch.inference_mode()
def test_packed_questions_do_not_see_each_other(model):
    features = torch.randn(1, NUM_PATCHES, 192, generator=torch.Generator().manual_seed(1))
    together = packed_logits(model, QUESTIONS, features)
    starts = [0, 7, 11]
    for question, start in zip(QUESTIONS, starts, strict=True):
        length = sum(map(len, question))
        alone = packed_logits(model, [question], features)[:length]
        torch.testing.assert_close(together[start : start + length], alone, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_single_rows_are_those_of_the_models_training_forward(model):
    """Padding behind the answer changes nothing, and the labels' loss is that of the targets."""
    features = torch.randn(1, NUM_PATCHES, 192, generator=torch.Generator().manual_seed(2))
    prefix, suffix = QUESTIONS[0]
    text = as_tensors(pack([QUESTIONS[0]], 16))
    padded = model(**single_inputs(text, model.config.image_token_index), image_features=features)["logits"]
    ids = torch.tensor([[model.config.image_token_index] * NUM_PATCHES + prefix + suffix])
    labels = torch.tensor([[-100] * (NUM_PATCHES + len(prefix)) + suffix])
    types = (labels != -100).long()
    exact = model(ids, token_type_ids=types, labels=labels, image_features=features)
    torch.testing.assert_close(padded[:, : ids.shape[1]], exact["logits"], atol=1e-4, rtol=1e-4)
    asked = text["targets"] != -100
    loss = torch.nn.functional.cross_entropy(padded[:, NUM_PATCHES:][asked], text["targets"][asked])
    torch.testing.assert_close(loss, exact["loss"], atol=1e-5, rtol=1e-5)


def test_a_location_is_cheapest_at_its_own_bin_and_costs_little_beside_it(words):
    bins = torch.tensor([496])
    costs = [
        location_loss(torch.zeros(1, 257).index_fill(1, torch.tensor([at]), 9.0), bins, 8.0) for at in (124, 126, 160)
    ]
    assert costs[0] < costs[1] < costs[2]


def test_the_text_loss_falls_when_the_true_tokens_get_likelier(words):
    targets = torch.tensor([310, words.first_location + 40, words.first_mask_code + 3, 1])
    flat = torch.zeros(4, words.size)
    better = flat.scatter(1, targets[:, None], 5.0)
    assert text_loss(better, targets, words, 0.5)[0] < text_loss(flat, targets, words, 0.5)[0]
    only_words, means = text_loss(flat[:1], targets[:1], words, 0.0)
    assert torch.isfinite(only_words), "a batch without locations must not be NaN"
    assert list(means) == ["words"]


def test_a_location_off_the_grid_costs_the_answer(words):
    """Else the model would divide its belief between places that no answer uses."""
    targets = torch.tensor([words.first_location + 40])
    flat = torch.zeros(1, words.size)
    off_grid = flat.index_fill(1, targets + 1, 12.0)
    assert text_loss(off_grid, targets, words, 0.5)[0] > text_loss(flat, targets, words, 0.5)[0] + 1


def test_the_plan_ends_with_single_rows_and_a_rate_of_zero():
    options = TrainOptions(vision_steps=10, steps=30, cooldown_steps=9, warmup_steps=2)
    stages = [options.stage(step) for step in range(options.total_steps)]
    assert stages[:10] == ["vision"] * 10 and set(stages[10:31]) == {"packed", "single"}
    assert stages[31:37].count("single") == 3
    assert stages[37:] == ["single"] * 3
    factors = [options.rate_factor(step) for step in range(options.total_steps)]
    assert factors[0] < 1 and factors[15] == 1 and factors[-1] == pytest.approx(1 / 9)
    longer = dataclasses.replace(options, steps=60)
    assert [longer.stage(step) for step in range(31)] == stages[:31], "a longer plan shares the shorter one's beginning"


def test_a_longer_plan_goes_on_from_before_the_rate_fell(tmp_path):
    options = TrainOptions(work=tmp_path, steps=30)
    assert find_state(options) is None
    torch.save({"total_steps": options.total_steps}, tmp_path / "state.pt")
    longer = dataclasses.replace(options, steps=60)
    assert find_state(longer) == tmp_path / "state.pt", "a plan changed before its rate fell goes on where it was"
    torch.save({"total_steps": options.total_steps}, tmp_path / "plateau.pt")
    assert find_state(options) == tmp_path / "state.pt"
    assert find_state(longer) == tmp_path / "plateau.pt"
