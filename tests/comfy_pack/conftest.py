import pytest

from tests.comfy_pack.loading import load_pack


@pytest.fixture(scope="session")
def pack(tmp_path_factory):
    """The pack with two models in ComfyUI's folders, and with what is none."""
    models = tmp_path_factory.mktemp("models")
    for name, content in {
        "mine": '{"_class_name": "WanPipeline"}',
        "owner/theirs": '{"_class_name": "WanPipeline"}',
        "pair": '{"_class_name": "WanPipeline", "boundary_ratio": 0.875}',
        "small klein": '{"_class_name": "Flux2KleinPipeline", "is_distilled": true}',
        "picture": '{"_class_name": "StableDiffusionPipeline"}',
        "broken": "{",
        "deep": "[" * 100_000,
        "demo": '{"_class_name": "WanPipeline"}',
        "demo-image": '{"_class_name": "WanImageToVideoPipeline"}',
    }.items():
        directory = models / "diffusers" / name
        directory.mkdir(parents=True)
        (directory / "model_index.json").write_text(content)
    return load_pack(models)


@pytest.fixture(scope="session")
def nodes(pack):
    return pack["nodes"]
