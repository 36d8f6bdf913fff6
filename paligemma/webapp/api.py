"""The HTTP API: /generate, /inspect and /models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from paligemma import lens
from paligemma.errors import InputError
from paligemma.generation import StepCollector
from paligemma.webapp import events
from paligemma.webapp.errors import report_error
from paligemma.webapp.logs import error_location, log
from paligemma.webapp.requests import (
    check_prompt_length,
    read_ids,
    read_index,
    read_prompt,
    read_request,
)
from paligemma.webapp.served_models import ServedModels, find_served_model
from paligemma.webapp.uploads import open_image, uploaded_path

if TYPE_CHECKING:
    from paligemma.webapp.ui import Form

# All events that run a model share one queue with one worker.
MODEL_QUEUE: dict[str, Any] = {"concurrency_id": "model", "concurrency_limit": 1}
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}


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
    """Answer a prompt about an image: one event per token, in order.

    Each event is {"text", "step", "finish_reason"}. "step" is null until the first token. The last event adds
    "detections" and "timing".
    """
    yield events.WAITING_EVENT
    try:
        image = open_image(uploaded_path(image))
        request = read_request(prompt, max_new_tokens, temperature, top_k, top_p, seed, top_n, forced_ids, time_limit)
        served_model = find_served_model(served_models, model)
        for _ in served_model.wait():
            yield events.WAITING_EVENT
        check_prompt_length(served_model.loaded_model.processor, request["prompt"])
        with closing(StepCollector(served_model.stream(image, **request))) as steps:
            for step in steps:
                if step.finish_reason is None:
                    yield events.step_event(step)
        assert steps.result is not None
        yield events.last_event(steps.result, image.size, served_model.mask_decoder)
    except Exception as error:
        raise api_error(error) from None


def inspect_over_api(
    served_models: ServedModels, image: Any, prompt: Any, token_ids: Any, index: Any, model: Any = None
) -> Iterator[dict[str, Any] | None]:
    """Attention on the image and logit lens of token `index` of the answer `token_ids`.

    null while the model loads; then {"index", "grid": [rows, columns] of patches, "attention": weight of each patch in
    row-major order, per layer and head, "picture_share": their sum, per layer and head, "lens": per layer {"layer",
    "token_id", "piece", "prob", "rank_of_final", "entropy"}}. Attention weights are not an explanation of the answer.
    """
    yield None
    try:
        image, prompt = open_image(uploaded_path(image)), read_prompt(prompt)
        ids, index = read_ids("token_ids", token_ids), read_index(index)
        served_model = find_served_model(served_models, model)
        for _ in served_model.wait():
            yield None
        check_prompt_length(served_model.loaded_model.processor, prompt)
        yield events.inspection_event(served_model.inspect(lens.inspect, image, prompt, ids, index))
    except Exception as error:
        raise api_error(error) from None


def api_error(error: Exception) -> gr.Error:
    """Log an exception, and return it as the API's error with its English message."""
    return gr.Error(str(report_error(error)), print_exception=False)


class Page(gr.Blocks):
    """Blocks with an error message for calls that fail before their handler runs."""

    async def process_api(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Process a call. Gradio alone reports such errors without a message."""
        try:
            return await super().process_api(*arguments, **options)
        except gr.Error:
            raise
        except ValueError as error:  # missing inputs, wrong types, or a file that was not uploaded
            log.info("call rejected: %s at %s", type(error).__name__, error_location(error))
            message = InputError(
                "request.inputs", "Invalid inputs. /gradio_api/info lists the inputs of each endpoint."
            )
            raise gr.Error(str(message), print_exception=False) from None
        except Exception as error:
            raise api_error(error) from None


def add_api(served_models: ServedModels, form: Form) -> None:
    """Add the endpoints to the page.

    The inputs of /generate and /inspect are hidden components, because Gradio validates uploaded files only for
    components; `gr.api` passes inputs to its function without validation.
    """
    form = form._replace(seed=gr.Number(visible=False, value=None, precision=0, label="seed; empty = random"))
    # Gradio names MCP tools after the functions.
    generate, inspect = partial(answer_over_api, served_models), partial(inspect_over_api, served_models)
    generate.__name__, inspect.__name__ = "generate", "inspect"  # type: ignore[attr-defined]
    model = gr.Textbox(visible=False, value=None, label="model name, as in /models; empty = first model")
    forced_ids = _token_ids("token ids that the answer starts with")
    time_limit = gr.Number(visible=False, label="time limit in seconds")
    gr.Button(visible=False).click(
        generate,
        [*form, forced_ids, time_limit, model],
        gr.JSON(visible=False, label="event"),
        api_name="generate",
        api_description=answer_over_api.__doc__,
        preprocess=False,
        **MODEL_QUEUE,
    )
    token_ids = _token_ids("token ids of the answer")
    index = gr.Number(visible=False, label="index of the token, from 0")
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

    gr.api(models, api_name="models", api_description="The server's models.", queue=False)


def _token_ids(label: str) -> gr.JSON:
    """A list of token ids with a JSON schema; MCP clients reject a tool with an input of Gradio's type "any JSON"."""
    field = gr.JSON(visible=False, label=label)
    field.api_info = lambda: {"type": "array", "items": {"type": "integer"}}  # type: ignore[method-assign]
    return field
