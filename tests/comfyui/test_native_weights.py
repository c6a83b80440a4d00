"""Both sides of the exchange tests hold the same model: ComfyUI's classes agree with diffusers' on the same input."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from comfy_tpu.pipeline.model_files import DEMO_DIRECTORY
from tests.comfyui.checkout import Checkout
from tests.comfyui.native_weights import native_transformer, native_vae, write_demo_transformer, write_demo_vae
from tests.comfyui.server import PACKS
from tests.comfyui.workflows import DEMO_TRANSFORMER, DEMO_VAE


@pytest.mark.comfyui
def test_comfyui_computes_what_diffusers_does(checkout: Checkout, tmp_path: Path) -> None:
    vae, transformer = tmp_path / "vae" / DEMO_VAE, tmp_path / "diffusion_models" / DEMO_TRANSFORMER
    write_demo_vae(vae)
    write_demo_transformer(transformer)
    script = Path(__file__).with_name("compare_native_weights.py")
    done = subprocess.run(
        [checkout.python, script, vae, transformer, DEMO_DIRECTORY, PACKS / "native_demo"],
        env={**os.environ, "PYTHONPATH": str(checkout.path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # float32 in another order of additions; values are about 1
    assert max(found.values()) < 1e-4, found


@pytest.mark.parametrize("rename", [native_vae, native_transformer])
def test_an_unknown_weight_is_refused(rename) -> None:
    with pytest.raises(KeyError, match=r"has no name in ComfyUI's layout"):
        rename({"encoder.new_thing.weight": None})
