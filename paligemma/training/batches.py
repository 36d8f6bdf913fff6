"""Training batches: images, labels of every image patch, and tokenized questions.

Batches are built in worker processes. A batch depends only on seed, stage and step, so that an interrupted run resumes
with the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paligemma.attention_mask import PREFIX, SUFFIX, prefix_lm_visible
from paligemma.parsing import CODES_PER_MASK
from paligemma.training.classes import CLASSES, COLORS
from paligemma.training.icons import TRAINED_STYLES, load_sprites
from paligemma.training.layout import TRAINING, SceneOptions
from paligemma.training.masks import MaskEncoder
from paligemma.training.scenes import Scene, SceneGenerator
from paligemma.training.tasks import Question, sample_questions
from paligemma.training.tokenizer import BOS, EOS, PAD, build_tokenizer

IMAGE_SIZE, PATCH_SIZE = 112, 14
GRID = IMAGE_SIZE // PATCH_SIZE
NUM_PATCHES = GRID**2
SPRITE_SIZE = 96
IGNORED = -100  # label that is ignored by the losses
# A patch is labeled with the object that covers most of it, if it covers at least this fraction.
MIN_COVERAGE = 0.2
COVERAGE_CELL = 2  # pixels
COVERAGE_CELLS = (PATCH_SIZE // COVERAGE_CELL) ** 2
STAGES = {"vision": 1, "packed": 2, "single": 3}
MAX_IMAGES = 1000  # per batch; spaces the scene indices of the batches
CLASS_INDEX = {name: index for index, name in enumerate(CLASSES)}
COLOR_INDEX = {name: index for index, name in enumerate(COLORS)}
SCENE_OPTIONS: dict[str, SceneOptions] = {
    "vision": TRAINING,
    "packed": TRAINING,
    "single": replace(TRAINING, count_weights=(0.2, 0.27, 0.31, 0.22)),
}


@dataclass(frozen=True)
class BatchOptions:
    """Batch sizes: images per batch, questions per image, and text tokens per sequence."""

    vision_images: int = 64
    packed_images: int = 24
    packed_tokens: int = 160
    single_images: int = 16
    single_questions: int = 4
    single_tokens: int = 36


@dataclass(frozen=True, eq=False)
class Batch:
    """A training batch: B images of N patches, R text sequences of T tokens.

    Attributes:
        images: uint8 (B, S, S, 3).
        patch_class: int64 (B, N), class index, or len(CLASSES) for background.
        patch_color: int64 (B, N), color index, or IGNORED.
        patch_box: float32 (B, N, 4), [x0, y0, x1, y1] of the object as fractions of the image side.
        patch_codes: int64 (B, N, 16), mask codes of the object, 0 for background.
        patch_coverage: float32 (B, N, 49), fraction of each 2 x 2 pixel cell that is covered by objects.
        ids: int64 (R, T), token ids. This and the following are None in the vision stage.
        segment: int64 (R, T), index of the question in its sequence, -1 for padding.
        token_types: int64 (R, T), PREFIX or SUFFIX.
        targets: int64 (R, T), the next token where it is part of an answer, otherwise IGNORED.
    """

    images: np.ndarray
    patch_class: np.ndarray
    patch_color: np.ndarray
    patch_box: np.ndarray
    patch_codes: np.ndarray
    patch_coverage: np.ndarray
    ids: np.ndarray | None = None
    segment: np.ndarray | None = None
    token_types: np.ndarray | None = None
    targets: np.ndarray | None = None


class QuestionEncoder:
    """Tokenizes questions, including the mask codes of their answers."""

    def __init__(self, mask_encoder: MaskEncoder) -> None:
        self.tokenizer = build_tokenizer()
        self.mask_encoder = mask_encoder

    def prefix_and_suffix(self, question: Question) -> tuple[list[int], list[int]]:
        """Return the token ids of (bos, prompt, newline) and of (answer, eos)."""
        return [BOS, *self._tokenize(f"{question.prompt}\n")], [*self._tokenize(self.answer(question)), EOS]

    def answer(self, question: Question) -> str:
        """Return the answer with `<seg>` tokens for the masks."""
        masks = [target.mask for target in question.targets if target.mask is not None]
        if not masks:
            return question.answer
        codes = self.mask_codes(masks).tolist()
        return question.answer_with(["".join(f"<seg{code:03d}>" for code in mask) for mask in codes])

    def mask_codes(self, masks: Sequence[np.ndarray]) -> Tensor:
        """Encode masks (64, 64) as codes (n, 16), int64."""
        return self.mask_encoder.encode(torch.from_numpy(np.stack(masks)))

    def _tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


class BatchBuilder:
    """Builds the batches of all stages; one instance per worker process."""

    def __init__(self, icons: Path, mask_encoder: Path, options: BatchOptions, seed: int) -> None:
        sprites = load_sprites(icons, SPRITE_SIZE, TRAINED_STYLES)
        self.options, self.seed = options, seed
        self.scenes = {
            stage: SceneGenerator(sprites, TRAINED_STYLES, scene_options, seed)
            for stage, scene_options in SCENE_OPTIONS.items()
        }
        self.encoder = QuestionEncoder(MaskEncoder.load(mask_encoder))

    def build(self, stage: str, step: int) -> Batch:
        """Build the batch of a stage ("vision", "packed" or "single") and step."""
        rng = np.random.default_rng([STAGES[stage], self.seed, step])
        first = (step * len(STAGES) + STAGES[stage] - 1) * MAX_IMAGES
        num_images = getattr(self.options, f"{stage}_images")
        scenes = [self.scenes[stage].scene(first + index, IMAGE_SIZE) for index in range(num_images)]
        batch = self._images_and_labels(scenes)
        if stage == "vision":
            return batch
        text = self._packed_text(scenes, rng) if stage == "packed" else self._single_text(scenes, rng)
        return replace(batch, **text)

    def _images_and_labels(self, scenes: Sequence[Scene]) -> Batch:
        codes = self.encoder.mask_codes([obj.mask() for scene in scenes for obj in scene.objects]).numpy()
        per_scene = np.split(codes, np.cumsum([len(scene.objects) for scene in scenes])[:-1])
        labels = [patch_labels(scene, codes) for scene, codes in zip(scenes, per_scene, strict=True)]
        images = np.stack([scene.image for scene in scenes])
        return Batch(images, *(np.stack(part) for part in zip(*labels, strict=True)))

    def _packed_text(self, scenes: Sequence[Scene], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """One sequence of several questions per image."""
        sequences = []
        for scene in scenes:
            encoded = [self.encoder.prefix_and_suffix(q) for q in sample_questions(scene, rng, 14)]
            sequences.append(pack(encoded, self.options.packed_tokens))
        return stack_sequences(sequences)

    def _single_text(self, scenes: Sequence[Scene], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Several sequences of one question per image."""
        sequences = []
        for scene in scenes:
            encoded = [self.encoder.prefix_and_suffix(q) for q in sample_questions(scene, rng, 8)]
            fitting = [pair for pair in encoded if sum(map(len, pair)) <= self.options.single_tokens]
            chosen = [fitting[index % len(fitting)] for index in range(self.options.single_questions)]
            sequences += [pack([pair], self.options.single_tokens) for pair in chosen]
        return stack_sequences(sequences)


