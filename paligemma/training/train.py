"""Train the bundled model, from nothing to `assets/demo`: `python -m paligemma.training.train`.

A PaliGemma of about five million parameters learns to caption, count, find and segment emoji in pictures that are
composed while it trains. Three stages, each with the model's own classes:

* vision: the tower and projector alone learn what each patch shows, its color and its object's box. This stands in for
  SigLIP's pre-training; without it the decoder finds nothing to read for a long time.
* packed: many questions about a picture share its image tokens in one row, where image tokens see only each other. This
  is several times cheaper than a row a question and teaches most of what is to be learned.
* single: PaliGemma's own rows and masks, one question each, through the model's training forward. Every third step from
  the start, so that the model never drifts from the masks it is used with, more often while the learning rate falls to
  zero, and at the very end alone.

Matrices are updated by Muon, the rest by AdamW. A run that is stopped goes on where it was; a run that is started with
more steps than a finished one goes on from before that one's learning rate fell. The drawings are fetched with npm.
Needs `paligemma/training/requirements.txt`, and g++ for the compiled steps (`--no-compile` does without).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from paligemma.checkpoint import load_model, save_model
from paligemma.config import GemmaConfig, PaliGemmaConfig, SiglipVisionConfig
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.parsing import CODES_PER_MASK
from paligemma.training.batches import (
    BOS,
    COVER_CELLS,
    EOS,
    GRID,
    IMAGE_SIZE,
    NO_LABEL,
    NUM_PATCHES,
    PAD,
    PATCH_SIZE,
    Batch,
    BatchOptions,
    make_batch,
    packed_positions,
    packed_visible,
    single_inputs,
    start_worker,
)
from paligemma.training.evaluate import QuickEvaluation
from paligemma.training.icons import CLASSES, COLORS, fetch_icons
from paligemma.training.masks import MaskEncoder
from paligemma.training.tasks import LOCATION_BINS
from paligemma.training.tokenizer import build_tokenizer, save_tokenizer, word_pieces

LOG_EVERY = 50
NUM_LOCATIONS = 1024
# Of the places and codes that the model reads of its answer so far, at most this share is disturbed, half on average.
MOST_DISTURBED = 0.6
# How far a disturbed place lies off, in bins of 1024 (standard deviation): about as far as the model's own.
PLACE_NOISE = 6.0


@dataclass(frozen=True)
class TrainOptions:
    """What the command line sets.

    `start_from` is a folder with weights to begin with, where no state is left to go on from.
    `vision_steps`, then `steps` more, the last `cooldown_steps` of them with a falling learning rate. `matrix_rate` is
    Muon's (its updates are brought to AdamW's size), `rate` AdamW's. `precision` is what the products are computed in,
    "bfloat16" or "float32": some CPUs are faster in the one, some in the other.
    """

    output: Path = Path("assets/demo")
    work: Path = Path("runs/demo")
    icons: Path = Path("runs/icons")
    mask_encoder: Path = Path("runs/masks/encoder.safetensors")
    start_from: str = ""
    vision_steps: int = 1300
    steps: int = 8900
    cooldown_steps: int = 2900
    warmup_steps: int = 150
    matrix_rate: float = 1.2e-3
    rate: float = 5e-4
    weight_decay: float = 0.05
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    precision: str = "bfloat16"
    compile: bool = True
    evaluate_every: int = 500
    save_minutes: float = 3.0
    batch: BatchOptions = field(default_factory=BatchOptions)

    def __post_init__(self) -> None:
        if self.precision not in ("bfloat16", "float32"):
            raise ValueError(f"precision is {self.precision!r}, expected bfloat16 or float32")

    def stage(self, step: int) -> str:
        """The stage of a step, counted from 0 over the whole run."""
        if step < self.vision_steps:
            return "vision"
        left = (self.total_steps - step) / self.cooldown_steps  # above 1 before the rate falls, then down to 0
        if left <= 1 / 3:
            return "single"
        every = 3 if left > 1 else 2
        return "single" if step % every == every - 1 else "packed"

    @property
    def total_steps(self) -> int:
        return self.vision_steps + self.steps

    def rate_factor(self, step: int) -> float:
        """What the learning rates are multiplied by: a warm-up, a plateau, a straight fall to zero."""
        since_stage = step if step < self.vision_steps else step - self.vision_steps
        warm = min(1.0, (since_stage + 1) / self.warmup_steps)
        return warm * min(1.0, (self.total_steps - step) / self.cooldown_steps)

    def progress(self, step: int) -> float:
        """How far the text stages are, 0 to 1."""
        return min(1.0, max(0.0, (step - self.vision_steps) / max(1, self.steps)))


def demo_config(vocab_size: int, image_token_index: int) -> PaliGemmaConfig:
    """The bundled model's sizes: SigLIP at 112 pixels, 64 image tokens, a decoder of five layers."""
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


