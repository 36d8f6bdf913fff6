"""Objects of an answer: the object table, API events and downloads."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageColor
from run_helpers import BOX, MASK_CODES, generate, make_run

from paligemma.masks import MaskDecoder, decode_rle
from paligemma.webapp import events
from paligemma.webapp.downloads import PALETTE, annotated_png, coco_json
from paligemma.webapp.render.objects import mask_image, object_list

# Object table


def test_boxes_are_fractions_of_the_image():
    run = make_run(1, *BOX, "▁cat")
    (found,) = object_list(run)["objects"]
    assert found["label"] == "cat" and found["tokens"] == [0, 1, 2, 3, 4]
    assert found["box"] == pytest.approx([0.5, 0.25, 511 / 1024, 0.5])
    assert found["pixels"] == "40, 10 – 80, 30"


def test_malformed_objects_are_listed_with_their_tokens():
    run = make_run(1, *BOX, "▁cat", "▁;", "▁", "<loc0001>", "▁dog")
    (problem,) = object_list(run)["problems"]
    assert problem["text"] == "<loc0001> dog" and problem["tokens"][0] == 7 and "1 location" in problem["reason"]


def test_an_object_is_listed_once_its_label_begins():
    run = make_run(1, *BOX, "▁cat", "▁;")
    steps, run.finish_reason = run.steps, None
    counts = []
    for num_tokens in range(1, 7):
        run.steps = steps[:num_tokens]
        counts.append(len(object_list(run)["objects"]))
    assert counts == [0, 0, 0, 0, 1, 1]


def test_mask_tokens_need_a_mask_decoder():
    run = make_run(1, *BOX, *MASK_CODES, "▁cat")
    without = object_list(run)
    assert without["masks_unavailable"] and without["objects"][0]["mask"] is None
    decoded = object_list(run, MaskDecoder().eval())
    assert decoded["objects"][0]["mask"].startswith("data:image/png;base64,") and not decoded["masks_unavailable"]


def test_a_mask_image_is_opaque_on_the_object():
    mask = np.zeros((64, 64), dtype=np.float32)
    mask[:, 32:] = 1
    alpha = np.asarray(mask_image(mask))[..., 1]
    assert alpha[:, :120].max() == 0 and alpha[:, 136:].min() == 255


# Events of the API


def test_an_event_has_every_field_of_the_step():
    step = generate("▁a").steps[0]
    event = json.loads(json.dumps(events.step_event(step)))
    assert event["text"] == " a" and "text" not in event["step"]
    assert event["step"]["top"][0] == {
        name: event["step"][name] for name in ("token_id", "piece", "logit", "logprob", "prob", "sampled_prob")
    }


def test_the_last_event_has_detections_in_pixels_and_timing():
    result = generate(*BOX, "▁cat")
    event = events.last_event(result, (1024, 512))
    (detection,) = event["detections"]
    assert detection["label"] == "cat"
    assert detection["box"] == [512, 128, 1023, 384]
    assert detection["score"] == pytest.approx(result.steps[0].prob)
    assert detection["mask"] is None
    assert event["timing"] == {"image_s": 0.01, "first_token_s": 0.02, "total_s": 0.05, "tokens_per_s": 50.0}
    assert event["finish_reason"] == "eos"


def test_a_detection_has_a_mask_of_the_image_size():
    result = generate("<loc0000>", "<loc0000>", "<loc0512>", "<loc0512>", *MASK_CODES, "▁cat")
    (detection,) = events.detections(result.steps, (40, 20), MaskDecoder().eval())
    assert decode_rle(detection["mask"]).shape == (20, 40)


def test_locations_spelled_with_ordinary_tokens_have_no_score():
    (detection,) = events.detections(generate("<loc0000><loc0000><loc0512><loc0512>", "▁cat").steps, (40, 20))
    assert detection["score"] is None


# Downloads


def test_coco_json_has_boxes_masks_and_categories():
    run = make_run(1, *BOX, *MASK_CODES, "▁cat")
    document = json.loads(coco_json(run, MaskDecoder().eval()))
    (annotation,) = document["annotations"]
    assert annotation["bbox"] == pytest.approx([40, 10, 39.92, 20], abs=0.01)
    assert annotation["segmentation"]["size"] == [40, 80]
    assert document["categories"] == [{"id": annotation["category_id"], "name": "cat"}]


def test_the_annotated_image_is_a_png_of_the_preview_size():
    run = make_run(1, *BOX, *MASK_CODES, "▁cat")
    image = Image.open(io.BytesIO(annotated_png(run, MaskDecoder().eval())))
    assert image.format == "PNG" and image.size == (80, 40)


def test_a_label_with_several_lines_is_drawn_on_one():
    multiline, single = (make_run(1, *BOX, *label) for label in (("▁cat", "\n", "▁dog"), ("▁cat", "▁dog")))
    assert object_list(multiline)["objects"][0]["label"] == "cat\n dog"
    assert annotated_png(multiline) == annotated_png(single)


def test_a_label_at_the_right_edge_is_not_cut():
    def count_label_pixels(left: str, right: str) -> int:
        run = make_run(1, "<loc0640>", left, "<loc0900>", right, "▁cat")
        above_the_box = np.asarray(Image.open(io.BytesIO(annotated_png(run))))[:24]
        return int((above_the_box == ImageColor.getrgb(PALETTE[0])).all(axis=-1).sum())

    assert count_label_pixels("<loc1000>", "<loc1023>") == count_label_pixels("<loc0000>", "<loc0023>") > 50
