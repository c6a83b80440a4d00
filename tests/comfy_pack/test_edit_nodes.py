"""Nodes of a model whose text encoder sees the images: what they hand on makes the image of the full pipeline."""

import json
import os
import subprocess
import sys

import pytest

from tests.comfy_pack.loading import ROOT


@pytest.mark.slow
def test_text_encoder_image_encoder_and_sampler_make_the_image_of_the_full_pipeline():
    command = [sys.executable, ROOT / "tests" / "comfy_pack" / "run_edit_nodes.py"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tokens, tokens_by_default = found["text"]
    assert tokens != tokens_by_default, "the images are of other sizes than the one that is counted on"
    assert found["difference"] < 1e-5 < 1e-3 < found["difference of another request"]
    assert "embeddings have no reference_1" in found["without"]
