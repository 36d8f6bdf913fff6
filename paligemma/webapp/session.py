"""What the server keeps of one visitor while the page is open."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paligemma.webapp.examples import Example
from paligemma.webapp.images import InputImage
from paligemma.webapp.requests import uploaded_path
from paligemma.webapp.runs import History, Run, RunRequest
from paligemma.webapp.served_models import ServedModel


@dataclass
class RunState:
    """What Stop and a run under way say to each other."""

    stop_requested: bool = False
    finished: bool = False


@dataclass
class Session:
    """One visitor's runs, and what was asked for next. Copied for every visitor, all but the models.

    Attributes:
        hosts: the server's models, at least one.
        examples: those that the page offers.
        model: which of the models answers, by its place in the list.
        plan: what the next run shall do. A run takes it; one that finds none was overtaken, and does nothing.
        control: of the newest run.
        form: what picture and prompt the form had when the current run was asked for or came from a file.
        picture: the one on the page, once a model has seen it.
        example: the example on the page, if that is where its picture is from.
        num_downloads: so that the same file can be had twice.
        num_news: updates that the page was sent.
    """

    served_models: tuple[ServedModel, ...]
    examples: tuple[Example, ...] = ()
    history: History = field(default_factory=History)
    model: int = 0
    run_request: RunRequest | None = None
    run_state: RunState = field(default_factory=lambda: RunState(finished=True))
    form: tuple[Any, ...] | None = None
    image: InputImage | None = None
    example: Path | None = None
    num_downloads: int = 0
    num_updates: int = 0

    @property
    def served_model(self) -> ServedModel:
        return self.served_models[self.model]

    def served_model_of(self, run: Run) -> ServedModel | None:
        """The loaded model that made a run; None where it is not one of the server's."""
        return next(
            (
                served_model
                for served_model in self.served_models
                if served_model.model and served_model.model_name == run.model["name"]
            ),
            None,
        )

    def submit(self, run_request: RunRequest | None) -> None:
        """Line a run up, and end what still runs; None leaves everything as it is."""
        if run_request is None:
            return
        self.run_state.stop_requested = True
        self.run_state = RunState()
        self.run_request = run_request

    def requested_image(self, upload: Any) -> str | Path | InputImage | None:
        """The picture of a request: the one on the page, which is the uploaded one unless it came otherwise."""
        return self.image or self.example or uploaded_path(upload)

    def take_request(self) -> RunRequest | None:
        run_request, self.run_request = self.run_request, None
        return run_request
