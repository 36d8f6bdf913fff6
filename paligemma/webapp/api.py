"""The HTTP API: /generate, /inspect and /models."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from paligemma import lens
from paligemma.webapp import events, messages, serving
from paligemma.webapp.execution import (
    StepCollector,
)
from paligemma.webapp.handlers import _explain
from paligemma.webapp.images import open_image
from paligemma.webapp.render import attention
from paligemma.webapp.requests import (
    check_prompt_length,
    read_ids,
    read_index,
    read_prompt,
    read_request,
    uploaded_path,
)
from paligemma.webapp.served_models import ServedModels, find_served_model

if TYPE_CHECKING:
    from paligemma.webapp.ui import Form

# Every event that runs the model shares one queue with one worker.
MODEL_QUEUE = {"concurrency_id": "model", "concurrency_limit": 1}
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}

log = logging.getLogger("paligemma.app")


def answer_over_api(
    served_models: ServedModels,
    image: Any,
    prompt: Any,
    max_new_tokens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    seed: Any = None,
    top_n: Any = 10,
    forced_ids: Any = None,
    time_limit: Any = None,
    model: Any = None,
) -> Iterator[events.Event]:
    """Answer a prompt about a picture: an event a token, in order.

    Every event is {"text", "step", "finish_reason"}; while the model is not ready or prepares, "step" is null. The
    last event adds "detections" and "timing".
    """
    yield events.WAITING_EVENT
    try:
        image = open_image(uploaded_path(image))
        request = read_request(prompt, max_new_tokens, temperature, top_k, top_p, seed, top_n, forced_ids, time_limit)
        served_model = find_served_model(served_models, model)
        for _ in served_model.wait():
            yield events.WAITING_EVENT
        check_prompt_length(served_model.model.processor, request["prompt"])
        with closing(served_model.stream(image, **request)) as stream:
            collector = StepCollector(stream)
            for step in collector:
                if step.finish_reason is None:
                    yield events.step_event(step)
        yield events.last_event(collector.result, image.size, served_model.mask_decoder)
    except Exception as error:
        raise gr.Error(_explain(error), print_exception=False) from None


def inspect_over_api(
    served_models: ServedModels, image: Any, prompt: Any, token_ids: Any, index: Any, model: Any = None
) -> Iterator[dict[str, Any] | None]:
    """Look inside the step that wrote token `index` of an answer, whose ids are `token_ids`.

    null while the model is not ready; then {"index", "grid": [rows, columns] of patches, "attention": per layer and
    head the weight of each patch, row by row, "picture_share": per layer and head, "lens": per depth {"layer",
    "token_id", "piece", "prob", "rank_of_final", "entropy"}}. Attention is not an explanation.
    """
    yield None
    try:
        image, prompt = open_image(uploaded_path(image)), read_prompt(prompt)
        ids, place = read_ids("token_ids", token_ids), read_index(index)
        served_model = find_served_model(served_models, model)
        for _ in served_model.wait():
            yield None
        check_prompt_length(served_model.model.processor, prompt)
        yield attention.inspection_event(served_model.inspect(lens.inspect, image, prompt, ids, place), place)
    except Exception as error:
        raise gr.Error(_explain(error), print_exception=False) from None


class Page(gr.Blocks):
    """Blocks that also say in words what is wrong with a call that never reaches its handler."""

    async def process_api(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """As Gradio's, which answers such calls with an error without words."""
        try:
            return await super().process_api(*arguments, **options)
        except gr.Error:
            raise
        except ValueError as error:  # inputs are missing, are of another shape, or name a file that was not uploaded
            log.info("call refused: %s at %s", type(error).__name__, serving.place_of(error))
            raise gr.Error(messages.WRONG_INPUTS, print_exception=False) from None
        except Exception as error:
            raise gr.Error(_explain(error), print_exception=False) from None


def _wire_api(served_models: ServedModels, form: Form) -> None:
    """The endpoints hang on components that the page does not show, so that Gradio checks files for them too."""
    form = form._replace(seed=gr.Number(visible=False, value=None, precision=0, label="empty: a fresh one"))
    generate, inspect = partial(answer_over_api, served_models), partial(inspect_over_api, served_models)
    generate.__name__, inspect.__name__ = "generate", "inspect"  # as MCP tools they are called so
    model = gr.Textbox(visible=False, value=None, label="one of /models; empty: the first one")
    forced_ids = _token_ids("token ids to begin the answer with")
    time_limit = gr.Number(visible=False, label="seconds")
    gr.Button(visible=False).click(
        generate,
        [*form, forced_ids, time_limit, model],
        gr.JSON(visible=False, label="event"),
        api_name="generate",
        api_description=answer_over_api.__doc__,
        preprocess=False,
        **MODEL_QUEUE,
    )
    token_ids = _token_ids("the ids of an answer")
    index = gr.Number(visible=False, label="which of them, from 0")
    gr.Button(visible=False).click(
        inspect,
        [form.image, form.prompt, token_ids, index, model],
        gr.JSON(visible=False, label="inspection"),
        api_name="inspect",
        api_description=inspect_over_api.__doc__,
        preprocess=False,
        **MODEL_QUEUE,
    )

    def models() -> list[dict[str, Any]]:
        return [served_model.describe() for served_model in served_models]

    gr.api(models, api_name="models", api_description="The models of this server.", queue=False)


def _token_ids(label: str) -> gr.JSON:
    """A field of token ids that says so: of "any JSON", which Gradio would say, MCP clients can call no tool."""
    field = gr.JSON(visible=False, label=label)
    field.api_info = lambda: {"type": "array", "items": {"type": "integer"}}
    return field
