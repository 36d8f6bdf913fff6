"""A model that the server holds, and its state: not loaded, loading, ready, or what went wrong and what to do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paligemma.checkpoint.hub import redact_tokens
from paligemma.masks import MaskDecoder
from paligemma.webapp import messages, serving
from paligemma.webapp.requests import quote

if TYPE_CHECKING:
    from PIL import Image

    from paligemma.generation import GenerationResult, Step
    from paligemma.pipeline import PaliGemma

WAIT_INTERVAL_S = 0.5

ServedModels = Sequence["ServedModel"]

log = logging.getLogger("paligemma.app")


class ServedModel:
    """One model of this server. It is loaded in a thread of its own, so that the page is there at once."""

    def __init__(
        self,
        name: str,
        load: Callable[..., PaliGemma] | None,
        mask_decoder_files: Iterable[Path] = (),
        download_mask_decoder: Callable[[], Path] | None = None,
        fallback: ServedModel | None = None,
        limits: serving.Limits = serving.Limits(),  # noqa: B008 - it is frozen
        gpu_lease: serving.GpuLease | None = None,
    ) -> None:
        """`load` is called once, with `progress` as `paligemma.load` takes it; None: there is no model to load.

        Of `mask_decoder_files` the first that exists is read; where none does, `fetch_mask_decoder` may bring one.
        Without one, masks stay codes. The `fallback`'s model answers where this one cannot be loaded. `limits` hold for
        each request. `lend` is given where the GPU is lent for one request at a time.
        """
        self.name = name
        self.model_name = name
        self.model: PaliGemma | None = None
        self.mask_decoder: MaskDecoder | None = None
        self.status = messages.status("idle", "{name} is loaded once it is asked for", name=name)
        self._load = load
        self._may_start = threading.Lock()  # taken by who loads, and never given back
        self._mask_decoder_files = tuple(mask_decoder_files)
        self._download_mask_decoder = download_mask_decoder
        self._fallback = fallback
        self._finished = threading.Event()
        self._metadata: dict[str, Any] | None = None
        self.limits = limits
        self._forward_lock = threading.Lock()
        self._leased_stream = gpu_lease(self._stream_on_lease, serving.answer_seconds) if gpu_lease else None
        self._look = gpu_lease(self._inspect_on_lease, serving.inspection_seconds) if gpu_lease else self._inspect_here
        if load is None:
            self.status = messages.status("error", messages.NO_MODEL)
            self._finished.set()

    def __deepcopy__(self, memo: dict[int, Any]) -> ServedModel:
        """Gradio copies what a visit begins with; the model is the same for all."""
        return self

    def start(self) -> None:
        """Begin to load, unless that was done before; returns at once."""
        if self._begin():
            threading.Thread(target=self._run, name="load model", daemon=True).start()

    def _begin(self) -> bool:
        """Whether the caller is the one to load the model."""
        if self._load is None or not self._may_start.acquire(blocking=False):
            return False
        self.status = messages.status("busy", "Loading {name}", name=self.name)
        return True

    @property
    def loading(self) -> bool:
        return not self._finished.is_set()

    @property
    def state(self) -> str:
        """ "not loaded" (nobody asked for it yet), "loading", "ready" or "error"."""
        if self.loading:
            return "loading" if self._may_start.locked() else "not loaded"
        return "ready" if self.model else "error"

    @property
    def soft_cap(self) -> float | None:
        """The bound of the loaded model's logits; None where they have none."""
        return self.model.config.text_config.final_logit_softcapping

    def wait(self) -> Iterator[messages.Status]:
        """Yield the state now and then while the model loads. Raises ValueError with what to do if it failed.

        It also does when loading takes longer than a request may: whoever waits here keeps others waiting.
        """
        until = time.monotonic() + self.limits.seconds
        while not self._finished.wait(WAIT_INTERVAL_S):
            if time.monotonic() > until:
                raise ValueError(f"{self.name} is still loading. Ask again once it is ready.")
            yield self.status
        if self.model is None:
            raise ValueError(messages.format_message(self.status))

    def load_now(self) -> None:
        """Load in this thread, unless that was done before; returns when it is done."""
        if self._begin():
            self._run()

    def stream(self, image: Image.Image, **request: Any) -> Generator[Step, None, GenerationResult]:
        """`PaliGemma.stream` of the loaded model for one of several visitors; `request` has all but the picture.

        Raises ValueError at the call, also for more than the limits allow; else what the model raises.
        """
        request = self.limits.applied(request)
        stream = self.model.stream(image, **request)  # checks all, and runs nothing yet
        if self._leased_stream:
            return serving.follow(
                self.model_name, self._leased_stream(image, serving.within_lease(request)), self._forward_lock
            )
        return serving.follow(self.model_name, serving.items(stream), self._forward_lock)

    def inspect(self, into: Callable[..., Any], *arguments: Any) -> Any:
        """A function of `paligemma.lens`, called with the loaded model and these, for one of several visitors."""
        with serving.logged("inspection", self.model_name, []), self._forward_lock:
            found = self._look(into, *arguments)
            if isinstance(found, Exception):
                raise found
            return found

    def _stream_on_lease(self, image: Image.Image, request: dict[str, Any]) -> Iterator[serving.Item]:
        serving.use_one_thread()
        yield from serving.items(self.model.stream(image, **request))

    def _inspect_on_lease(self, into: Callable[..., Any], *arguments: Any) -> Any:
        serving.use_one_thread()
        return self._inspect_here(into, *arguments)

    def _inspect_here(self, into: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return into(self.model, *arguments)
        except Exception as error:
            return error

    def describe(self) -> dict[str, Any]:
        """The model and its state, for the API."""
        metadata = self._metadata or dict.fromkeys(("revision", "device", "dtype"))
        return {
            "name": self.name,
            "answered_by": self.model_name if self.model else None,
            "revision": metadata["revision"],
            "state": self.state,
            "message": messages.format_message(self.status),
            "device": metadata["device"],
            "dtype": metadata["dtype"],
        }

    def metadata(self) -> dict[str, Any]:
        """What a run says of the model that answered; only of a loaded one."""
        return dict(self._metadata)

    def _run(self) -> None:
        try:
            model = self._load(progress=self._show_progress)
            self.mask_decoder = self._read_mask_decoder()
            # Noted now: where a GPU is lent, it is seen only by the thread that loaded the model.
            self._metadata = _metadata(self.name, model)
            self.status = messages.status("done", self._badge(model))
            self.model = model
        except Exception as error:
            self._report(error)
            self._fall_back(messages.describe_error(error))
        finally:
            self._finished.set()

    def _report(self, error: Exception) -> None:
        """One line for whoever runs the server; where it came from only for those who look for it."""
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        log.error("%s could not be loaded: %s", self.name, redact_tokens(f"{kind}{error}"))
        log.debug("where that happened", exc_info=error)

    def _fall_back(self, reason: str) -> None:
        """Say what went wrong, and let the fallback's model answer where there is one."""
        self.status = messages.status("error", "{name} could not be loaded. {reason}", name=self.name, reason=reason)
        if self._fallback is None:
            return
        self._fallback.load_now()
        self._fallback._finished.wait()
        if self._fallback.model is None:
            return
        self.model_name, self.mask_decoder = self._fallback.model_name, self._fallback.mask_decoder
        self.status["joined"] = [
            (self.status["text"], self.status["values"]),
            ("{name} answers instead", {"name": self.model_name}),
        ]
        self._metadata = self._fallback._metadata
        self.model = self._fallback.model

    def _read_mask_decoder(self) -> MaskDecoder | None:
        path = next(filter(Path.exists, self._mask_decoder_files), None)
        if path is None and self._download_mask_decoder:
            try:
                path = self._download_mask_decoder()
            except Exception as error:  # boxes are drawn without it
                log.warning("masks stay codes, their decoder could not be had: %s", redact_tokens(str(error)))
        return MaskDecoder.load(path) if path else None

    def _badge(self, model: PaliGemma) -> str:
        name = f"{self.name}@{model.revision}" if model.revision else self.name
        soft_cap = model.config.text_config.final_logit_softcapping
        metadata = self._metadata
        return messages.model_line(name, metadata["parameters"], model.backend, metadata["device"], soft_cap)

    def _show_progress(self, stage: str, done: int, total: int) -> None:
        percent = f"{done / total:.0%}"
        if stage == "downloading":
            size = f"{total / 1e9:.2f} GB"
            self.status = messages.status(
                "busy", "Downloading {name}: {percent} of {size}", name=self.name, percent=percent, size=size
            )
        else:
            self.status = messages.status("busy", "Loading {name}: {percent}", name=self.name, percent=percent)


def _metadata(name: str, model: PaliGemma) -> dict[str, Any]:
    return {
        "name": name,
        "revision": model.revision,
        "dtype": model.quantize or str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "parameters": model.num_parameters,
    }


def find_served_model(served_models: Sequence[ServedModel], name: Any) -> ServedModel:
    """One of the server's models, the first one for None; ValueError for a name that is not in its list."""
    if not name:
        return served_models[0]
    found = next((served_model for served_model in served_models if served_model.name == name), None)
    if found is None:
        raise ValueError(
            f"model is {quote(name)}; allowed are {', '.join(served_model.name for served_model in served_models)}"
        )
    found.start()
    return found
