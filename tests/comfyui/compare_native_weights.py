"""Run by the tests with ComfyUI's Python, in its directory: diffusers and ComfyUI's classes on the same input.

Prints the largest absolute differences as JSON. A process of its own, because importing ComfyUI starts it.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def main(vae_path: str, transformer_path: str, demo: str, pack: str) -> dict[str, float]:
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.sd
    import comfy.utils
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    torch.manual_seed(0)
    found = {}
    reference = opened(AutoencoderKLWan, Path(demo, "vae"))
    weights = comfy.utils.load_torch_file(vae_path)
    vae = comfy.sd.VAE(sd=weights).first_stage_model.float()
    strange = set(weights) ^ set(vae.state_dict())
    assert not strange, strange
    latents, video = torch.randn(1, 16, 5, 8, 8), torch.rand(1, 3, 17, 64, 64) * 2 - 1
    found["decode"] = difference(vae.decode(latents).clamp(-1, 1), reference.decode(latents, return_dict=False)[0])
    found["encode"] = difference(vae.encode(video), reference.encode(video).latent_dist.mode())

    transformer = opened(WanTransformer3DModel, Path(demo, "transformer"))
    spec = importlib.util.spec_from_file_location("native_demo", Path(pack) / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = str(Path(transformer_path).parent)
    sys.modules["folder_paths"].add_model_folder_path("diffusion_models", folder)
    (patcher,) = module.NativeDemoModel().load(Path(transformer_path).name)
    text, time = torch.randn(1, 512, 128), torch.tensor([700.0])
    ours = patcher.model.diffusion_model.float()(latents, time, text)
    found["transformer"] = difference(ours, transformer(latents, time, text, return_dict=False)[0])
    return found


def opened(kind: Any, directory: Path) -> Any:
    """Without from_pretrained, which wants accelerate: ComfyUI does not bring it."""
    model = kind.from_config(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    model.load_state_dict(load_file(directory / "diffusion_pytorch_model.safetensors"))
    return model.float().eval()


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape, (one.shape, other.shape)
    return float((one - other).abs().max())


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(main(*sys.argv[1:])))  # noqa: T201 - the parent reads it
