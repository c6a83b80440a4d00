"""VAE: the same images and latents with TPU Compile VAE in the graph and without it."""

import copy
import dataclasses
import functools
import logging
import types

import pytest
import torch

from tests.native.vaes import VAES

pytestmark = pytest.mark.comfyui

TABLE = "VAE"
TOLERANCE = 1e-3
DECIBELS = 40
"""In bfloat16, where 43 and more are found."""

every_vae = pytest.mark.parametrize(
    "small",
    [pytest.param(each, marks=pytest.mark.xdist_group(f"VAE {each.name}")) for each in VAES],
    ids=lambda each: each.name.replace(" ", "_"),
)


@functools.cache
def vaes(small):
    plain = small.build()
    return types.SimpleNamespace(plain=plain, compiled=compile_vae(plain))


@pytest.fixture(autouse=True, scope="module")
def _nothing_left(comfyui):
    yield
    vaes.cache_clear()


def compile_vae(vae, *, mesh="single", precision="float32", attention="auto"):
    from comfy_tpu.comfy.compile_nodes import TPUCompileVAE

    return TPUCompileVAE.execute(vae, mesh=mesh, precision=precision, attention=attention).args[0]


def decode(vae, small, batch=1):
    import nodes

    with torch.inference_mode():
        return nodes.VAEDecode().decode(vae, {"samples": small.latents(batch)})[0]


def decode_tiled(vae, small):
    import nodes

    with torch.inference_mode():
        return nodes.VAEDecodeTiled().decode(vae, {"samples": small.latents()}, 64, 16)[0]


def encode(vae, small):
    import nodes

    with torch.inference_mode():
        return nodes.VAEEncode().encode(vae, small.images())[0]["samples"]


def encode_tiled(vae, small):
    import nodes

    with torch.inference_mode():
        # Its smallest overlap is for images larger than these.
        return nodes.VAEEncodeTiled().encode(vae, small.images(), 64, 16, 64, 8)[0]["samples"]


@every_vae
@pytest.mark.parametrize("run", [decode, decode_tiled, encode, encode_tiled], ids=lambda run: run.__name__)
def test_vae(small, run, watch, cell):
    from tests.native.sampling import relative_error

    cell.at(TABLE, small.name, run.__name__.replace("_", " "))
    both = vaes(small)
    expected = run(both.plain, small)
    assert expected.std() > 0.01
    assert cell.error(relative_error(expected, run(both.compiled, small))) < TOLERANCE
    watch.assert_on_devices()


@every_vae
def test_a_batch(small, watch):
    from tests.native.sampling import relative_error

    both = vaes(small)
    assert relative_error(decode(both.plain, small, batch=2), decode(both.compiled, small, batch=2)) < TOLERANCE
    watch.assert_on_devices()


@every_vae
def test_another_size(small, watch, cell):
    from tests.native.sampling import relative_error

    cell.at(TABLE, small.name, "second resolution")
    wide = dataclasses.replace(small, latent=(*small.latent[:-2], 6, 10))
    both = vaes(small)
    for run in (decode, encode):
        assert cell.error(relative_error(run(both.plain, wide), run(both.compiled, wide))) < TOLERANCE
    watch.assert_on_devices()


@every_vae
def test_several_images(small, watch):
    """A batch for a VAE of images, a video for the others."""
    from tests.native.sampling import relative_error

    several = small if small.frames > 1 else dataclasses.replace(small, frames=2)
    both = vaes(small)
    assert relative_error(encode(both.plain, several), encode(both.compiled, several)) < TOLERANCE
    watch.assert_on_devices()


@pytest.mark.parametrize("small", [VAES[3]], ids=["SDXL"])
def test_a_deep_copy_is_a_model_of_its_own(small, watch):
    """As nodes for seamless images make one, to change it."""
    from tests.native.sampling import relative_error

    compiled = compile_vae(vaes(small).plain)
    before = decode(compiled, small)
    twin, plain_twin = copy.deepcopy(compiled), copy.deepcopy(vaes(small).plain)
    for vae in (twin, plain_twin):
        for part in vae.first_stage_model.modules():
            if isinstance(part, torch.nn.Conv2d):
                part.padding_mode = "circular"
    expected = decode(plain_twin, small)
    assert relative_error(before, expected) > 10 * TOLERANCE
    assert relative_error(expected, decode(twin, small)) < TOLERANCE
    assert torch.equal(decode(compiled, small), before)


