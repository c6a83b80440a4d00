"""Nodes of a model whose text encoder sees the images: what they hand on makes the image of the full pipeline."""

import pytest

from tests.comfy_pack.loading import run_script


@pytest.mark.slow
def test_text_encoder_image_encoder_and_sampler_make_the_image_of_the_full_pipeline():
    found = run_script("run_edit_nodes.py")
    tokens, tokens_by_default = found["text"]
    assert tokens != tokens_by_default, "the images are of other sizes than the one that is counted on"
    assert found["difference"] < 1e-5 < 1e-3 < found["difference of another request"]
    assert "embeddings have no reference_1" in found["without"]
