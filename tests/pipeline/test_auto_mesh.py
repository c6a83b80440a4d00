"""`--mesh auto` is the first of the ranking where the devices are TPUs that the table knows."""

from comfy_tpu.config import MeshSizes, RuntimeConfig
from comfy_tpu.parallel import mesh
from comfy_tpu.parallel.chips import parse_slice
from comfy_tpu.parallel.layouts import rank_layouts
from comfy_tpu.pipeline.model_files import ModelFiles
from comfy_tpu.pipeline.video import VideoPipeline


def test_a_pipeline_ranks_layouts_for_its_model(monkeypatch):
    monkeypatch.setattr(mesh, "chip_name", lambda device: "v6e")
    files = ModelFiles.open("demo")
    work = files.workload(files.defaults)
    best = rank_layouts(work, parse_slice("v6e-8"))[0].sizes
    assert best != MeshSizes(dp=2, sp=4), "or this test could not tell it from the fixed preference"
    assert VideoPipeline.open("demo", RuntimeConfig(platform="cpu")).placement.sizes == best


def test_elsewhere_the_preference_is_fixed():
    assert VideoPipeline.open("demo", RuntimeConfig(platform="cpu")).placement.sizes == MeshSizes(dp=2, sp=4)