@pytest.mark.parametrize("small", [VAES[0], VAES[3]], ids=["Wan_2.1", "SDXL"])
def test_a_replaced_method(small, watch):
    from tests.native.sampling import relative_error

    plain = vaes(small).plain
    compiled = compile_vae(plain)
    part = next(part for part in plain.first_stage_model.decoder.modules() if type(part).__name__.startswith("Res"))
    part.forward = lambda *args, **kwargs: type(part).forward(part, *args, **kwargs) * 0.5
    try:
        expected, got = decode(plain, small), decode(compiled, small)
    finally:
        del part.forward
    assert relative_error(expected, decode(compiled, small)) > 10 * TOLERANCE
    assert relative_error(expected, got) < TOLERANCE
    assert "replaced" in watch.warnings[0]


@every_vae
def test_bfloat16(small, watch, cell):
    from tests.native.sampling import psnr

    cell.at(TABLE, small.name, "bfloat16")
    both = vaes(small)
    compiled = compile_vae(both.plain, precision="bfloat16")
    for run in (decode, encode):
        got = run(compiled, small)
        assert got.dtype == torch.float32
        assert cell.decibels(psnr(run(both.plain, small), got)) > DECIBELS
    watch.assert_on_devices()


@every_vae
def test_eight_devices(small, watch, cell, eight_devices):
    from tests.native.sampling import relative_error

    cell.at(TABLE, small.name, "8 devices")
    both = vaes(small)
    compiled = compile_vae(both.plain, mesh="auto")
    for run in (decode, encode):
        assert cell.error(relative_error(run(both.plain, small), run(compiled, small))) < TOLERANCE
    watch.assert_on_devices()


@every_vae
def test_compilations(small, watch, cell):
    """A video is decoded a frame at a time: three programs, however long it is."""
    cell.at(TABLE, small.name, "programs to decode")
    compiled = compile_vae(small.build(seed=1))
    decode(compiled, small)
    frames = small.latent[1] if small.is_video else 1
    assert cell.count(len(watch.compiled)) <= min(frames, 3)
    watch.compiled.clear()
    decode(compiled, small)
    assert watch.compiled == []
    decode_tiled(compiled, small)
    # ComfyUI goes over an image three times, with tiles of three shapes; smaller ones at two borders are padded. Over a
    # video once, where each size of tile is a program for each kind of part.
    assert len(watch.compiled) <= (min(frames, 3) * 4 if small.is_video else 3)
    watch.compiled.clear()
    decode_tiled(compiled, small)
    assert watch.compiled == []


@pytest.mark.parametrize("small", [each for each in VAES if not each.is_video], ids=lambda each: each.name)
@pytest.mark.parametrize("sides", [(13, 22), (8, 19), (17, 9)], ids=str)
def test_tiles_of_many_sizes(small, sides, watch):
    """Three programs for all tiles of all images, and what ComfyUI gives for each."""
    from tests.native.sampling import relative_error

    plain = vaes(small).plain
    compiled = compile_vae(small.build())
    scale = 8 // (small.ratio // 8) / 8
    odd = dataclasses.replace(small, latent=(small.latent[0], *(max(2, int(side * scale)) for side in sides)))
    for run in (decode_tiled, encode_tiled):
        expected = run(plain, odd)
        assert relative_error(expected, run(compiled, odd)) < 2e-5
    assert len(watch.compiled) <= 6
    watch.assert_on_devices()


@every_vae
def test_without_the_node_again(small):
    vae = small.build(seed=2)
    runs = (decode, decode_tiled, encode)
    before = [run(vae, small) for run in runs]
    compiled = compile_vae(vae)
    for run in runs:
        run(compiled, small)
    assert all(torch.equal(expected, run(vae, small)) for expected, run in zip(before, runs, strict=True))
    assert compiled.first_stage_model is vae.first_stage_model
    assert compiled is not vae
    assert vae.memory_used_decode(small.latents().shape, torch.float32) > 1


