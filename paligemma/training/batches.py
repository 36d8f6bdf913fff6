"""Training batches of the bundled model: pictures, labels for each patch, and questions laid out for the decoder.

Batches are made in worker processes. Batch `step` of a stage depends on the seed, the stage and the step alone, so that
a run that was interrupted goes on with the same data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paligemma.attention_mask import prefix_lm_visible
from paligemma.parsing import CODES_PER_MASK
from paligemma.training.icons import CLASSES, COLORS, STYLES_TRAINED, load_sprites
from paligemma.training.masks import MaskEncoder
from paligemma.training.scenes import TRAINING, Scene, SceneMaker, SceneOptions
from paligemma.training.tasks import Question, sample_questions
from paligemma.training.tokenizer import build_tokenizer

IMAGE_SIZE, PATCH_SIZE = 112, 14
GRID = IMAGE_SIZE // PATCH_SIZE
NUM_PATCHES = GRID**2
SPRITE_SIZE = 96
BOS, EOS, PAD = 2, 1, 0
NO_LABEL = -100
# A patch belongs to the object that covers most of it, if that is at least this share.
COVERED_SHARE = 0.2
CELL_SIZE = 2
COVER_CELLS = (PATCH_SIZE // CELL_SIZE) ** 2
STAGES = {"vision": 1, "packed": 2, "single": 3}
CLASS_NUMBERS = {name: number for number, name in enumerate(CLASSES)}
COLOR_NUMBERS = {name: number for number, name in enumerate(COLORS)}


@dataclass(frozen=True)
class BatchOptions:
    """Sizes: pictures a batch in each stage, text tokens a row, questions a picture in the single stage."""

    vision_pictures: int = 64
    packed_pictures: int = 24
    packed_tokens: int = 160
    single_pictures: int = 16
    single_questions: int = 4
    single_tokens: int = 36


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's data.

    `images` uint8 (B, S, S, 3). For each of the N patches: `patch_class` int64 (B, N), len(CLASSES) for background;
    `patch_color` int64 (B, N), -100 where there is none; `patch_box` float32 (B, N, 4), [x0, y0, x1, y1] as shares;
    `patch_codes` int64 (B, N, 16), the codes of the object's mask, 0 on background; `patch_cover` float32 (B, N, 49),
    how much of each of its 7 x 7 cells any object covers.
    Text, absent in the vision stage, int64 (R, T): `ids`; `segment`, the question's number in its row, -1 at padding;
    `kind`, 0 prefix and 1 suffix; `targets`, the next token where it is to be learned, else -100.
    """

    images: np.ndarray
    patch_class: np.ndarray
    patch_color: np.ndarray
    patch_box: np.ndarray
    patch_codes: np.ndarray
    patch_cover: np.ndarray
    ids: np.ndarray | None = None
    segment: np.ndarray | None = None
    kind: np.ndarray | None = None
    targets: np.ndarray | None = None


class TextEncoder:
    """Questions to ids, with the codes of their masks filled in."""

    def __init__(self, mask_encoder: MaskEncoder) -> None:
        self.tokenizer = build_tokenizer()
        self.mask_encoder = mask_encoder

    def prefix_and_suffix(self, question: Question) -> tuple[list[int], list[int]]:
        """(bos, prompt, newline) and (answer, eos)."""
        return self._ids([BOS], f"{question.prompt}\n"), [*self._ids([], self.answer(question)), EOS]

    def answer(self, question: Question) -> str:
        """The answer, a segmentation's masks as `<seg>` codes."""
        if question.task != "segment" or not question.targets:
            return question.answer
        codes = self.codes([target.mask for target in question.targets]).tolist()
        return question.answer_with(["".join(f"<seg{code:03d}>" for code in one) for one in codes])

    def codes(self, masks: Sequence[np.ndarray]) -> Tensor:
        """The codes (n, 16), int64, of masks (64, 64)."""
        return self.mask_encoder.encode(torch.from_numpy(np.stack(masks)))

    def _ids(self, first: list[int], text: str) -> list[int]:
        return first + self.tokenizer.encode(text, add_special_tokens=False).ids


