"""Execute a run request: read the model's steps into a run and build the page updates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from paligemma.errors import InputError
from paligemma.generation import StepCollector
from paligemma.sampling import Sampling
from paligemma.webapp import messages
from paligemma.webapp.images import InputImage, fit_to_model, make_input_image
from paligemma.webapp.page_update import PageUpdate, image_view_update, token_strip_update
from paligemma.webapp.render import objects
from paligemma.webapp.render.runs import run_tree
from paligemma.webapp.requests import check_prompt_length, read_request
from paligemma.webapp.runs import Run, RunRequest
from paligemma.webapp.session import RunState, Session
from paligemma.webapp.uploads import open_image

if TYPE_CHECKING:
    from paligemma.generation import Step
    from paligemma.webapp.served_models import ServedModel

# At most 20 page updates per second: with more, the browser falls behind the model.
UPDATE_INTERVAL_S = 0.05


class Execution:
    """Execution of a run request, from validation to the last token. `handlers.run_pending` calls the methods.

    Not a generator itself: each step already passes through three, the model's, `ServedModel.stream` and
    `run_pending`.

    Attributes:
        served_model: the model that generates the answer.
        run: the run, new or continued.
        steps: the steps generated in this execution. A continued run generates its earlier tokens again.
    """

    run: Run
    steps: StepCollector

    def __init__(self, session: Session, run_request: RunRequest, run_state: RunState) -> None:
        """Validate the request. Raises InputError for an invalid value or image."""
        self.served_model = session.served_model
        self._session = session
        self._run_request = run_request
        self._run_state = run_state
        source = run_request.image
        self._path = None if isinstance(source, InputImage) else source
        self._image = source if isinstance(source, InputImage) else open_image(source)
        self._request = read_request(*run_request.arguments)
        self._num_sent = 0  # tokens on the page
        self._sent_objects: dict[str, Any] | None = None
        self._updated_at = 0.0

    def start(self) -> PageUpdate:
        """Start generation and add the run to the history. Raises InputError if the model rejects the request."""
        request = self._request
        processor = self.served_model.loaded_model.processor
        check_prompt_length(processor, request["prompt"])
        sampling = Sampling(request["temperature"], request["top_k"], request["top_p"], request["seed"])
        request["seed"] = sampling.with_seed().seed
        if isinstance(self._image, InputImage):
            image = fit_to_model(self._image, processor)
        else:
            image = make_input_image(self._image, processor, self._path)
        run, is_new = self._find_run(image)
        self.steps = StepCollector(self.served_model.stream(run.image.model_input, **request))
        self.run = self._session.history.add(run)
        self._num_sent = len(run.steps)
        if not is_new:
            return PageUpdate(messages.status("busy", "Step"))
        return PageUpdate(
            messages.status("busy", "Encoding image"),
            token_strip_update(self.served_model, run, 0),
            objects.object_list(run),
            run_tree(self._session.history),
            image_view_update(self.served_model, self._session, run.image),
        )

    def _find_run(self, image: InputImage) -> tuple[Run, bool]:
        """Return the run to continue, or a new one that is not in the history yet; and whether it is new."""
        run_request, history = self._run_request, self._session.history
        continued = run_request.continues is not None
        earlier = history.find(run_request.continues if continued else run_request.parent)
        if earlier:
            require_same_model(self.served_model, earlier)
        if continued:
            if earlier is None:
                raise InputError("run.expired", messages.RUN_EXPIRED)
            return earlier, False
        metadata = self.served_model.metadata()
        parent, branched_at = run_request.parent, run_request.branched_at
        return Run(history.next_number(), image, self._request, metadata, parent, branched_at), True

    def add(self, step: Step) -> bool:
        """Add a step to the run. Returns False to stop generation before the answer is complete."""
        if len(self.steps.steps) > len(self.run.steps):  # a continued run keeps its tokens until there are more
            self.run.steps = self.steps.steps
        is_paused = len(self.run.steps) == self._run_request.stop_after
        return step.finish_reason is not None or not (self._run_state.stop_requested or is_paused)

    def due_update(self) -> PageUpdate | None:
        """Return an update with the tokens since the last one, or None: at most one per UPDATE_INTERVAL_S.

        The last token is part of the update that `finish` returns.
        """
        run = self.run
        is_due = time.monotonic() - self._updated_at >= UPDATE_INTERVAL_S
        if self.steps.steps[-1].finish_reason is not None or not is_due or len(run.steps) <= self._num_sent:
            return None
        self._updated_at = time.monotonic()
        found = objects.object_list(run, self.served_model.mask_decoder)
        update = PageUpdate(
            messages.status("busy", "Token {number}", number=len(run.steps)),
            token_strip_update(self.served_model, run, self._num_sent),
            None if found == self._sent_objects else found,
        )
        self._num_sent, self._sent_objects = len(run.steps), found
        return update

    def close(self) -> None:
        """Stop generation, and mark an unfinished run as stopped."""
        self.steps.close()
        if self.run.finish_reason is None:
            self.run.finish(None)

    def finish(self) -> PageUpdate:
        """Store the result in the run. If the page shows another run by now, update only the run tree."""
        run = self.run
        if run.steps is self.steps.steps:  # otherwise a continued run stopped before its first new token
            run.request = {**run.request, "max_new_tokens": self._request["max_new_tokens"]}
            run.finish(self.steps.result)
        self._run_state.finished = True  # before the page is updated and the user can submit the next request
        tree = run_tree(self._session.history)
        if self._session.history.current is not run:
            return PageUpdate(runs=tree)
        return PageUpdate(
            messages.summary(run),
            token_strip_update(self.served_model, run, self._num_sent, done=True),
            objects.object_list(run, self.served_model.mask_decoder),
            tree,
        )


def require_same_model(served_model: ServedModel, run: Run) -> None:
    """Raise InputError unless the model generated the run."""
    if run.model["name"] != served_model.model_name:
        raise InputError(
            "run.other_model",
            "This run was generated by {name}. Load that model to continue it.",
            name=run.model["name"],
        )
