"""LoRA for Flux: against diffusers' own loading and fusing, by every name that files have for a module."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy_tpu.compiler.cache import count_compilations
from comfy_tpu.compiler.packed_weights import pack_weight
from comfy_tpu.compiler.residency import Residency
from comfy_tpu.config import Lora, ResidencyConfig, RuntimeConfig
from comfy_tpu.errors import InvalidValueError
from comfy_tpu.families.flux import transformer as flux_transformer
from comfy_tpu.families.flux.lora import lora_names
from comfy_tpu.pipeline.lora import open_loras
from comfy_tpu.pipeline.lora_keys import make_targets
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.progress import Progress
from comfy_tpu.pipeline.video import VideoPipeline
from tests.covering import covering
from tests.families import small_flux, small_flux_loras
from tests.families.meshes import MESHES
from tests.families.small_flux_loras import (
    comfy_style,
    diffusers_style,
    factors,
    fused,
    kohya_style,
    original_style,
)
from tests.pipeline import small_loras, small_pipeline
from tests.pipeline.small_loras import Tensors, changed, error, loaded, write


def base(variant: str = "dev") -> Tensors:
    return small_flux.reference(variant).transformer.state_dict()


def weights(loras: list[Lora], mesh: str = "single", variant: str = "dev", **options: Any) -> dict[str, Any]:
    return loaded(loras, mesh, directory=small_flux.directory(variant), **options)


def loadable() -> small_flux_loras.Factors:
    """What diffusers (0.42) can load under the original names: it wants 3072 features in linear1, and it loses what is
    outside the blocks, because it forgets to write `transformer.` before it."""
    return {name: pair for name, pair in factors(top=False).items() if not name.endswith("linear1")}


STYLES = {
    "diffusers": lambda: diffusers_style(factors()),
    "kohya": lambda: kohya_style(loadable(), alpha=2.0),
    "kohya without alpha": lambda: kohya_style(loadable()),
    "comfy": lambda: comfy_style(loadable(), alpha=8.0),
}


# comfy by default: whole, in test_every_style_of_one_lora_is_that_of_diffusers_on_every_mesh.
@pytest.mark.default_cases("kohya")
@pytest.mark.parametrize(
    "style", [pytest.param(style, marks=[pytest.mark.slow] if style == "comfy" else []) for style in STYLES]
)
def test_weights_are_those_that_diffusers_fuses(style: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", STYLES[style]())
    expected = fused(path, 0.7)
    actual = weights([Lora(path, 0.7)])
    assert error(actual, base()) > 0.1, "the LoRA does something"
    assert error(actual, expected) < 1e-5
    assert set(changed(actual, base())) == {name for name in base() if not torch.equal(base()[name], expected[name])}


WHOLE = {
    "kohya": lambda made: kohya_style(made, alpha=4.0),
    "comfy": comfy_style,
    "original": original_style,
    "underscores of diffusers": lambda made: {
        f"lora_transformer_{key.removeprefix('transformer.').split('.lora_')[0].replace('.', '_')}.lora_"
        f"{'down' if 'lora_A' in key else 'up'}.weight": tensor
        for key, tensor in diffusers_style(made).items()
    },
}


@pytest.mark.default_cases("original-dp=2,sp=4")
@covering("style, mesh", WHOLE, MESHES, strength=1)
def test_every_style_of_one_lora_is_that_of_diffusers_on_every_mesh(style: str, mesh: str, tmp_path: Path) -> None:
    """With linear1 and everything outside the blocks: diffusers gets its own names, taken apart by hand."""
    made = factors(rank=4, seed=2)
    expected = fused(write(tmp_path / "a.safetensors", diffusers_style(made)), -0.5)
    actual = weights([Lora(write(tmp_path / "b.safetensors", WHOLE[style](made)), -0.5)], mesh)
    tp = 4 if "tp=4" in mesh else 1
    packed = flux_transformer.TRANSFORMER.packed(small_flux.TRANSFORMER) if flux_transformer.TRANSFORMER.packed else ()
    assert error(actual, {name: pack_weight(name, tensor, packed, tp) for name, tensor in expected.items()}) < 1e-5
    name = "single_transformer_blocks.1.proj_out.weight"
    assert (error(actual, {name: expected[name]}) < 1e-5) == (tp == 1), "its columns are in another order at tp=4"


def test_schnell_has_no_place_for_guidance_and_takes_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = factors(top=False) | {"guidance_in.in_layer": factors()["time_in.in_layer"]}
    path = write(tmp_path / "a.safetensors", comfy_style(made))
    actual = weights([Lora(path)], variant="schnell")
    expected = fused(write(tmp_path / "b.safetensors", diffusers_style(factors(top=False))), 1.0, "schnell")
    assert error(actual, expected) < 1e-5
    assert "has no place for diffusion_model.guidance_in.in_layer.lora_down.weight" in caplog.text


def test_the_last_norm_scales_before_it_shifts(tmp_path: Path) -> None:
    name = "diffusion_model.final_layer.adaLN_modulation.1"
    weight, bias = small_loras.random(256, 128, seed=3), small_loras.random(256, seed=4)
    path = write(tmp_path / "a.safetensors", {f"{name}.diff": weight, f"{name}.diff_b": bias})
    actual = weights([Lora(path)])
    for part, change in (("weight", weight), ("bias", bias)):
        shift, scale = change.chunk(2)
        expected = {f"norm_out.linear.{part}": base()[f"norm_out.linear.{part}"] + torch.cat((scale, shift))}
        assert error(actual, expected) < 1e-6


def test_every_module_is_known_by_its_original_name() -> None:
    """The names of Flux's own code, written out for one block of each kind."""
    files = ModelFiles.open(small_flux.directory("dev"))
    targets = make_targets(files.checkpoint(files.family.transformer).tensors, lora_names)
    norms = ("query_norm.scale", "key_norm.scale")
    names = [f"double_blocks.0.{name}" for name in small_flux_loras.DOUBLE_BLOCK]
    names += [f"double_blocks.0.{stream}_attn.norm.{norm}" for stream in ("img", "txt") for norm in norms]
    names += [f"single_blocks.0.{name}" for name in small_flux_loras.SINGLE_BLOCK]
    names += [f"single_blocks.0.norm.{norm}" for norm in norms]
    names += ["img_in", "txt_in", "final_layer.linear", "final_layer.adaLN_modulation.1"]
    names += [f"{kind}_in.{layer}_layer" for kind in ("time", "vector", "guidance") for layer in ("in", "out")]
    found = {target.weight for name in names for target in targets.find(f"diffusion_model.{name}")}
    own = [name for name in targets.shapes if not name.endswith(".bias")]
    assert found == {name for name in own if not any(f"blocks.{number}." in name for number in (1, 2))}
    assert all(targets.find(f"lora_unet_{name.replace('.', '_')}") for name in names)


