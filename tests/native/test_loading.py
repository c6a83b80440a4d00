"""TPU Load Diffusion Model: a file straight to the devices."""

import subprocess
import sys

import pytest
import torch

from tests.native.architectures import ARCHITECTURES
from tests.native.models import TOLERANCE, some_architectures

pytestmark = pytest.mark.comfyui

recognised = some_architectures(*[each.name for each in ARCHITECTURES if each.from_file])


def load(name, **choices):
    from comfy_tpu.comfy.compile_nodes import TPULoadDiffusionModel

    settings = {"mesh": "single", "precision": "float32", "attention": "auto", **choices}
    return TPULoadDiffusionModel.execute(name, **settings).args[0]


@pytest.fixture
def diffusion_models(comfyui):
    folder = comfyui / "models" / "diffusion_models"
    yield folder
    for path in folder.iterdir():
        path.unlink()


@recognised
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."], ids=["plain", "whole checkpoint's names"])
def test_a_file(architecture, prefix, diffusion_models, watch):
    """The same as ComfyUI's own loader gives, of what a release holds."""
    import comfy.utils
    import nodes

    from tests.native.sampling import relative_error, sample

    path = diffusion_models / "model.safetensors"
    state = architecture.build(seed=4).model.diffusion_model.state_dict()
    comfy.utils.save_torch_file({f"{prefix}{name}": tensor for name, tensor in state.items()}, str(path))
    expected = sample(nodes.UNETLoader().load_unet(path.name, "default")[0], architecture)
    assert relative_error(expected, sample(load(path.name), architecture)) < TOLERANCE
    watch.assert_on_devices()


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".bin"])
def test_a_pickle_is_refused_unopened(suffix, diffusion_models):
    from comfy_tpu.errors import CheckpointError

    path = diffusion_models / f"model{suffix}"
    path.write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(CheckpointError, match="not a safetensors file.*pickle"):
        load(path.name)
    assert not (diffusion_models / "opened").exists()


@pytest.mark.parametrize("content", [b"", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", b"nothing of the kind" * 100])
def test_a_damaged_file_is_refused(content, diffusion_models):
    from comfy_tpu.errors import CheckpointError

    path = diffusion_models / "damaged.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged.safetensors"):
        load(path.name)


def test_a_file_of_something_else_is_refused(diffusion_models):
    import comfy.utils

    from comfy_tpu.errors import CheckpointError

    comfy.utils.save_torch_file({"something.weight": torch.zeros(4, 4)}, str(diffusion_models / "other.safetensors"))
    with pytest.raises(CheckpointError, match="other.safetensors holds no diffusion model"):
        load("other.safetensors")


MEASURE = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.native.comfyui import start_comfyui
start_comfyui(Path({base!r}))
import jax, nodes
from comfy_tpu.comfy.compile_nodes import TPULoadDiffusionModel

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

jax.devices()
before = anonymous()
if {ours!r}:
    model = TPULoadDiffusionModel.execute("large.safetensors", mesh="single", precision="bfloat16", attention="auto")
else:
    model = nodes.UNETLoader().load_unet("large.safetensors", "default")
print(anonymous() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_copy_in_host_memory(diffusion_models, comfyui):
    """ComfyUI with --cpu holds the file in float32; we hold nothing of it until it is on the devices."""
    import comfy.utils

    from tests.comfyui.checkout import ROOT

    wan = next(each for each in ARCHITECTURES if each.name == "Wan 2.1 T2V")
    state = wan.build().model.diffusion_model.state_dict()
    # A large file that is the same model to ComfyUI: more of the same blocks.
    blocks = [name for name in state if name.startswith("blocks.0.")]
    tensors = {name: tensor.bfloat16() for name, tensor in state.items()}
    for index in range(3, 120):
        for name in blocks:
            tensors[name.replace("blocks.0.", f"blocks.{index}.", 1)] = tensors[name].clone()
    path = diffusion_models / "large.safetensors"
    comfy.utils.save_torch_file(tensors, str(path))
    size = path.stat().st_size
    assert size > 100e6

    def grown(ours):
        code = MEASURE.format(root=str(ROOT), base=str(comfyui), ours=ours)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        return int(done.stdout.split()[-1])

    assert grown(ours=False) > 1.8 * size
    assert grown(ours=True) < 0.2 * size