def patch_labels(scene: Scene, codes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Compute class, color, box, codes and coverage of every patch, see `Batch`.

    Args:
        codes: (objects, 16), mask codes of the scene's objects.
    """
    owner = np.full((scene.size, scene.size), -1)
    for index, obj in enumerate(scene.objects):
        height, width = obj.alpha.shape
        x, y = obj.corner
        owner[y : y + height, x : x + width][obj.alpha >= 128] = index
    patches = owner.reshape(GRID, PATCH_SIZE, GRID, PATCH_SIZE).swapaxes(1, 2).reshape(NUM_PATCHES, -1)
    covered = np.stack([(patches == index).mean(1) for index in range(len(scene.objects))])  # (objects, N)
    largest, labeled = covered.argmax(0), covered.max(0) >= MIN_COVERAGE
    classes = np.array([CLASS_INDEX[obj.class_name] for obj in scene.objects])
    colors = np.array([IGNORED if obj.color is None else COLOR_INDEX[obj.color] for obj in scene.objects])
    boxes = np.stack([obj.box / scene.size for obj in scene.objects]).astype(np.float32)
    return (
        np.where(labeled, classes[largest], len(CLASSES)),
        np.where(labeled, colors[largest], IGNORED),
        boxes[largest],
        np.where(labeled[:, None], codes[largest], np.zeros(CODES_PER_MASK, np.int64)),
        _cell_coverage(patches >= 0),
    )


def _cell_coverage(covered: np.ndarray) -> np.ndarray:
    """Average pixels, bool (N, PATCH_SIZE**2), over cells: float32 (N, COVERAGE_CELLS)."""
    cells = PATCH_SIZE // COVERAGE_CELL
    grid = covered.reshape(-1, cells, COVERAGE_CELL, cells, COVERAGE_CELL)
    return grid.mean((2, 4), dtype=np.float32).reshape(-1, COVERAGE_CELLS)


def pack(encoded: Sequence[tuple[list[int], list[int]]], length: int) -> dict[str, np.ndarray]:
    """Concatenate the questions that fit into one sequence of `length` tokens; returns the text fields of `Batch`."""
    sequence = {
        "ids": np.full(length, PAD),
        "segment": np.full(length, -1),
        "token_types": np.full(length, PREFIX),
        "targets": np.full(length, IGNORED),
    }
    start = segment = 0
    for prefix, suffix in encoded:
        tokens = prefix + suffix
        end, answer = start + len(tokens), start + len(prefix)
        if end > length:
            continue
        sequence["ids"][start:end] = tokens
        sequence["segment"][start:end] = segment
        sequence["token_types"][answer:end] = SUFFIX
        sequence["targets"][answer - 1 : end - 1] = suffix
        start, segment = end, segment + 1
    return sequence


def stack_sequences(sequences: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack the results of `pack` along a new first axis."""
    return {name: np.stack([sequence[name] for sequence in sequences]) for name in sequences[0]}


def packed_visible(segment: Tensor, token_types: Tensor) -> Tensor:
    """Attention in a packed sequence: image tokens see each other, a question sees the image and itself.

    Two image tokens, then two questions, each of a prefix token and a suffix token (1: visible):

        [[1 1 0 0 0 0]
         [1 1 0 0 0 0]
         [1 1 1 0 0 0]
         [1 1 1 1 0 0]
         [1 1 0 0 1 0]
         [1 1 0 0 1 1]]

    Args:
        segment: (B, T), index of the question, -1 for padding. token_types: (B, T), PREFIX or SUFFIX.

    Returns:
        bool, (B, 1, N + T, N + T), N being NUM_PATCHES.
    """
    batch, length = segment.shape
    same_question = (segment[:, :, None] == segment[:, None, :])[:, None]
    text = same_question & prefix_lm_visible(token_types, token_types)
    total = NUM_PATCHES + length
    visible = torch.ones((batch, 1, total, total), dtype=torch.bool, device=segment.device)
    visible[:, :, :NUM_PATCHES, NUM_PATCHES:] = False
    visible[:, :, NUM_PATCHES:, NUM_PATCHES:] = text
    return visible


def packed_positions(segment: Tensor) -> Tensor:
    """Position ids (B, N + T): 1 to N for the image; every question continues from N + 1."""
    length = segment.shape[1]
    index = torch.arange(length, device=segment.device).expand_as(segment)
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[:, 1:] = segment[:, 1:] != segment[:, :-1]
    offset = index - torch.where(starts, index, 0).cummax(dim=1).values
    image = torch.arange(1, NUM_PATCHES + 1, device=segment.device).expand(len(segment), -1)
    return torch.cat((image, offset + NUM_PATCHES + 1), dim=1)


def single_inputs(text: dict[str, Tensor], image_token_id: int) -> dict[str, Tensor]:
    """Return the model's inputs for sequences of one question: ids with image tokens, padding and token types."""
    image = (len(text["ids"]), NUM_PATCHES)
    return {
        "input_ids": torch.cat((text["ids"].new_full(image, image_token_id), text["ids"]), dim=1),
        "attention_mask": torch.cat((text["ids"].new_ones(image), (text["segment"] >= 0).long()), dim=1),
        "token_type_ids": torch.cat((text["ids"].new_full(image, PREFIX), text["token_types"]), dim=1),
    }


_builder: BatchBuilder | None = None


def start_worker(icons: Path, mask_encoder: Path, options: BatchOptions, seed: int) -> None:
    """Initialize a worker process for `build_batch`."""
    global _builder
    torch.set_num_threads(1)
    _builder = BatchBuilder(icons, mask_encoder, options, seed)


def build_batch(stage_and_step: tuple[str, int]) -> Batch:
    """Build a batch in a worker process."""
    assert _builder is not None
    return _builder.build(*stage_and_step)
