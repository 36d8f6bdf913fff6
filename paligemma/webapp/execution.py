"""Plans -> runs: a generator of what changes on the page while the model answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from paligemma.generation import Sampling
from paligemma.webapp import messages
from paligemma.webapp.images import InputImage, fit_to_model, image_view_state, make_input_image, open_image
from paligemma.webapp.render import objects, token_strip
from paligemma.webapp.requests import check_prompt_length, read_request
from paligemma.webapp.runs import Run, RunRequest, run_tree
from paligemma.webapp.session import RunState, Session

if TYPE_CHECKING:
    from paligemma.generation import GenerationResult, Step
    from paligemma.webapp.served_models import ServedModel

# At most 20 page updates a second: a browser that gets more falls behind the model.
UPDATE_INTERVAL_S = 0.05


class PageUpdate(NamedTuple):
    """What changes on the page; None leaves a part as it is."""

    status: Any = None
    token_strip: Any = None
    objects: Any = None
    runs: Any = None
    image_view: Any = None


class StepCollector:
    """A stream of steps that is being read: the steps so far, and what the stream returns at the end."""

    def __init__(self, stream: Iterator[Step]) -> None:
        self.steps: list[Step] = []
        self.result: GenerationResult | None = None
        self._stream = stream

    def __iter__(self) -> Iterator[Step]:
        while True:
            try:
                step = next(self._stream)
            except StopIteration as end:
                self.result = end.value
                return
            self.steps.append(step)
            yield step


def execute(
    served_model: ServedModel, session: Session, run_request: RunRequest, run_state: RunState
) -> Iterator[PageUpdate]:
    """Run a plan on the host's model; `control` says when to stop.

    Raises ValueError, in words for the visitor, for a plan that cannot be carried out, and what the model raises.
    """
    image = run_request.image if isinstance(run_request.image, InputImage) else open_image(run_request.image)
    request = read_request(*run_request.arguments)
    for state in served_model.wait():
        yield PageUpdate(state)
        if run_state.stop_requested:
            break
    if run_state.stop_requested:
        yield PageUpdate(messages.status("idle", "Stopped"))
        return
    check_prompt_length(served_model.model.processor, request["prompt"])
    if isinstance(image, InputImage):
        image = fit_to_model(image, served_model.model.processor)
    else:
        image = make_input_image(image, served_model.model.processor, run_request.image)
    sampling = Sampling(request["temperature"], request["top_k"], request["top_p"], request["seed"])
    request["seed"] = sampling.with_seed().seed
    run = _new_run(served_model, session, run_request, image, request)
    try:
        yield from _write_answer(served_model, session, run, request, run_state, run_request.stop_after)
    finally:
        if run.finish_reason is None:
            run.finish(None)


def _new_run(
    served_model: ServedModel, session: Session, run_request: RunRequest, image: InputImage, request: dict[str, Any]
) -> Run:
    """The run of a plan: a new one, not yet in the history, or the one that goes on."""
    earlier = session.history.find(run_request.replaces if run_request.replaces is not None else run_request.parent)
    if earlier:
        require_same_model(served_model, earlier)
    if run_request.replaces is not None:
        return earlier
    return Run(
        session.history.next_number(),
        image,
        request,
        served_model.metadata(),
        run_request.parent,
        run_request.branched_at,
    )


def require_same_model(served_model: ServedModel, run: Run) -> None:
    """Raise ValueError where another model than the host's made the run."""
    if run.model["name"] != served_model.model_name:
        raise ValueError(f"This run was made by {run.model['name']}. Load that model to go on from it.")