class Vocabulary:
    """The ids that the losses speak of."""

    def __init__(self, mask_encoder: MaskEncoder) -> None:
        tokenizer = build_tokenizer()
        self.code_centres = mask_encoder.centres.detach()
        self.code_targets = mask_encoder.likeness()
        self.code_noise = self.code_targets.pow(0.25)
        self.size = tokenizer.get_vocab_size()
        self.image = tokenizer.token_to_id("<image>")
        self.first_location = tokenizer.token_to_id("<loc0000>")
        self.location_ids = self.first_location + torch.tensor(LOCATION_BINS)
        self.first_mask_code = tokenizer.token_to_id("<seg000>")
        classes, colors = word_pieces(tokenizer)
        self.class_words = _columns([classes[name] for name in CLASSES])
        self.color_words = _columns([colors[name] for name in COLORS])

    def disturbed(self, ids: Tensor) -> Tensor:
        """Ids (B, T) with some places and mask codes off, as in an answer of the model's own.

        What is to be learned stays right. Without this the model learns each code from the true ones before it, and
        when it writes, its first error leads it astray (exposure bias: Bengio et al., arXiv 1506.03099).
        """
        off = torch.rand(ids.shape) < MOST_DISTURBED * torch.rand(len(ids), 1)
        ids = ids.clone()
        codes = off.to(ids.device) & self.is_mask_code(ids)
        drawn = torch.multinomial(self.code_noise[(ids[codes] - self.first_mask_code).cpu()], 1)[:, 0]
        ids[codes] = drawn.to(ids.device) + self.first_mask_code
        places = off.to(ids.device) & self.is_location(ids)
        shifted = ids[places] - self.first_location + PLACE_NOISE * torch.randn(int(places.sum()), device=ids.device)
        step = LOCATION_BINS[1]
        ids[places] = self.first_location + step * (shifted / step).round().long().clamp(0, NUM_LOCATIONS // step - 1)
        return ids

    def is_location(self, ids: Tensor) -> Tensor:
        return (ids >= self.first_location) & (ids < self.first_location + NUM_LOCATIONS)

    def is_mask_code(self, ids: Tensor) -> Tensor:
        return (ids >= self.first_mask_code) & (ids < self.image)


def _columns(words: list[list[int]]) -> Tensor:
    """Ids (variants, names): the k-th word of every name, the last one where a name has fewer."""
    longest = max(map(len, words))
    return torch.tensor([[ids[min(k, len(ids) - 1)] for ids in words] for k in range(longest)])


def initialize(model: PaliGemmaForConditionalGeneration, vocabulary: Vocabulary, seed: int) -> None:
    """Random weights: layers near the identity; neighboring `<loc>` rows alike, and `<seg>` rows that draw alike."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight", "fc2.weight")):
                parameter.data *= 0.3
        elif "embed" in name and parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.05, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    table = model.language_model.get_input_embeddings().weight.data
    rows = slice(vocabulary.first_location, vocabulary.first_location + NUM_LOCATIONS)
    offsets = torch.arange(-72, 73) / 24
    kernel = torch.exp(-0.5 * offsets**2)[None, None]
    noise = torch.randn((table.shape[1], 1, NUM_LOCATIONS + 144), generator=generator)
    smooth = F.conv1d(noise, kernel)[:, 0].T
    table[rows] = 0.05 * smooth / smooth.std()
    drawn = vocabulary.code_centres - vocabulary.code_centres.mean(0)
    mixed = drawn @ torch.randn((drawn.shape[1], table.shape[1]), generator=generator)
    table[vocabulary.first_mask_code : vocabulary.image] = 0.05 * mixed / mixed.std()


class DenseHeads(nn.Module):
    """What each patch shows, read from its features; used in training only.

    Classes, colors, boxes and the outline within the patch are read from the tower; the words that name them, the
    `<loc>` rows of the box and the `<seg>` rows of the mask from the projector's output, which so comes to lie among
    the embeddings.
    """

    def __init__(self, config: PaliGemmaConfig) -> None:
        super().__init__()
        vision, text = config.vision_config.hidden_size, config.text_config.hidden_size
        self.classes = nn.Linear(vision, len(CLASSES) + 1)
        self.colors = nn.Linear(vision, len(COLORS))
        self.boxes = nn.Linear(vision, 4)
        self.locations = nn.Linear(text, 4 * text)
        self.codes = nn.Linear(text, CODES_PER_MASK * text)
        self.cover = nn.Linear(vision, COVER_CELLS)

    def forward(
        self, tower: Tensor, rows: Tensor, table: Tensor, labels: dict[str, Tensor], words: Vocabulary
    ) -> Tensor:
        """The summed losses for tower features (B, N, vision), image rows (B, N, text) and the embedding table."""
        classes, colors, boxes = (labels[name].flatten(0, 1) for name in ("patch_class", "patch_color", "patch_box"))
        loss = F.cross_entropy(self.classes(tower).float().flatten(0, 1), classes)
        cover = self.cover(tower).float()
        loss = loss + 3 * F.binary_cross_entropy_with_logits(cover, labels["patch_cover"])
        # As many patches every time: oneDNN makes and keeps new kernels for every new shape.
        shown = (classes < len(CLASSES)).nonzero()[:, 0]
        shown = shown[torch.randint(len(shown), (len(classes) // 6,), device=shown.device)]
        tower, rows = tower.flatten(0, 1)[shown], _normalized(rows.flatten(0, 1)[shown].float())
        classes, painted, boxes = classes[shown], colors[shown], boxes[shown]
        centres = patch_centres(tower.device)[shown % NUM_PATCHES]
        loss = loss + 8 * (self.boxes(tower).float() + centres - boxes).abs().mean()
        loss = loss + 0.5 * _mean_loss(self.colors(tower).float(), painted)
        for ids in words.class_words:
            loss = loss + 0.5 / len(words.class_words) * F.cross_entropy(rows @ table[ids].T, classes)
        for ids in words.color_words:
            loss = loss + 0.2 / len(words.color_words) * _mean_loss(rows @ table[ids].T, painted)
        queries = _normalized(self.locations(rows).unflatten(-1, (4, -1)))
        bins = boxes[:, [1, 0, 3, 2]].flatten() * NUM_LOCATIONS
        scores = (queries @ table[words.location_ids].T).flatten(0, 1)
        loss = loss + 0.25 * location_loss(scores, bins, 8.0).mean()
        queries = _normalized(self.codes(rows).unflatten(-1, (CODES_PER_MASK, -1)))
        scores = (queries @ table[words.first_mask_code : words.image].T).flatten(0, 1)
        codes = labels["patch_codes"].flatten(0, 1)[shown].flatten()
        return loss + 0.75 * F.cross_entropy(scores.float(), words.code_targets.to(codes.device)[codes])


def patch_centres(device: torch.device | str) -> Tensor:
    """[x, y, x, y] of each patch's centre as shares of the side, (N, 4)."""
    steps = (torch.arange(GRID, device=device) + 0.5) / GRID
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    return torch.stack([x, y, x, y], dim=-1).flatten(0, 1)


def _normalized(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the labels that are there; zero, not NaN, where none is."""
    total = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
    return total / (labels != NO_LABEL).sum().clamp(min=1)


def location_loss(logits: Tensor, bins: Tensor, sigma: float) -> Tensor:
    """Cross-entropy (n,) against a bell of width `sigma` bins (of 1024) around each true bin.

    Args:
        logits: (n, len(LOCATION_BINS)). bins: (n,), in [0, 1024).
    """
    distance = torch.tensor(LOCATION_BINS, device=logits.device) - bins[:, None]
    target = torch.softmax(-0.5 * (distance / sigma) ** 2, dim=-1)
    return -(target * logits.log_softmax(-1)).sum(-1)


def text_loss(logits: Tensor, targets: Tensor, words: Vocabulary, progress: float) -> tuple[Tensor, dict[str, float]]:
    """Weighted mean cross-entropy of the answers' tokens, and the plain means of its three kinds for the log.

    `<loc>` tokens are learned against a bell that narrows as training goes on (`progress`, 0 to 1) and weigh less at
    first; the sixteen `<seg>` codes of a mask count near misses as nearly right.

    Args:
        logits: float32 (n, vocabulary). targets: (n,), all of them to be learned.
    """
    is_location = words.is_location(targets)
    losses = F.cross_entropy(logits, targets, reduction="none")
    rows = logits[is_location]
    places = rows[:, words.location_ids]
    outside = torch.logsumexp(rows, -1) - torch.logsumexp(places, -1)
    sigma = 10 - 7.5 * progress
    located = outside + location_loss(places, targets[is_location] - words.first_location, sigma)
    losses = losses.masked_scatter(is_location, located)
    is_code = words.is_mask_code(targets)
    wanted = words.code_targets.to(logits.device)[targets[is_code] - words.first_mask_code]
    code_logits = logits[is_code].log_softmax(-1)[:, words.first_mask_code : words.image]
    losses = losses.masked_scatter(is_code, -(wanted * code_logits).sum(-1))
    weights = torch.where(is_location, 0.4 + 0.4 * progress, torch.where(is_code, 1.2, 1.0))
    kinds = {"locations": is_location, "codes": is_code, "words": ~(is_location | is_code)}
    means = {name: losses[kind].mean().item() for name, kind in kinds.items() if kind.any()}
    return (losses * weights).sum() / weights.sum(), means


class Trainer:
    """The model, its training-only heads, the optimizers, and what a step of each stage does."""

    def __init__(self, options: TrainOptions) -> None:
        torch.manual_seed(options.seed)
        self.options, self.step = options, 0
        self.words = Vocabulary(MaskEncoder.load(options.mask_encoder))
        self.device = torch.device(options.device)
        config = demo_config(self.words.size, self.words.image)
        self.model = PaliGemmaForConditionalGeneration(config)
        initialize(self.model, self.words, options.seed)
        self.heads = DenseHeads(config)
        self.model.to(self.device)
        self.heads.to(self.device)
        self.optimizers = self._make_optimizers()
        if options.compile:
            decoder = self.model.language_model.model
            self.model.vision_tower.compile(dynamic=False)
            decoder.compile(dynamic=False)

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices, others = [], []
        for name, parameter in self.model.named_parameters():
            (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
        options = self.options
        muon = torch.optim.Muon(
            matrices, lr=options.matrix_rate, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        others += self.heads.parameters()
        adam = torch.optim.AdamW(others, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        return [muon, adam]

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One update; returns the losses."""
        stage = self.options.stage(self.step)
        # On the CPU the backward pass of PyTorch's fused attention takes several times as long for rows this short.
        attention = sdpa_kernel(SDPBackend.MATH) if self.device.type == "cpu" else nullcontext()
        mixed = self.options.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=mixed), attention:
            total, means = self.losses(stage, batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        total.backward()
        parameters = [*self.model.parameters(), *self.heads.parameters()]
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        if not math.isfinite(norm):
            raise ArithmeticError(f"the gradient is {norm} at step {self.step}; resume with a lower learning rate")
        rates = (self.options.matrix_rate, self.options.rate)
        for optimizer, rate in zip(self.optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * self.options.rate_factor(self.step)
            optimizer.step()
        self.step += 1
        return {"total": total.item(), **means}

    def losses(self, stage: str, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """What to minimize, and the means of its parts: the patches, and the answers' tokens by kind."""
        tensors = {name: self._tensor(value) for name, value in vars(batch).items() if value is not None}
        if "ids" in tensors:
            tensors["ids"] = self.words.disturbed(tensors["ids"])
        pixels = tensors["images"].permute(0, 3, 1, 2).float() / 127.5 - 1
        tower = self.model.vision_tower(pixels)
        features = self.model.multi_modal_projector(tower)
        table = self.model.language_model.get_input_embeddings().weight
        dense = self.heads(tower, features, table, tensors, self.words)
        if stage == "vision":
            return dense, {"patches": dense.item()}
        progress = self.options.progress(self.step)
        logits = self.packed_logits if stage == "packed" else self.single_logits
        asked = tensors["targets"] != NO_LABEL
        text, means = text_loss(logits(features, tensors, asked), tensors["targets"][asked], self.words, progress)
        return text + (0.4 - 0.1 * progress) * dense, {"patches": dense.item(), **means}

    def packed_logits(self, features: Tensor, text: dict[str, Tensor], asked: Tensor) -> Tensor:
        """Logits (n, vocabulary) at the asked places of rows that hold several questions."""
        decoder = self.model.language_model.model
        rows = torch.cat((features.float(), decoder.scale_embeddings(decoder.embed_tokens(text["ids"]))), dim=1)
        visible = packed_visible(text["segment"], text["kind"])
        dtype = getattr(torch, self.options.precision)
        mask = torch.zeros(visible.shape, dtype=dtype, device=self.device)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        hidden = decoder(rows, mask, position_ids=packed_positions(text["segment"]))
        places = asked.flatten().nonzero()[:, 0]
        padded = F.pad(places, (0, -len(places) % 512))  # few shapes, for the same reason as in DenseHeads
        return self.model.language_model.compute_logits(hidden[:, NUM_PATCHES:].flatten(0, 1)[padded])[: len(places)]

    def single_logits(self, features: Tensor, text: dict[str, Tensor], asked: Tensor) -> Tensor:
        """The same for rows of one question, by the model's own forward."""
        repeated = features.float().repeat_interleave(len(asked) // len(features), dim=0)
        output = self.model(**single_inputs(text, self.words.image), image_features=repeated)
        return output["logits"][:, NUM_PATCHES:][asked]

    def _tensor(self, value: np.ndarray) -> Tensor:
        return torch.from_numpy(value).to(self.device)

    def state(self) -> dict:
        """Everything that resuming needs; the plan is that of the options."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "total_steps": self.options.total_steps,
        }

    def restore(self, state: dict) -> None:
        """Go on from `state()`."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def batches(options: TrainOptions, first_step: int, chunk: int = 24) -> Iterator[Batch]:
    """The batches from `first_step` on.

    They are made a chunk at a time by as many processes as there are cores while training waits: side by side the two
    would slow each other down by more than the waiting costs.
    """
    workers = max(1, multiprocessing.cpu_count())
    arguments = (options.icons, options.mask_encoder, options.batch, options.seed)
    with multiprocessing.get_context("spawn").Pool(workers, start_worker, arguments) as pool:
        for start in range(first_step, options.total_steps, chunk):
            steps = range(start, min(start + chunk, options.total_steps))
            yield from pool.map(make_batch, [(options.stage(step), step) for step in steps], chunksize=1)


def save_state(trainer: Trainer, path: Path) -> None:
    """Write the resume file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(trainer.state(), partial)
    partial.replace(path)


def load_state(path: Path) -> dict:
    """Read a resume file, which only this script writes: tensors and numbers, and no code."""
    return torch.load(path, weights_only=True, map_location="cpu")


def find_state(options: TrainOptions) -> Path | None:
    """The resume file that fits the plan: the newest one, or that before an earlier plan's learning rate fell."""
    newest, plateau = options.work / "state.pt", options.work / "plateau.pt"
    if not newest.exists():
        return None
    planned = load_state(newest)["total_steps"]
    return plateau if planned != options.total_steps and plateau.exists() else newest


def export(model: PaliGemmaForConditionalGeneration, folder: Path) -> None:
    """Write the model as the hub has one: bfloat16 weights, configuration, tokenizer, preprocessing, end token."""
    save_tokenizer(folder)
    save_model(model, folder, dtype=torch.bfloat16)
    config = model.config
    preprocessor = {
        "image_processor_type": "SiglipImageProcessor",
        "image_seq_length": config.vision_config.num_image_tokens,
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


class Log:
    """`log.jsonl`: a line every LOG_EVERY steps with mean losses, and one for each evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sums: dict[str, list[float]] = {}
        self.started = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, step: int, stage: str, losses: dict[str, float]) -> None:
        """Note a step's losses."""
        for name, value in losses.items():
            self.sums.setdefault(f"{stage}_{name}", []).append(value)
        if step % LOG_EVERY == 0:
            means = {name: round(float(np.mean(values)), 4) for name, values in self.sums.items()}
            self.write({"step": step, "seconds": round(time.monotonic() - self.started), **means})
            self.sums.clear()

    def write(self, line: dict) -> None:
        """Append a line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def train(options: TrainOptions) -> None:
    """Run the plan, or what is left of it, and export the result."""
    if not (options.icons / "node_modules").exists():
        fetch_icons(options.icons)
    trainer = Trainer(options)
    state = find_state(options)
    if state is not None:
        trainer.restore(load_state(state))
        print(f"going on from {state} at step {trainer.step} of {options.total_steps}")
    elif options.start_from:
        trainer.model.load_state_dict(load_model(options.start_from, trainer.device, torch.float32).state_dict())
    evaluation = QuickEvaluation(options.icons, options.mask_encoder)
    log = Log(options.work / "log.jsonl")
    saved = time.monotonic()
    with tqdm(total=options.total_steps, initial=trainer.step, smoothing=0.05, mininterval=5) as bar:
        for batch in batches(options, trainer.step):
            if trainer.step == options.total_steps - options.cooldown_steps:
                save_state(trainer, options.work / "plateau.pt")
            stage = options.stage(trainer.step)
            losses = trainer.train_step(batch)
            log.add(trainer.step, stage, losses)
            bar.update()
            bar.set_postfix({stage: f"{losses['total']:.3f}"}, refresh=False)
            done = trainer.step == options.total_steps
            if done or time.monotonic() - saved > 60 * options.save_minutes:
                save_state(trainer, options.work / "state.pt")
                saved = time.monotonic()
            if done or (trainer.step > options.vision_steps and trainer.step % options.evaluate_every == 0):
                log.write({"step": trainer.step, "evaluation": evaluation(trainer.model)})
    export(trainer.model, options.output)
    print(f"wrote {options.output}")


def parse_options(arguments: list[str] | None = None) -> TrainOptions:
    """Read the command line; every field of TrainOptions but `batch` is an option."""
    parser = argparse.ArgumentParser(prog="python -m paligemma.training.train", description=__doc__.split("\n")[0])
    for name, value in vars(TrainOptions()).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
        elif name != "batch":
            parser.add_argument(flag, type=type(value), default=value, help=f"default: {value}")
    return TrainOptions(**vars(parser.parse_args(arguments)))


def main() -> None:
    """Train by the command line's options."""
    options = parse_options()
    options.work.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) for name, value in asdict(options).items()}
    (options.work / "options.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    train(options)


if __name__ == "__main__":
    main()
