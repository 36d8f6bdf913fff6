"""A model that the server holds, and its state: not loaded, loading, ready, or what went wrong and what to do."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paligemma.hub import redacted
from paligemma.masks import MaskDecoder
from paligemma.view import serving, words
from paligemma.view.requests import quote

if TYPE_CHECKING:
    from PIL import Image

    from paligemma.generation import GenerationResult, Step
    from paligemma.pipeline import PaliGemma

WAIT_INTERVAL_S = 0.5

log = logging.getLogger("paligemma.app")


class ModelHost:
    """One model of this server. It is loaded in a thread of its own, so that the page is there at once."""

    def __init__(
        self,
        name: str,
        load: Callable[..., PaliGemma] | None,
        mask_decoder_files: Iterable[Path] = (),
        fetch_mask_decoder: Callable[[], Path] | None = None,
        fallback: ModelHost | None = None,
        limits: serving.Limits = serving.Limits(),  # noqa: B008 - it is frozen
        lend: serving.Lend | None = None,
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
        self.notice = words.notice("idle", "{name} is loaded once it is asked for", name=name)
        self._load = load
        self._may_start = threading.Lock()  # taken by who loads, and never given back
        self._mask_decoder_files = tuple(mask_decoder_files)
        self._fetch_mask_decoder = fetch_mask_decoder
        self._fallback = fallback
        self._finished = threading.Event()
        self._facts: dict[str, Any] | None = None
        self.limits = limits
        self._turn = threading.Lock()
        self._lent_answer = lend(self._answer_on_loan, serving.seconds_to_answer) if lend else None
        self._look = lend(self._look_on_loan, serving.seconds_to_look) if lend else self._look_here
        if load is None:
            self.notice = words.notice("error", words.NO_MODEL)
            self._finished.set()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHost:
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
        self.notice = words.notice("busy", "Loading {name}", name=self.name)
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

    def wait(self) -> Iterator[words.Notice]:
        """Yield the state now and then while the model loads. Raises ValueError with what to do if it failed.

        It also does when loading takes longer than a request may: whoever waits here keeps others waiting.
        """
        until = time.monotonic() + self.limits.seconds
        while not self._finished.wait(WAIT_INTERVAL_S):
            if time.monotonic() > until:
                raise ValueError(f"{self.name} is still loading. Ask again once it is ready.")
            yield self.notice
        if self.model is None:
            raise ValueError(words.spoken(self.notice))

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
        if self._lent_answer:
            return serving.follow(self.model_name, self._lent_answer(image, serving.within_loan(request)), self._turn)
        return serving.follow(self.model_name, serving.items(stream), self._turn)

    def look(self, into: Callable[..., Any], *arguments: Any) -> Any:
        """A function of `paligemma.lens`, called with the loaded model and these, for one of several visitors."""
        with serving.logged("inspection", self.model_name, []), self._turn:
            found = self._look(into, *arguments)
            if isinstance(found, Exception):
                raise found
            return found

    def _answer_on_loan(self, image: Image.Image, request: dict[str, Any]) -> Iterator[serving.Item]:
        serving.use_one_thread()
        yield from serving.items(self.model.stream(image, **request))

    def _look_on_loan(self, into: Callable[..., Any], *arguments: Any) -> Any:
        serving.use_one_thread()
        return self._look_here(into, *arguments)

    def _look_here(self, into: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return into(self.model, *arguments)
        except Exception as error:
            return error

    def describe(self) -> dict[str, Any]:
        """The model and its state, for the API."""
        facts = self._facts or dict.fromkeys(("revision", "device", "dtype"))
        return {
            "name": self.name,
            "answered_by": self.model_name if self.model else None,
            "revision": facts["revision"],
            "state": self.state,
            "message": words.spoken(self.notice),
            "device": facts["device"],
            "dtype": facts["dtype"],
        }

    def facts(self) -> dict[str, Any]:
        """What a run says of the model that answered; only of a loaded one."""
        return dict(self._facts)

    def _run(self) -> None:
        try:
            model = self._load(progress=self._show_progress)
            self.mask_decoder = self._read_mask_decoder()
            # Noted now: where a GPU is lent, it is seen only by the thread that loaded the model.
            self._facts = _facts(self.name, model)
            self.notice = words.notice("done", self._badge(model))
            self.model = model
        except Exception as error:
            self._report(error)
            self._fall_back(words.explain(error))
        finally:
            self._finished.set()

    def _report(self, error: Exception) -> None:
        """One line for whoever runs the server; where it came from only for those who look for it."""
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        log.error("%s could not be loaded: %s", self.name, redacted(f"{kind}{error}"))
        log.debug("where that happened", exc_info=error)

    def _fall_back(self, reason: str) -> None:
        """Say what went wrong, and let the fallback's model answer where there is one."""
        self.notice = words.notice("error", "{name} could not be loaded. {reason}", name=self.name, reason=reason)
        if self._fallback is None:
            return
        self._fallback.load_now()
        self._fallback._finished.wait()
        if self._fallback.model is None:
            return
        self.model_name, self.mask_decoder = self._fallback.model_name, self._fallback.mask_decoder
        self.notice["joined"] = [
            (self.notice["text"], self.notice["values"]),
            ("{name} answers instead", {"name": self.model_name}),
        ]
        self._facts = self._fallback._facts
        self.model = self._fallback.model

    def _read_mask_decoder(self) -> MaskDecoder | None:
        path = next(filter(Path.exists, self._mask_decoder_files), None)
        if path is None and self._fetch_mask_decoder:
            try:
                path = self._fetch_mask_decoder()
            except Exception as error:  # boxes are drawn without it
                log.warning("masks stay codes, their decoder could not be had: %s", redacted(str(error)))
        return MaskDecoder.load(path) if path else None

    def _badge(self, model: PaliGemma) -> str:
        name = f"{self.name}@{model.revision}" if model.revision else self.name
        soft_cap = model.config.text_config.final_logit_softcapping
        facts = self._facts
        return words.model_line(name, facts["parameters"], model.backend, facts["device"], soft_cap)

    def _show_progress(self, stage: str, done: int, total: int) -> None:
        percent = f"{done / total:.0%}"
        if stage == "downloading":
            size = f"{total / 1e9:.2f} GB"
            self.notice = words.notice(
                "busy", "Downloading {name}: {percent} of {size}", name=self.name, percent=percent, size=size
            )
        else:
            self.notice = words.notice("busy", "Loading {name}: {percent}", name=self.name, percent=percent)


def _facts(name: str, model: PaliGemma) -> dict[str, Any]:
    return {
        "name": name,
        "revision": model.revision,
        "dtype": model.quantize or str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "parameters": model.num_parameters,
    }


def host_named(hosts: Sequence[ModelHost], name: Any) -> ModelHost:
    """One of the server's models, the first one for None; ValueError for a name that is not in its list."""
    if not name:
        return hosts[0]
    found = next((host for host in hosts if host.name == name), None)
    if found is None:
        raise ValueError(f"model is {quote(name)}; allowed are {', '.join(host.name for host in hosts)}")
    found.start()
    return found
