"""State of one browser session."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paligemma.webapp.examples import Example
from paligemma.webapp.images import InputImage
from paligemma.webapp.runs import History, Run, RunRequest
from paligemma.webapp.served_models import ServedModel
from paligemma.webapp.uploads import uploaded_path


@dataclass
class RunState:
    """Flags shared by a running generator and the handlers: set by Stop, and by the generator when it ends."""

    stop_requested: bool = False
    finished: bool = False


@dataclass
class Session:
    """One user's runs, form and pending request. Gradio copies the initial session for each user.

    Attributes:
        served_models: the server's models, at least one; shared by all sessions.
        examples: examples shown on the page.
        history: the session's runs.
        model_index: index of the selected model in `served_models`.
        run_request: the pending request. `run_pending` takes the newest one; earlier ones are replaced.
        run_state: state of the newest run.
        form: image and prompt of the form when the current run was submitted or imported; None after a failed request.
        image: the image in the image view, once a model is loaded to preprocess it.
        example: path of the chosen example's image, until another image is chosen.
        num_downloads: number of downloads, so that the same file can be downloaded twice.
        num_updates: number of page updates sent.
    """

    served_models: tuple[ServedModel, ...]
    examples: tuple[Example, ...] = ()
    history: History = field(default_factory=History)
    model_index: int = 0
    run_request: RunRequest | None = None
    run_state: RunState = field(default_factory=lambda: RunState(finished=True))
    form: tuple[Any, ...] | None = None
    image: InputImage | None = None
    example: Path | None = None
    num_downloads: int = 0
    num_updates: int = 0

    @property
    def served_model(self) -> ServedModel:
        """The selected model."""
        return self.served_models[self.model_index]

    def served_model_of(self, run: Run) -> ServedModel | None:
        """The loaded model that generated a run, or None if the server does not have it."""
        name = run.model["name"]
        return next((served for served in self.served_models if served.model and served.model_name == name), None)

    def submit(self, run_request: RunRequest | None) -> None:
        """Make a request the pending one, and stop the run in progress. Does nothing for None."""
        if run_request is None:
            return
        self.run_state.stop_requested = True
        self.run_state = RunState()
        self.run_request = run_request

    def take_request(self) -> RunRequest | None:
        """Remove and return the pending request."""
        run_request, self.run_request = self.run_request, None
        return run_request

    def requested_image(self, upload: Any) -> str | Path | InputImage | None:
        """The image of a new run: the one in the image view or of the chosen example, else the uploaded file."""
        return self.image or self.example or uploaded_path(upload)
