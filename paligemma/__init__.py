"""PaliGemma from scratch in PyTorch, with the logits and candidates of every generated token.

    import paligemma

    vlm = paligemma.load()  # the bundled demo model, or e.g. paligemma.load("google/paligemma2-3b-mix-224")
    for step in vlm.stream(image, "caption en"):
        print(step.text_delta, end="", flush=True)

The import loads no weights and opens no connections.
"""

from paligemma.config import PaliGemmaConfig
from paligemma.errors import CheckpointError, InputError, NonFiniteLogitsError
from paligemma.generation import Candidate, GenerationResult, Step, Timing
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.parsing import Detection, parse
from paligemma.pipeline import PaliGemma, load
from paligemma.processing import PaliGemmaProcessor

__all__ = [
    "Candidate",
    "CheckpointError",
    "Detection",
    "GenerationResult",
    "InputError",
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
