"""The thin wrapper: load a checkpoint, ask it about a picture, read the answer token by token."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from time import perf_counter

import torch
from PIL import Image

from paligemma import checkpoint, generation
from paligemma.config import PaliGemmaConfig
from paligemma.generation import GenerationOptions, GenerationResult, Sampling, Step
from paligemma.image_features import ImageFeatureCache
from paligemma.kernels import check_quantization
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.processing import PaliGemmaProcessor


class PaliGemma:
    """A model with its processor, ready to answer. `load` makes one.

    Requests share nothing but the weights and what the vision tower made of the last pictures, so that several may
    run side by side.

    Attributes:
        model, processor: the two halves, public for whoever wants to look inside.
        name: the hub id, the folder as it was given, or "bundled demo".
        source: where the checkpoint came from: "bundled", "folder" or "hub"; None for a model made in code.
        revision: the hub's branch, tag or commit; None elsewhere.
        quantize: "int8" where the decoder's weights were rounded to it, else None.
        backend: what computes the decoder, such as "bfloat16 (packed for oneDNN)" or "int8 (oneDNN)".
        image_features: pixels to the decoder's image rows, remembered for the last pictures.
        sampleable: bool, (vocab_size,), the rows that may be generated; computed once, since the vocabulary is large.
    """

    def __init__(
        self,
        model: PaliGemmaForConditionalGeneration,
        processor: PaliGemmaProcessor,
        name: str = "unnamed",
        source: str | None = None,
        revision: str | None = None,
        quantize: str | None = None,
        backend: str | None = None,
    ) -> None:
        self.model = model
        self.processor = processor
        self.name = name
        self.source = source
        self.revision = revision
        self.quantize = quantize
        self.backend = backend or str(model.dtype).removeprefix("torch.")
        self.image_features = ImageFeatureCache(model.get_image_features)
        self.allowed_tokens = processor.allowed_tokens(model.config.text_config.vocab_size)

    @property
    def config(self) -> PaliGemmaConfig:
        return self.model.config

    @property
    def num_parameters(self) -> int:
        """Numbers in the checkpoint. Prepared weights are no parameters, so the model's own would be too few."""
        return sum(parameter.numel() for parameter in checkpoint.build_empty_model(self.config).parameters())

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def stream(
        self,
        image: Image.Image,
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        top_n: int = 10,
        forced_ids: Iterable[int] = (),
        time_limit: float | None = None,
    ) -> Generator[Step, None, GenerationResult]:
        """Answer a prompt about a picture, a Step a token.

        The arguments are checked and the picture is read at the call; the model runs when a step is asked for. Closing
        the generator stops the work. What it returns (`result = yield from vlm.stream(...)`) is what `generate` gives.

        Args:
            image: any PIL image.
            prompt: the bare task, such as "caption en" or "detect cat". Newlines at its end are dropped; special
                tokens written in it are ordinary characters.
            max_new_tokens: at least 1; with picture and prompt at most `config.text_config.max_position_embeddings`.
            temperature, top_k, top_p, seed: see `Sampling`; temperature 0 is greedy.
            top_n: candidates in each Step, 1 to 50.
            forced_ids: taken as the first generated tokens; they count towards `max_new_tokens`.
            time_limit: seconds after which no further token is begun; None: no limit.

        Raises:
            ValueError: at the call; says the value and what is allowed.
            NonFiniteLogitsError: from a step, when the model's numbers overflow (float16).
        """
        started = perf_counter()
        if image is None:
            raise ValueError("a picture is needed: image is None; allowed is any PIL image")
        sampling = Sampling(temperature, top_k, top_p, seed)
        options = GenerationOptions(max_new_tokens, sampling, top_n, forced_ids, time_limit)
        inputs = self.processor([image], [prompt])
        return generation.stream(
            self.model, self.processor, inputs, self.allowed_tokens, options, started, self.image_features
        )

    def generate(
        self,
        image: Image.Image,
        prompt: str,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int | None = None,
        top_n: int = 10,
        forced_ids: Iterable[int] = (),
        time_limit: float | None = None,
    ) -> GenerationResult:
        """The whole answer at once; arguments and errors are those of `stream`."""
        steps = self.stream(
            image, prompt, max_new_tokens, temperature, top_k, top_p, seed, top_n, forced_ids, time_limit
        )
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value


def load(
    source: str | Path | None = None,
    revision: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    quantize: str | None = None,
    token: str | None = None,
    progress: checkpoint.Progress | None = None,
) -> PaliGemma:
    """Load a checkpoint, downloading it where that is needed.

    Args:
        source: None for the bundled demo; a folder in the hub's layout; or a hub id such as
            "google/paligemma2-3b-mix-224".
        revision: branch, tag or commit, only with a hub id.
        device: "auto" (CUDA, else MPS, else the CPU), or a device.
        dtype: "auto", "float32", "bfloat16" or "float16". "auto" keeps the type of a local checkpoint; a hub id takes
            bfloat16 where the device is fast in it, else float32.
        quantize: None: the decoder computes with the loaded values. "int8": its weights and the head's are rounded to
            int8, and so are the rows that meet them; about half the memory and, on a CPU, a half to two thirds of the
            time. Elsewhere each matrix is brought back to the rows' type at every call: slower, by how much was not
            measured.
        token: of the hub; None: the one that `hf auth login` stored, or HF_TOKEN.
        progress: called with (stage, bytes done, bytes in all); the stage is "downloading", for a hub id, then
            "loading".

    Raises:
        ValueError: says what is wrong and what is allowed. `CheckpointError` is one: for a checkpoint that cannot be
            had or used, with what to do.
    """
    check_quantization(quantize)
    found = checkpoint.find_checkpoint(source, revision, token, device, dtype, progress)
    model, backend = checkpoint.load_for_inference(found.folder, device, found.dtype, quantize, progress)
    processor = PaliGemmaProcessor.from_folder(found.folder, model.config)
    return PaliGemma(model, processor, found.name, found.origin, found.revision, quantize, backend)
