"""The training step: forward pass of every stage, losses, optimizers and the state to resume from."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paligemma.attention_mask import additive_mask
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.training.batches import IGNORED, NUM_PATCHES, Batch, packed_positions, packed_visible, single_inputs
from paligemma.training.losses import PatchHeads, text_loss
from paligemma.training.masks import MaskEncoder
from paligemma.training.model import bundled_config, initialize_weights
from paligemma.training.options import TrainOptions
from paligemma.training.vocabulary import Vocabulary

MAX_GRADIENT_NORM = 1.0
LOGIT_PADDING = 512


class Trainer:
    """The model, its auxiliary heads and its optimizers.

    Matrices are optimized with Muon (https://kellerjordan.github.io/posts/muon/), all other parameters with AdamW.
    """

    def __init__(self, options: TrainOptions) -> None:
        torch.manual_seed(options.seed)
        self.options, self.step = options, 0
        self.vocabulary = Vocabulary(MaskEncoder.load(options.mask_encoder))
        self.device = torch.device(options.device)
        config = bundled_config(self.vocabulary.size, self.vocabulary.image)
        self.model = PaliGemmaForConditionalGeneration(config)
        initialize_weights(self.model, self.vocabulary, options.seed)
        self.heads = PatchHeads(config)
        self.model.to(self.device)
        self.heads.to(self.device)
        self.optimizers = self._make_optimizers()
        if options.compile:
            self.model.vision_tower.compile(dynamic=False)
            self.model.language_model.model.compile(dynamic=False)

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
        options = self.options
        muon = torch.optim.Muon(
            matrices, lr=options.matrix_rate, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        others += self.heads.parameters()
        adamw = torch.optim.AdamW(others, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        return [muon, adamw]

    def train_step(self, batch: Batch) -> dict[str, float]:
        """Update the parameters; returns the losses.

        Raises:
            ArithmeticError: if the gradient is not finite.
        """
        stage = self.options.stage(self.step)
        # For sequences this short, the backward pass of PyTorch's fused CPU attention is several times slower.
        attention = sdpa_kernel(SDPBackend.MATH) if self.device.type == "cpu" else nullcontext()
        mixed = self.options.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=mixed), attention:
            total, means = self.losses(stage, batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        total.backward()
        parameters = [*self.model.parameters(), *self.heads.parameters()]
        norm = nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        if not math.isfinite(norm):
            raise ArithmeticError(f"The gradient norm is {norm} at step {self.step}. Resume with lower learning rates.")
        rates = (self.options.matrix_rate, self.options.rate)
        for optimizer, rate in zip(self.optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * self.options.learning_rate_factor(self.step)
            optimizer.step()
        self.step += 1
        return {"total": total.item(), **means}

    def losses(self, stage: str, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Compute the total loss, and the means of its parts: patches, and answer tokens by kind."""
        tensors = {
            name: torch.from_numpy(value).to(self.device) for name, value in vars(batch).items() if value is not None
        }
        if "ids" in tensors:
            tensors["ids"] = self.vocabulary.corrupt(tensors["ids"])
        pixels = tensors["images"].permute(0, 3, 1, 2).float() / 127.5 - 1
        vision_features = self.model.vision_tower(pixels)
        image_features = self.model.multi_modal_projector(vision_features)
        embeddings = self.model.language_model.get_input_embeddings().weight
        patch_loss = self.heads(vision_features, image_features, embeddings, tensors, self.vocabulary)
        if stage == "vision":
            return patch_loss, {"patches": patch_loss.item()}
        progress = self.options.progress(self.step)
        compute_logits = self.packed_logits if stage == "packed" else self.single_logits
        learned = tensors["targets"] != IGNORED
        logits, targets = compute_logits(image_features, tensors, learned), tensors["targets"][learned]
        answer_loss, means = text_loss(logits, targets, self.vocabulary, progress)
        return answer_loss + (0.4 - 0.1 * progress) * patch_loss, {"patches": patch_loss.item(), **means}

    def packed_logits(self, image_features: Tensor, text: dict[str, Tensor], learned: Tensor) -> Tensor:
        """Compute logits (n, vocab) at the `learned` (B, T) positions of packed sequences."""
        language_model = self.model.language_model
        decoder = language_model.model
        embeds = decoder.scale_embeddings(decoder.embed_tokens(text["ids"]))
        visible = packed_visible(text["segment"], text["token_types"])
        mask = additive_mask(visible, getattr(torch, self.options.precision))
        hidden_states = decoder(
            torch.cat((image_features.float(), embeds), dim=1), mask, position_ids=packed_positions(text["segment"])
        )
        positions = learned.flatten().nonzero()[:, 0]
        # Padded to a multiple of LOGIT_PADDING, to limit the number of different shapes as in PatchHeads.
        padded = F.pad(positions, (0, -len(positions) % LOGIT_PADDING))
        return language_model.compute_logits(hidden_states[:, NUM_PATCHES:].flatten(0, 1)[padded])[: len(positions)]

    def single_logits(self, image_features: Tensor, text: dict[str, Tensor], learned: Tensor) -> Tensor:
        """Compute the same for sequences of one question, with the model's own forward pass."""
        repeated = image_features.float().repeat_interleave(len(learned) // len(image_features), dim=0)
        output = self.model(**single_inputs(text, self.vocabulary.image), image_features=repeated)
        return output["logits"][:, NUM_PATCHES:][learned]

    def state(self) -> dict:
        """Return everything needed to resume."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "total_steps": self.options.total_steps,
        }

    def restore(self, state: dict) -> None:
        """Resume from a result of `state`."""
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