def _write_answer(
    served_model: ServedModel,
    session: Session,
    run: Run,
    request: dict[str, Any],
    run_state: RunState,
    stop_after: int | None,
) -> Iterator[PageUpdate]:
    is_new = session.history.find(run.number) is None
    num_sent = len(run.steps)  # tokens that the strip has already
    drawn, shown_at = None, 0.0
    stream = served_model.stream(run.image.model_input, **request)
    session.history.add(run)
    yield _first_update(served_model, session, run, is_new)
    collector = StepCollector(stream)
    try:
        for step in collector:
            if len(collector.steps) > len(run.steps):  # a run that goes on is written again up to where it was
                run.steps = collector.steps
            if step.finish_reason is None and (run_state.stop_requested or len(run.steps) == stop_after):
                break
            # The last token comes with the update of the end, which follows at once.
            is_due = step.finish_reason is None and time.monotonic() - shown_at >= UPDATE_INTERVAL_S
            if is_due and len(run.steps) > num_sent:
                shown_at = time.monotonic()
                found = objects.object_list(run, served_model.mask_decoder)
                status = messages.status("busy", "Token {number}", number=len(run.steps))
                yield PageUpdate(
                    status, token_strip_update(served_model, run, num_sent), None if found == drawn else found
                )
                num_sent, drawn = len(run.steps), found
    finally:
        stream.close()
    if run.steps is collector.steps:  # else it ended before it got beyond where it was
        run.request = {**run.request, "max_new_tokens": request["max_new_tokens"]}
        run.finish(collector.result)
    run_state.finished = True  # before the page hears of it: what is pressed next must find it so
    yield _last_update(served_model, session, run, num_sent)


def _last_update(served_model: ServedModel, session: Session, run: Run, num_sent: int) -> PageUpdate:
    """The page as a run ends; only the tree, where another run was put on the page meanwhile."""
    tree = run_tree(session.history)
    if session.history.current is not run:
        return PageUpdate(runs=tree)
    return PageUpdate(
        messages.summary(run),
        token_strip_update(served_model, run, num_sent, done=True),
        objects.object_list(run, served_model.mask_decoder),
        tree,
    )


def _first_update(served_model: ServedModel, session: Session, run: Run, is_new: bool) -> PageUpdate:
    """The page as a run begins: emptied, unless an earlier run goes on."""
    if not is_new:
        return PageUpdate(messages.status("busy", "One step on"))
    return PageUpdate(
        messages.status("busy", "Looking at the picture"),
        token_strip_update(served_model, run, 0),
        objects.object_list(run),
        run_tree(session.history),
        _show_picture_of(served_model, session, run.image),
    )


def _show_picture_of(served_model: ServedModel | None, session: Session, image: InputImage) -> Any:
    """The picture part's value, or no change where it shows that picture already."""
    before = session.image
    if before is not None and (before.preview, before.model_input.size) == (image.preview, image.model_input.size):
        return None
    session.image = image
    return image_view_of(served_model, image)


def image_view_of(served_model: ServedModel | None, image: InputImage) -> dict[str, Any]:
    """The picture part's value; without the model that saw it, nobody knows how many patches that made of it."""
    return image_view_state(image, served_model.model.processor.num_image_tokens if served_model else None)


def token_strip_update(served_model: ServedModel | None, run: Run, start: int, done: bool = False) -> dict[str, Any]:
    """What the strip lacks that has the first `start` tokens of a run, and whether the run's logits are soft-capped."""
    update = token_strip.token_strip_state(run.number, run.steps, start, run.sampling, run.num_forced, done)
    return {**update, "soft_capped": bool(served_model and served_model.soft_cap)}


def show_earlier_run(session: Session, run: Run) -> PageUpdate:
    """Put an earlier run on the page."""
    session.run_state.stop_requested = True  # what still runs would write over it
    session.history.current = run
    return full_page_update(session, run)._replace(status=messages.run_shown(run))


def full_page_update(session: Session, run: Run) -> PageUpdate:
    """Everything of a run, read as the model that made it does."""
    served_model = session.served_model_of(run)
    return PageUpdate(
        token_strip=token_strip_update(served_model, run, 0, done=run.finish_reason is not None),
        objects=objects.object_list(run, served_model and served_model.mask_decoder),
        runs=run_tree(session.history),
        image_view=_show_picture_of(served_model, session, run.image),
    )