@pytest.mark.slow  # by default: tests/pipeline/test_lora.py
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=2,sp=4"])
def test_nothing_is_compiled_for_another_lora_and_the_base_is_exact_again(mesh: str, tmp_path: Path) -> None:
    """Merged on the host with tp, on the devices without."""
    heard: list[Progress] = []
    residency = Residency(ResidencyConfig())
    pipeline = VideoPipeline.open(
        small_flux.directory("dev"), RuntimeConfig(mesh=mesh), residency=residency, on_progress=heard.append
    )
    settings = pipeline.settings(height=64, width=96, num_inference_steps=2, max_sequence_length=32, seed=7)
    embeddings = pipeline.encode("a red circle", settings)
    results = [pipeline.denoise(embeddings, settings)]
    heard.clear()
    first = write(tmp_path / "a.safetensors", diffusers_style(factors(rank=4)))
    second = write(tmp_path / "b.safetensors", kohya_style(factors(rank=40, seed=2), alpha=1.0))

    def run(*loras: Lora) -> None:
        pipeline.use_loras(loras)
        results.append(pipeline.denoise(embeddings, settings))

    run(Lora(first))
    run(Lora(second))
    with count_compilations() as count:
        run(Lora(first, -0.5))
        run(Lora(second, 0.5))
        run(Lora(first), Lora(second, 0.3))
        pipeline.use_loras([])
        residency.clear()  # so that the base is loaded again, beside nothing
        assert torch.equal(pipeline.denoise(embeddings, settings), results[0])
    assert count.requested == 0, "ranks 40 and 44 are one program, and strengths are numbers"
    assert not [event for event in heard if event.stage == "compiling"], "no program of the transformer"
    assert not any(torch.allclose(one, other, atol=1e-3) for one, other in itertools.combinations(results, 2))


def test_a_lora_of_wan_is_refused_by_flux_and_one_of_flux_by_wan(tmp_path: Path) -> None:
    of_flux = {
        "diffusers": diffusers_style(factors(top=False)),
        "kohya": kohya_style(factors()),
        "comfy": comfy_style(factors()),
    }
    for style in of_flux:
        path = write(tmp_path / "wan.safetensors", small_loras.STYLES[style]())
        with pytest.raises(
            InvalidValueError,
            match=r"fits nothing in model .*expected keys such as transformer\.single_transformer_blocks\.0\.attn\.to_k"
            r"\.lora_A\.weight or diffusion_model\.single_blocks\.0\.linear1\.lora_down\.weight or "
            r"lora_unet_single_blocks_0_linear1\.lora_down\.weight: use a LoRA made for Flux\.1 dev",
        ):
            open_loras([Lora(path)], ModelFiles.open(small_flux.directory("dev")))
        path = write(tmp_path / "flux.safetensors", of_flux[style])
        with pytest.raises(InvalidValueError, match=r"fits nothing in model .*: use a LoRA made for Wan 2\.1"):
            open_loras([Lora(path)], ModelFiles.open(small_pipeline.directory()))


def test_one_for_another_noise_is_refused_by_one_transformer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", diffusers_style(factors()))
    with pytest.raises(InvalidValueError, match=r"is for high noise, but model .* has one transformer for all; leave"):
        open_loras([Lora(path, noise="high")], ModelFiles.open(small_flux.directory("dev")))
