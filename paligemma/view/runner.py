"""Plans -> runs: a generator of what changes on the page while the model answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from paligemma.generation import Sampling
from paligemma.view import objects, tokens, words
from paligemma.view.picture import Picture, fit_picture, make_picture, open_picture, scene
from paligemma.view.requests import check_prompt_length, read_request
from paligemma.view.runs import Plan, Run, run_tree
from paligemma.view.visit import RunControl, Visit

if TYPE_CHECKING:
    from paligemma.generation import GenerationResult, Step
    from paligemma.view.models import ModelHost

# At most 20 page updates a second: a browser that gets more falls behind the model.
UPDATE_INTERVAL_S = 0.05


class Update(NamedTuple):
    """What changes on the page; None leaves a part as it is."""

    notice: Any = None
    strip: Any = None
    objects: Any = None
    runs: Any = None
    scene: Any = None


class Following:
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


def carry_out(host: ModelHost, visit: Visit, plan: Plan, control: RunControl) -> Iterator[Update]:
    """Run a plan on the host's model; `control` says when to stop.

    Raises ValueError, in words for the visitor, for a plan that cannot be carried out, and what the model raises.
    """
    image = plan.picture if isinstance(plan.picture, Picture) else open_picture(plan.picture)
    request = read_request(*plan.arguments)
    for state in host.wait():
        yield Update(state)
        if control.stop_asked:
            break
    if control.stop_asked:
        yield Update(words.notice("idle", "Stopped"))
        return
    check_prompt_length(host.model.processor, request["prompt"])
    if isinstance(image, Picture):
        picture = fit_picture(image, host.model.processor)
    else:
        picture = make_picture(image, host.model.processor, plan.picture)
    sampling = Sampling(request["temperature"], request["top_k"], request["top_p"], request["seed"])
    request["seed"] = sampling.with_seed().seed
    run = _new_run(host, visit, plan, picture, request)
    try:
        yield from _write_answer(host, visit, run, request, control, plan.stop_after)
    finally:
        if run.finish_reason is None:
            run.finish(None)


def _new_run(host: ModelHost, visit: Visit, plan: Plan, picture: Picture, request: dict[str, Any]) -> Run:
    """The run of a plan: a new one, not yet in the history, or the one that goes on."""
    earlier = visit.history.find(plan.replaces if plan.replaces is not None else plan.parent)
    if earlier:
        require_same_model(host, earlier)
    if plan.replaces is not None:
        return earlier
    return Run(visit.history.next_number(), picture, request, host.facts(), plan.parent, plan.branched_at)


def require_same_model(host: ModelHost, run: Run) -> None:
    """Raise ValueError where another model than the host's made the run."""
    if run.model["name"] != host.model_name:
        raise ValueError(f"This run was made by {run.model['name']}. Load that model to go on from it.")


def _write_answer(
    host: ModelHost, visit: Visit, run: Run, request: dict[str, Any], control: RunControl, stop_after: int | None
) -> Iterator[Update]:
    is_new = visit.history.find(run.number) is None
    shown = len(run.steps)  # tokens that the strip has already
    drawn, shown_at = None, 0.0
    stream = host.stream(run.picture.seen, **request)
    visit.history.add(run)
    yield _first_update(host, visit, run, is_new)
    following = Following(stream)
    try:
        for step in following:
            if len(following.steps) > len(run.steps):  # a run that goes on is written again up to where it was
                run.steps = following.steps
            if step.finish_reason is None and (control.stop_asked or len(run.steps) == stop_after):
                break
            # The last token comes with the update of the end, which follows at once.
            is_due = step.finish_reason is None and time.monotonic() - shown_at >= UPDATE_INTERVAL_S
            if is_due and len(run.steps) > shown:
                shown_at = time.monotonic()
                found = objects.object_list(run, host.mask_decoder)
                notice = words.notice("busy", "Token {number}", number=len(run.steps))
                yield Update(notice, strip_of(host, run, shown), None if found == drawn else found)
                shown, drawn = len(run.steps), found
    finally:
        stream.close()
    if run.steps is following.steps:  # else it ended before it got beyond where it was
        run.request = {**run.request, "max_new_tokens": request["max_new_tokens"]}
        run.finish(following.result)
    control.finished = True  # before the page hears of it: what is pressed next must find it so
    yield _last_update(host, visit, run, shown)


def _last_update(host: ModelHost, visit: Visit, run: Run, shown: int) -> Update:
    """The page as a run ends; only the tree, where another run was put on the page meanwhile."""
    tree = run_tree(visit.history)
    if visit.history.current is not run:
        return Update(runs=tree)
    return Update(
        words.summary(run), strip_of(host, run, shown, done=True), objects.object_list(run, host.mask_decoder), tree
    )


def _first_update(host: ModelHost, visit: Visit, run: Run, is_new: bool) -> Update:
    """The page as a run begins: emptied, unless an earlier run goes on."""
    if not is_new:
        return Update(words.notice("busy", "One step on"))
    return Update(
        words.notice("busy", "Looking at the picture"),
        strip_of(host, run, 0),
        objects.object_list(run),
        run_tree(visit.history),
        _show_picture_of(host, visit, run.picture),
    )


def _show_picture_of(host: ModelHost | None, visit: Visit, picture: Picture) -> Any:
    """The picture part's value, or no change where it shows that picture already."""
    before = visit.picture
    if before is not None and (before.shown, before.seen.size) == (picture.shown, picture.seen.size):
        return None
    visit.picture = picture
    return scene_of(host, picture)


def scene_of(host: ModelHost | None, picture: Picture) -> dict[str, Any]:
    """The picture part's value; without the model that saw it, nobody knows how many patches that made of it."""
    return scene(picture, host.model.processor.num_image_tokens if host else None)


def strip_of(host: ModelHost | None, run: Run, start: int, done: bool = False) -> dict[str, Any]:
    """What the strip lacks that has the first `start` tokens of a run, and whether the run's logits are soft-capped."""
    update = tokens.strip_update(run.number, run.steps, start, run.sampling, run.num_forced, done)
    return {**update, "soft_capped": bool(host and host.soft_cap)}


def show_again(visit: Visit, run: Run) -> Update:
    """Put an earlier run on the page."""
    visit.control.stop_asked = True  # what still runs would write over it
    visit.history.current = run
    return whole_page(visit, run)._replace(notice=words.run_shown(run))


def whole_page(visit: Visit, run: Run) -> Update:
    """Everything of a run, read as the model that made it does."""
    host = visit.host_of(run)
    return Update(
        strip=strip_of(host, run, 0, done=run.finish_reason is not None),
        objects=objects.object_list(run, host and host.mask_decoder),
        runs=run_tree(visit.history),
        scene=_show_picture_of(host, visit, run.picture),
    )
