"""PaliGemma and PaliGemma 2 from scratch in PyTorch, with the logits behind every token.

    import paligemma
    vlm = paligemma.load("google/paligemma2-3b-mix-224")
    for step in vlm.stream(image, "caption en"):
        print(step.text_delta, end="", flush=True)

Importing this loads no weights and opens no connection.
"""

from paligemma.checkpoint import CheckpointError
from paligemma.config import PaliGemmaConfig
from paligemma.generation import Candidate, GenerationResult, NonFiniteLogitsError, Step, Timing
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.parsing import Detection, parse
from paligemma.pipeline import PaliGemma, load
from paligemma.processing import PaliGemmaProcessor

__all__ = [
    "Candidate",
    "CheckpointError",
    "Detection",
    "GenerationResult",
    "NonFiniteLogitsError",
    "PaliGemma",
    "PaliGemmaConfig",
    "PaliGemmaForConditionalGeneration",
    "PaliGemmaProcessor",
    "Step",
    "Timing",
    "load",
    "parse",
]