class BatchMaker:
    """Makes the batches of every stage; one lives in each worker process."""

    def __init__(self, icons: Path, mask_encoder: Path, options: BatchOptions, seed: int) -> None:
        sprites = load_sprites(icons, SPRITE_SIZE, STYLES_TRAINED)
        self.options, self.seed = options, seed
        self.scenes = {
            name: SceneMaker(sprites, STYLES_TRAINED, scene_options, seed) for name, scene_options in _SCENES.items()
        }
        self.text = TextEncoder(MaskEncoder.load(mask_encoder))

    def make(self, stage: str, step: int) -> Batch:
        """Batch number `step` of a stage ("vision", "packed" or "single")."""
        generator = np.random.default_rng([STAGES[stage], self.seed, step])
        images = getattr(self.options, f"{stage}_pictures")
        first = (step * len(STAGES) + STAGES[stage] - 1) * 1000  # stages and steps never share a scene
        scenes = [self.scenes[stage].scene(first + number, IMAGE_SIZE) for number in range(images)]
        batch = self._pictures(scenes)
        if stage == "vision":
            return batch
        rows = self._packed_rows(scenes, generator) if stage == "packed" else self._single_rows(scenes, generator)
        return replace(batch, **rows)

    def _pictures(self, scenes: Sequence[Scene]) -> Batch:
        """The pictures and their patch labels."""
        codes = self.text.codes([thing.mask() for scene in scenes for thing in scene.objects]).numpy()
        per_scene = np.split(codes, np.cumsum([len(scene.objects) for scene in scenes])[:-1])
        labels = [patch_labels(scene, codes) for scene, codes in zip(scenes, per_scene, strict=True)]
        images = np.stack([scene.image for scene in scenes])
        return Batch(images, *(np.stack(part) for part in zip(*labels, strict=True)))

    def _packed_rows(self, scenes: Sequence[Scene], generator: np.random.Generator) -> dict[str, np.ndarray]:
        rows = []
        for scene in scenes:
            encoded = [self.text.prefix_and_suffix(q) for q in sample_questions(scene, generator, 14)]
            rows.append(pack(encoded, self.options.packed_tokens))
        return _stack(rows)

    def _single_rows(self, scenes: Sequence[Scene], generator: np.random.Generator) -> dict[str, np.ndarray]:
        rows = []
        for scene in scenes:
            encoded = [self.text.prefix_and_suffix(q) for q in sample_questions(scene, generator, 8)]
            fitting = [pair for pair in encoded if sum(map(len, pair)) <= self.options.single_tokens]
            chosen = [fitting[number % len(fitting)] for number in range(self.options.single_questions)]
            rows += [pack([pair], self.options.single_tokens) for pair in chosen]
        return _stack(rows)


_SCENES: dict[str, SceneOptions] = {
    "vision": TRAINING,
    "packed": TRAINING,
    "single": replace(TRAINING, counts=(0.2, 0.27, 0.31, 0.22)),
}