@every_vae
@pytest.mark.parametrize("run", [decode, encode], ids=["decode", "encode"])
def test_out_of_memory_reaches_comfyuis_tiles(small, run, watch, monkeypatch, caplog, cell):
    """What does not fit whole is decoded in tiles, by ComfyUI's own doing."""
    import comfy.model_management

    from comfy_tpu.compiler.program import Program
    from comfy_tpu.errors import device_errors
    from tests.native.sampling import relative_error

    cell.at(TABLE, small.name, "out of memory")
    both = vaes(small)

    # What ComfyUI gives when its own module runs out of memory for anything but tiles.
    run(both.plain, small)  # our patch is off the module now, and ComfyUI's own method an attribute of it
    module = both.plain.first_stage_model
    own = getattr(type(module), run.__name__)
    full = []

    def failing(x, *args, **kwargs):
        if not full:
            full.append(1)
            raise comfy.model_management.OOM_EXCEPTION("simulated")
        return own(module, x, *args, **kwargs)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(module, run.__name__, failing)
        expected = run(both.plain, small)
    assert "retrying with tiled" in caplog.text
    caplog.clear()

    call, failed = Program.__call__, []

    def full_devices(self, *args, **kwargs):
        if not failed:
            failed.append(1)
            with device_errors(self.name):
                raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes")
        return call(self, *args, **kwargs)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Program, "__call__", full_devices)
        got = run(both.compiled, small)
    assert "retrying with tiled" in caplog.text
    assert cell.error(relative_error(expected, got)) < TOLERANCE
    assert watch.calls


@pytest.mark.parametrize("small", [VAES[0]], ids=["Wan_2.1"])
def test_memory_that_runs_out_after_a_call_reaches_comfyuis_tiles(small, watch, monkeypatch, caplog):
    """A call for a frame returns before the frame is computed."""
    from comfy_tpu.compiler import hosted

    to_host, failed = hosted.to_host, []

    def full_devices(results):
        if not failed:
            failed.append(1)
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes")
        return to_host(results)

    monkeypatch.setattr(hosted, "to_host", full_devices)
    with caplog.at_level(logging.WARNING):
        decode(vaes(small).compiled, small)
    assert failed
    assert "retrying with tiled" in caplog.text


@pytest.mark.parametrize("small", [VAES[0]], ids=["Wan_2.1"])
def test_cancel_between_two_frames(small, watch):
    import comfy.model_management

    from comfy_tpu.compiler.hosted import HostedModule
    from tests.native.sampling import relative_error

    both = vaes(small)
    expected = decode(both.plain, small)
    decode(both.compiled, small)
    watch.clear()
    call = HostedModule.__call__

    def pressing(self, *args, **kwargs):
        results = call(self, *args, **kwargs)
        comfy.model_management.interrupt_current_processing()
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostedModule, "__call__", pressing)
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            decode(both.compiled, small)
    assert len(watch.calls) == 1
    assert relative_error(expected, decode(both.compiled, small)) < TOLERANCE


@pytest.mark.parametrize("frames", [1, 2, 4, 5], ids=lambda frames: f"{frames} latent frames")
@pytest.mark.parametrize("small", VAES[:2], ids=["Wan_2.1", "Wan_2.2"])
def test_videos_of_any_length(small, frames, watch):
    import nodes

    from tests.native.sampling import relative_error

    both = vaes(small)
    channels, _, height, width = small.latent
    latent = {"samples": torch.randn(1, channels, frames, height, width)}
    # ComfyUI drops images that are not a whole latent frame.
    images = torch.rand(4 * frames - 2 if frames > 1 else 1, height * small.ratio, width * small.ratio, 3)
    with torch.inference_mode():
        decoded = [nodes.VAEDecode().decode(vae, latent)[0] for vae in (both.plain, both.compiled)]
        encoded = [nodes.VAEEncode().encode(vae, images)[0]["samples"] for vae in (both.plain, both.compiled)]
    assert relative_error(*decoded) < TOLERANCE
    assert relative_error(*encoded) < TOLERANCE
    watch.assert_on_devices()
