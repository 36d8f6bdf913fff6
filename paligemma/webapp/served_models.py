"""The server's models: loading in a thread, state, generation and inspection."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paligemma.checkpoint import dtype_name
from paligemma.checkpoint.hub import redact_tokens
from paligemma.errors import CodedError, InputError
from paligemma.generation import StepCollector
from paligemma.masks import MaskDecoder
from paligemma.webapp import messages, zerogpu
from paligemma.webapp.errors import coded_status, to_coded_error
from paligemma.webapp.limits import Limits
from paligemma.webapp.logs import log, log_request
from paligemma.webapp.requests import quote

if TYPE_CHECKING:
    from PIL import Image

    from paligemma.generation import GenerationResult, Step
    from paligemma.pipeline import PaliGemma

WAIT_INTERVAL_S = 0.5

ServedModels = Sequence["ServedModel"]


class ServedModel:
    """A model and its loading state. It loads in its own thread, so that the page opens immediately.

    Attributes:
        name: name in the model list and in the API.
        model_name: name of the model in use; after a failed load, the fallback's.
        model: the loaded model, or None.
        mask_decoder: decoder of the model's mask tokens, or None.
        status: loading state as a status of the page.
        limits: limits of each request.
    """

    def __init__(
        self,
        name: str,
        load: Callable[..., PaliGemma] | None,
        mask_decoder_files: Iterable[Path] = (),
        download_mask_decoder: Callable[[], Path] | None = None,
        fallback: ServedModel | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        gpu_lease: zerogpu.GpuLease | None = None,
    ) -> None:
        """Configure a model without loading it.

        Args:
            load: called once, with the `progress` callback of `paligemma.load`; None if there is no model.
            mask_decoder_files: the first existing one is loaded. Without a mask decoder, masks are not drawn.
            download_mask_decoder: called if none of the files exists.
            fallback: used if `load` fails.
            gpu_lease: on ZeroGPU, `zerogpu.with_gpu_lease`.
        """
        self.name = name
        self.model_name = name
        self.model: PaliGemma | None = None
        self.mask_decoder: MaskDecoder | None = None
        self.status = messages.status("idle", "{name} loads on first use", name=name)
        self.limits = limits
        self._load = load
        self._mask_decoder_files = tuple(mask_decoder_files)
        self._download_mask_decoder = download_mask_decoder
        self._fallback = fallback
        self._load_once = threading.Lock()  # acquired by the thread that loads the model, never released
        self._finished = threading.Event()
        self._error: CodedError | None = None
        self._metadata: dict[str, Any] = dict.fromkeys(("revision", "device", "dtype"))
        self._forward_lock = threading.Lock()
        self._leased_stream = gpu_lease(self._stream_on_gpu, zerogpu.answer_seconds) if gpu_lease else None
        self._leased_call = gpu_lease(self._call_on_gpu, zerogpu.inspection_seconds) if gpu_lease else self._call
        if load is None:
            self._error = InputError("model.none", messages.NO_MODEL)
            self.status = coded_status(self._error)
            self._finished.set()

    def __deepcopy__(self, memo: dict[int, Any]) -> ServedModel:
        """Return self: Gradio copies the initial session for each user, but the models are shared."""
        return self

    # Loading

    def start(self) -> None:
        """Load the model in a new thread, unless loading has started."""
        if self._claim_load():
            threading.Thread(target=self._load_model, name="load model", daemon=True).start()

    def load_now(self) -> None:
        """Load the model in this thread, unless loading has started."""
        if self._claim_load():
            self._load_model()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until loading has ended. Returns False after the timeout."""
        return self._finished.wait(timeout)

    def _claim_load(self) -> bool:
        """Whether the caller must load the model."""
        if self._load is None or not self._load_once.acquire(blocking=False):
            return False
        self.status = messages.status("busy", "Loading {name}", name=self.name)
        return True

    def _load_model(self) -> None:
        assert self._load is not None
        try:
            model = self._load(progress=self._show_progress)
            self.mask_decoder = self._load_mask_decoder()
            # Read here, because on ZeroGPU the GPU is available only to the thread that loads the model.
            self._metadata = _metadata(self.name, model)
            self.status = self._ready_status(model)
            self.model = model
        except Exception as error:
            self._log_load_error(error)
            self._use_fallback(copy.copy(to_coded_error(error)))  # without the traceback, which holds the weights
        finally:
            self._finished.set()

    def _log_load_error(self, error: Exception) -> None:
        """Log one line; the traceback only at DEBUG."""
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        log.error("%s could not be loaded: %s", self.name, redact_tokens(f"{kind}{error}"))
        log.debug("traceback", exc_info=error)

    def _use_fallback(self, reason: CodedError) -> None:
        """Show why the model could not be loaded, and use the fallback's model if there is one."""
        self._error = InputError(
            "model.load_failed", "{name} could not be loaded. {reason}", name=self.name, reason=reason
        )
        self.status = coded_status(self._error)
        fallback = self._fallback
        if fallback is None:
            return
        fallback.load_now()
        fallback.join()
        if fallback.model is None:
            return
        self.status = coded_status(
            InputError(
                "model.fallback_used",
                "{name} could not be loaded. {reason} Using {fallback} instead.",
                name=self.name,
                fallback=fallback.model_name,
                reason=reason,
            )
        )
        self.model_name, self.mask_decoder = fallback.model_name, fallback.mask_decoder
        self._metadata = fallback._metadata
        self.model = fallback.model

    def _load_mask_decoder(self) -> MaskDecoder | None:
        path = next(filter(Path.exists, self._mask_decoder_files), None)
        if path is None and self._download_mask_decoder:
            try:
                path = self._download_mask_decoder()
            except Exception as error:  # boxes do not need it
                log.warning("mask decoder unavailable; masks are not drawn: %s", redact_tokens(str(error)))
        return MaskDecoder.load(path) if path else None

    def _ready_status(self, model: PaliGemma) -> messages.Status:
        name = f"{self.name}@{model.revision}" if model.revision else self.name
        soft_cap = model.config.text_config.final_logit_softcapping
        metadata = self._metadata
        return messages.model_ready(name, metadata["parameters"], model.backend, metadata["device"], soft_cap)

    def _show_progress(self, stage: str, done: int, total: int) -> None:
        percent = f"{done / total:.0%}"
        if stage == "downloading":
            size = f"{total / 1e9:.2f} GB"
            self.status = messages.status(
                "busy", "Downloading {name}: {percent} of {size}", name=self.name, percent=percent, size=size
            )
        else:
            self.status = messages.status("busy", "Loading {name}: {percent}", name=self.name, percent=percent)

    # State

    @property
    def loading(self) -> bool:
        """True until loading has succeeded or failed."""
        return not self._finished.is_set()

    @property
    def state(self) -> str:
        """ "not loaded" (not used yet), "loading", "ready" or "error"."""
        if self.loading:
            return "loading" if self._load_once.locked() else "not loaded"
        return "ready" if self.model else "error"

    @property
    def loaded_model(self) -> PaliGemma:
        """The loaded model. Raises InputError if it could not be loaded or is not loaded yet."""
        if self.model is None:
            if self._error is None:
                raise InputError("model.loading", "{name} is still loading. Try again later.", name=self.name)
            raise copy.copy(self._error)  # a stored exception would hold the frames of the request that raised it
        return self.model

    @property
    def soft_cap(self) -> float | None:
        """Soft cap of the loaded model's logits, or None."""
        return self.loaded_model.config.text_config.final_logit_softcapping

    def wait(self) -> Iterator[messages.Status]:
        """Yield the status every WAIT_INTERVAL_S seconds until the model is loaded.

        Raises:
            InputError: loading failed, or takes longer than `limits.seconds`, so that it does not block the queue.
        """
        deadline = time.monotonic() + self.limits.seconds
        while not self.join(WAIT_INTERVAL_S) and time.monotonic() <= deadline:
            yield self.status
        _ = self.loaded_model  # raises

    def describe(self) -> dict[str, Any]:
        """The model's entry in /models."""
        return {
            "name": self.name,
            "answered_by": self.model_name if self.model else None,
            "revision": self._metadata["revision"],
            "state": self.state,
            "message": messages.format_message(self.status),
            "device": self._metadata["device"],
            "dtype": self._metadata["dtype"],
        }

    def metadata(self) -> dict[str, Any]:
        """Name, revision, dtype, device and number of parameters of the loaded model, as stored in a run."""
        return dict(self._metadata)

    # Requests

    def stream(self, image: Image.Image, **request: Any) -> Generator[Step, None, GenerationResult]:
        """`PaliGemma.stream` within the server's limits. Closing the generator stops generation.

        Args:
            request: all arguments of `PaliGemma.stream` except the image.

        Raises:
            InputError: at the call, for invalid arguments or more tokens than the limit.
        """
        request = self.limits.apply(request)
        stream = self.loaded_model.stream(image, **request)  # checks the arguments; generation starts at the first step
        if self._leased_stream is None:
            return self._run_stream(StepCollector(stream))
        return self._run_stream(zerogpu.LeasedSteps(self._leased_stream(image, zerogpu.limit_to_lease(request))))

    def _run_stream(self, steps: StepCollector) -> Generator[Step, None, GenerationResult]:
        """Yield the steps, holding the lock for one forward pass at a time.

        Requests share only the weights, so the lock is not needed for correctness. It limits memory and compute to one
        forward pass, and interleaves concurrent requests token by token, for example with an abandoned request that
        has not ended yet.
        """
        with log_request("request", self.model_name, steps.steps) as entry:
            try:
                while True:
                    with self._forward_lock:
                        step = next(steps, None)
                    if step is None:
                        break
                    yield step
            finally:
                steps.close()
            assert steps.result is not None
            entry.outcome = steps.result.finish_reason
            return steps.result

    def inspect(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of `paligemma.lens` with the loaded model and the arguments."""
        with log_request("inspection", self.model_name), self._forward_lock:
            result = self._leased_call(function, *arguments)
            if isinstance(result, Exception):
                raise result
            return result

    def _stream_on_gpu(self, image: Image.Image, request: dict[str, Any]) -> Iterator[zerogpu.Message]:
        zerogpu.use_one_thread()
        yield from zerogpu.send_stream(self.loaded_model.stream(image, **request))

    def _call_on_gpu(self, function: Callable[..., Any], *arguments: Any) -> Any:
        zerogpu.use_one_thread()
        return self._call(function, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's result, or its exception as a value, because ZeroGPU drops exception messages."""
        try:
            return function(self.loaded_model, *arguments)
        except Exception as error:
            return error


def _metadata(name: str, model: PaliGemma) -> dict[str, Any]:
    return {
        "name": name,
        "revision": model.revision,
        "dtype": model.quantize or dtype_name(model.dtype),
        "device": str(model.device),
        "parameters": model.num_parameters,
    }


def find_served_model(served_models: ServedModels, name: Any) -> ServedModel:
    """Return the model with this name, and load it if needed; the first one if `name` is None or "".

    Raises:
        InputError: no model has this name.
    """
    if not name:
        return served_models[0]
    found = next((served_model for served_model in served_models if served_model.name == name), None)
    if found is None:
        names = ", ".join(served_model.name for served_model in served_models)
        raise InputError("request.model", "model must be one of {names}, got {value}.", names=names, value=quote(name))
    found.start()
    return found
