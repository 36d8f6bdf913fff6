"""Attention and logit lens as data for the page and the API."""

from __future__ import annotations

import numpy as np
import torch
from fake_model import fake_inspection

from paligemma.webapp.events import inspection_event
from paligemma.webapp.render.attention import LENS_COLUMNS, attention_state, mean_image_shares


def test_an_inspection_keeps_the_order_of_layers_and_patches():
    inspection = fake_inspection(None, None, "", (3, 4, 5, 6, 7, 8), 5)
    event = inspection_event(inspection)
    assert event["grid"] == [4, 4] and np.asarray(event["attention"]).shape == (2, 2, 16)
    assert event["attention"][0][0][5] == 0.5 and sum(event["attention"][0][0]) == 0.5
    assert [row["rank_of_final"] for row in event["lens"]] == [3, 2, 1]
    assert len(attention_state(1, inspection)["rows"][0]["cells"]) == len(LENS_COLUMNS)


def test_image_shares_are_averaged_over_layers_and_heads():
    assert mean_image_shares(torch.tensor([[[0.1, 0.3]], [[0.5, 0.5]]])) == [0.2, 0.5]
