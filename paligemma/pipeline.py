"""The public interface: load a checkpoint, then generate text about an image, token by token."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from time import perf_counter

import torch
from PIL import Image

from paligemma import checkpoint, generation
from paligemma.config import PaliGemmaConfig
from paligemma.generation import GenerationOptions, GenerationResult, Step, StepCollector
from paligemma.image_features import ImageFeatureCache
from paligemma.kernels import check_quantization
from paligemma.modeling import PaliGemmaForConditionalGeneration
from paligemma.processing import PaliGemmaProcessor
from paligemma.sampling import Sampling


class PaliGemma:
    """A model and its processor; `load` creates one.

    Requests share only the weights and the cache of image features, so several can run concurrently.

    Attributes:
        model: the PyTorch module.
        processor: image preprocessing and tokenizer.
        name: hub id, folder as given, or "bundled demo".
        source: "bundled", "folder" or "hub"; None for a model that was not loaded from a checkpoint.
        revision: branch, tag or commit on the hub; None for other sources.
        quantize: "int8" if the decoder's weights are quantized, else None.
        backend: dtype and kernels of the decoder, such as "bfloat16 (packed for oneDNN)" or "int8 (oneDNN)".
        image_features: cached function from pixel_values to image features.
        allowed_tokens: (vocab_size,), bool; the tokens that can be generated.
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
        self.backend = backend or checkpoint.dtype_name(model.dtype)
        self.image_features = ImageFeatureCache(model.get_image_features)
        self.allowed_tokens = processor.allowed_tokens(model.config.text_config.vocab_size)

    @property
    def config(self) -> PaliGemmaConfig:
        return self.model.config

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the checkpoint; packed or quantized weights are not parameters of `model`."""
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
        """Generate an answer to a prompt about an image, one Step per token.

        Arguments are validated and the image is preprocessed immediately; the model runs when a step is requested.
        Closing the generator stops generation. Its return value (`result = yield from vlm.stream(...)`) is the
        GenerationResult, as from `generate`.

        Args:
            image: any PIL image.
            prompt: the task, such as "caption en" or "detect cat". Trailing newlines are removed; special tokens are
                encoded as plain text.
            max_new_tokens: >= 1; image, prompt and new tokens must fit in `config.text_config.max_position_embeddings`.
            temperature, top_k, top_p, seed: see `Sampling`; temperature 0 is greedy.
            top_n: number of candidates in each Step, 1 to 50.
            forced_ids: token ids used as the first generated tokens; they count toward `max_new_tokens`.
            time_limit: seconds after which no further token is generated; None: no limit.

        Raises:
            InputError: immediately, for an invalid argument.
            NonFiniteLogitsError: during iteration, if the logits contain NaN or infinity, because the model overflows
                (float16) or the checkpoint is corrupt.
        """
        started = perf_counter()
        sampling = Sampling(temperature, top_k, top_p, seed)
        # GenerationOptions converts forced_ids to a tuple.
        options = GenerationOptions(max_new_tokens, sampling, top_n, forced_ids, time_limit)  # type: ignore[arg-type]
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
        """Generate the complete answer. Arguments and errors are those of `stream`."""
        steps = StepCollector(
            self.stream(image, prompt, max_new_tokens, temperature, top_k, top_p, seed, top_n, forced_ids, time_limit)
        )
        for _ in steps:
            pass
        assert steps.result is not None
        return steps.result


def load(
    source: str | Path | None = None,
    revision: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    quantize: str | None = None,
    token: str | None = None,
    progress: checkpoint.Progress | None = None,
) -> PaliGemma:
    """Load a checkpoint, downloading it if necessary.

    Args:
        source: None for the bundled demo, a folder in the hub's layout, or a hub id such as
            "google/paligemma2-3b-mix-224".
        revision: branch, tag or commit; only with a hub id.
        device: "auto" (CUDA, else MPS, else CPU) or a device.
        dtype: "auto", "float32", "bfloat16" or "float16". "auto" keeps the dtype of a local checkpoint; for a hub id it
            is bfloat16 on devices with native bfloat16 matmuls, else float32.
        quantize: None, or "int8" for int8 weights in the linear layers of the decoder and the LM head; the fastest CPU
            kernels also quantize the activations. It needs about half the memory of bfloat16; on a CPU, decoding takes
            half to two thirds of bfloat16's time. On other devices, weights are dequantized in every forward pass,
            which is slower.
        token: access token for the hub; None: the one stored by `hf auth login`, or HF_TOKEN.
        progress: called with (stage, bytes done, total bytes); the stage is "downloading" (hub id only), then
            "loading".

    Raises:
        CheckpointError: if the checkpoint is missing, incomplete or not supported.
        InputError: for any other invalid argument.
    """
    check_quantization(quantize)
    found = checkpoint.find_checkpoint(
        source, revision=revision, token=token, device=device, dtype=dtype, progress=progress
    )
    # Load the processor first, so that an invalid tokenizer is reported before weights are loaded.
    processor = PaliGemmaProcessor.from_folder(found.folder, checkpoint.read_config(found.folder))
    model, backend = checkpoint.load_for_inference(found.folder, device, found.dtype, quantize, progress)
    return PaliGemma(model, processor, found.name, found.source, found.revision, quantize, backend)
