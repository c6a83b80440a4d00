"""Components: what a family says becomes a plan, slots and programs on the mesh."""

import dataclasses
import re
import warnings

import jax
import pytest
import torch
from jax.sharding import PartitionSpec

from comfy_tpu.compiler.checkpoint import Checkpoint
from comfy_tpu.compiler.component import Component
from comfy_tpu.compiler.residency import Residency, ResidencyEvent
from comfy_tpu.config import ResidencyConfig, RuntimeConfig, ShardingConfig
from comfy_tpu.errors import InvalidValueError, MeshError, UnsupportedError
from comfy_tpu.families.wan.text import TEXT_ENCODER
from comfy_tpu.parallel.constraints import even_batch_spec, even_spec
from comfy_tpu.parallel.mesh import make_placement
from comfy_tpu.pipeline.video import VideoPipeline
from tests.parity import small_models
from tests.parity.test_wan_components import transformer_case
from tests.pipeline import small_pipeline

EVERYTHING = ShardingConfig(gather_min_bytes=0)


def component(mesh: str, dtype: torch.dtype = torch.float32) -> Component:
    model = small_models.transformer()
    return Component(model.spec, model.config, make_placement(mesh), dtype=dtype, sharding=EVERYTHING)


def compiled_text(mesh: str) -> tuple[str, str]:
    made = component(mesh)
    inputs, _ = transformer_case()
    lowered = made.program(static=("return_dict",)).lower(made.abstract_weights(), **inputs, return_dict=False)
    return lowered.as_text(), lowered.compile().as_text()


def test_weights_are_gathered_layer_by_layer_and_tokens_stay_split() -> None:
    lowered, compiled = compiled_text("dp=2,sp=4")
    # The carry of the scan, [batch, tokens, features], is asked to stay split over dp and sp.
    assert re.search(r'sharding_constraint.*\[\{"dp".*\{"sp".*tensor<2x45x96xf32>', lowered)
    body = compiled[compiled.index("%region") :]
    assert "all-gather" in body
    gathered = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]\S* all-gather", compiled)}
    assert not [shape for shape in gathered if shape[0] == 3 and len(shape) == 3], "never all three layers at once"


def test_columns_stay_split_while_they_compute() -> None:
    _, compiled = compiled_text("tp=8")
    assert "all-reduce" in compiled, "the sum over the parts of a row-parallel product"


def test_float32_weights_stay_float32() -> None:
    dtypes = {slot.name: slot.dtype.name for slot in component("single", torch.bfloat16).slots}
    assert dtypes["condition_embedder.time_embedder.linear_1.weight"] == "float32"
    assert dtypes["scale_shift_table"] == dtypes["blocks.*.scale_shift_table"] == "float32"
    assert dtypes["blocks.*.norm2.weight"] == "float32"
    assert dtypes["blocks.*.attn1.to_q.weight"] == dtypes["blocks.*.attn1.norm_q.weight"] == "bfloat16"


def test_heads_that_do_not_divide_are_refused_before_anything_is_built() -> None:
    model = small_models.transformer()
    config = {**model.config, "num_attention_heads": 6, "attention_head_dim": 16}
    with pytest.raises(MeshError, match="heads=6 is not divisible by tp=4; choose tp from 1, 2, 3, 6$"):
        Component(model.spec, config, make_placement("tp=4"), dtype=torch.float32)
    with pytest.raises(MeshError, match="heads=8 is not divisible by tp=5; choose tp from 1, 2, 4, 8$"):
        Component(model.spec, model.config, make_placement("tp=5"), dtype=torch.float32)


def test_an_image_to_video_transformer_is_refused() -> None:
    model = small_models.transformer()
    text = "takes image embeddings, but the model says that it is a text-to-video one"
    with pytest.raises(UnsupportedError, match=text):
        Component(model.spec, {**model.config, "image_dim": 8}, make_placement("single"), dtype=torch.float32)


def test_a_library_that_cannot_be_imported_is_explained_by_its_first_failure() -> None:
    def build(config: object) -> torch.nn.Module:
        try:
            raise RuntimeError("PyTorch and TorchAudio were compiled with different CUDA versions")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'UMT5EncoderModel'") from error

    spec = dataclasses.replace(TEXT_ENCODER, build=build, heads=None)
    with pytest.raises(UnsupportedError, match="text_encoder cannot be imported here .*different CUDA versions"):
        Component(spec, {}, make_placement("single"), dtype=torch.float32)


def test_libraries_that_change_how_warnings_are_filtered() -> None:
    """As accelerate does when diffusers imports it, in the middle of somebody else's process."""

    def build(config: object) -> torch.nn.Module:
        warnings.filterwarnings("ignore", module="somebody")
        raise UnsupportedError("as far as this")

    before = list(warnings.filters)
    spec = dataclasses.replace(TEXT_ENCODER, build=build, heads=None)
    with pytest.raises(UnsupportedError, match="as far as this"):
        Component(spec, {}, make_placement("single"), dtype=torch.float32)
    assert list(warnings.filters) == before


def test_a_dtype_that_is_no_float_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="dtype=torch.int32 is not a floating dtype"):
        component("single", torch.int32)


def test_loading_twice_gives_the_same_bytes_that_the_slots_announce() -> None:
    made = component("dp=2,sp=4")
    weights = made.load(Checkpoint.open(small_models.transformer().checkpoint))
    for slot in made.slots:
        shards = {shard.device: shard.data.nbytes for shard in weights[slot.name].addressable_shards}
        assert set(shards.values()) == {slot.bytes_per_device}


def test_batches_and_sizes_that_do_not_divide() -> None:
    placement = make_placement("dp=2,sp=4")
    axes = ("dp", "sp", None)
    assert even_batch_spec(axes, (2, 7, 3), placement) == PartitionSpec("dp", "sp", None)
    assert even_batch_spec(axes, (1, 7, 3), placement) == PartitionSpec(None, "sp", None)
    assert even_spec(axes, (2, 7, 3), placement) == PartitionSpec("dp", None, None)
    assert even_spec((None, ("dp", "sp")), (3, 16), placement) == PartitionSpec(None, ("dp", "sp"))


def test_models_that_do_not_fit_together_take_turns() -> None:
    """The pipeline on devices that hold one component at a time: each leaves for the next and comes back."""
    probe = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"))
    sizes = [
        sum(slot.bytes_per_device for slot in probe.running.component(spec).slots) for spec in probe.family.components
    ]
    registry = Residency(ResidencyConfig(budget_bytes=max(sizes)))
    events: list[ResidencyEvent] = []
    registry.add_callback(events.append)
    pipeline = VideoPipeline.open(small_pipeline.directory(), RuntimeConfig(mesh="single"), residency=registry)
    settings = pipeline.settings(
        height=32, width=32, num_frames=1, num_inference_steps=1, guidance_scale=1.0, max_sequence_length=16
    )
    videos = [torch.cat(list(pipeline.generate("a red circle", settings)), dim=1) for _ in range(2)]
    assert torch.equal(*videos)
    loads = [event.entry.label.split()[-1] for event in events if event.kind == "loaded"]
    assert loads == ["text_encoder", "transformer", "vae"] * 2
    assert [event.kind for event in events].count("evicted") >= 4
    (held,) = registry.entries()
    assert held.bytes_per_device == sizes[-1]
    assert registry.bytes_per_device() == {jax.devices()[0]: sizes[-1]}