def patch_labels(scene: Scene, codes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Class (N,), color (N,), box (N, 4), codes (N, 16) and cover (N, 49) of each patch, see `Batch`.

    Args:
        codes: (objects, 16), the codes of each object's mask.
    """
    owner = np.full((scene.size, scene.size), -1)
    for number, thing in enumerate(scene.objects):
        height, width = thing.alpha.shape
        x, y = thing.corner
        owner[y : y + height, x : x + width][thing.alpha >= 128] = number
    patches = owner.reshape(GRID, PATCH_SIZE, GRID, PATCH_SIZE).swapaxes(1, 2).reshape(NUM_PATCHES, -1)
    covered = np.stack([(patches == number).mean(1) for number in range(len(scene.objects))])  # (objects, N)
    winner, enough = covered.argmax(0), covered.max(0) >= COVERED_SHARE
    classes = np.array([CLASS_NUMBERS[thing.class_name] for thing in scene.objects])
    colors = np.array([COLOR_NUMBERS.get(thing.color, NO_LABEL) for thing in scene.objects])
    boxes = np.stack([thing.box / scene.size for thing in scene.objects]).astype(np.float32)
    return (
        np.where(enough, classes[winner], len(CLASSES)),
        np.where(enough, colors[winner], NO_LABEL),
        boxes[winner],
        np.where(enough[:, None], codes[winner], np.zeros(CODES_PER_MASK, np.int64)),
        _cover(patches >= 0),
    )


def _cover(covered: np.ndarray) -> np.ndarray:
    """The covered share of each cell of each patch, bool (N, PATCH_SIZE ** 2) -> float32 (N, COVER_CELLS)."""
    cells = PATCH_SIZE // CELL_SIZE
    return (
        covered.reshape(-1, cells, CELL_SIZE, cells, CELL_SIZE).mean((2, 4), dtype=np.float32).reshape(-1, COVER_CELLS)
    )


def pack(encoded: Sequence[tuple[list[int], list[int]]], length: int) -> dict[str, np.ndarray]:
    """As many questions as fit, one behind the other, in one row of `length` tokens; the fields of `Batch`."""
    row = {
        name: np.full(length, fill) for name, fill in (("ids", PAD), ("segment", -1), ("kind", 0), ("targets", -100))
    }
    start = number = 0
    for prefix, suffix in encoded:
        tokens = prefix + suffix
        end, answer = start + len(tokens), start + len(prefix)
        if end > length:
            continue
        row["ids"][start:end] = tokens
        row["segment"][start:end] = number
        row["kind"][answer:end] = 1
        row["targets"][answer - 1 : end - 1] = suffix
        start, number = end, number + 1
    return row


def packed_visible(segment: Tensor, kind: Tensor) -> Tensor:
    """Who sees whom in a packed row: image tokens each other, a question the picture and itself.

    Two image tokens, then two questions, each of a prefix token and a suffix token (1: sees):

        [[1 1 0 0 0 0]
         [1 1 0 0 0 0]
         [1 1 1 0 0 0]
         [1 1 1 1 0 0]
         [1 1 0 0 1 0]
         [1 1 0 0 1 1]]

    Args:
        segment: (B, T), the question's number, -1 at padding. kind: (B, T), 0 prefix and 1 suffix.

    Returns:
        bool, (B, 1, N + T, N + T).
    """
    batch, length = segment.shape
    same = (segment[:, :, None] == segment[:, None, :])[:, None]
    text = same & prefix_lm_visible(kind, kind)
    visible = torch.ones(
        (batch, 1, NUM_PATCHES + length, NUM_PATCHES + length), dtype=torch.bool, device=segment.device
    )
    visible[:, :, :NUM_PATCHES, NUM_PATCHES:] = False
    visible[:, :, NUM_PATCHES:, NUM_PATCHES:] = text
    return visible


def packed_positions(segment: Tensor) -> Tensor:
    """Positions (B, N + T): the picture's tokens from 1, and each question counted from behind them."""
    length = segment.shape[1]
    index = torch.arange(length, device=segment.device).expand_as(segment)
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[:, 1:] = segment[:, 1:] != segment[:, :-1]
    offset = index - torch.where(starts, index, 0).cummax(dim=1).values
    image = torch.arange(1, NUM_PATCHES + 1, device=segment.device).expand(len(segment), -1)
    return torch.cat((image, offset + NUM_PATCHES + 1), dim=1)


def single_inputs(text: dict[str, Tensor], image_token: int) -> dict[str, Tensor]:
    """Arguments of the model's forward for rows of one question: ids with image tokens, padding and token types."""
    image = (len(text["ids"]), NUM_PATCHES)
    return {
        "input_ids": torch.cat((text["ids"].new_full(image, image_token), text["ids"]), dim=1),
        "attention_mask": torch.cat((text["ids"].new_ones(image), (text["segment"] >= 0).long()), dim=1),
        "token_type_ids": torch.cat((text["ids"].new_zeros(image), text["kind"]), dim=1),
    }


def _stack(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


_maker: BatchMaker | None = None


def start_worker(icons: Path, mask_encoder: Path, options: BatchOptions, seed: int) -> None:
    """Initialize a worker process of a pool that calls `make_batch`."""
    global _maker
    torch.set_num_threads(1)
    _maker = BatchMaker(icons, mask_encoder, options, seed)


def make_batch(stage_and_step: tuple[str, int]) -> Batch:
    """`BatchMaker.make` in a worker process."""
    return _maker.make(*stage_and_step)
