"""Configurations with values that cannot be: refused in a sentence, before anything is loaded, and never for long."""

import functools
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from comfy_tpu.cli.main import main
from comfy_tpu.config import RuntimeConfig
from comfy_tpu.errors import CheckpointError, ComfyTpuError
from comfy_tpu.pipeline.model_files import DEMO_DIRECTORIES, SHARED_PARTS_FILE, ModelFiles
from comfy_tpu.pipeline.running_model import RunningModel
from comfy_tpu.pipeline.text import vocabulary_size
from comfy_tpu.pipeline.video import VideoPipeline
from tests.families import small_flux, small_flux2, small_hunyuan, small_hunyuan_image, small_ltx, wan_pipelines
from tests.pipeline import small_pipeline

TRANSFORMER, VAE, TEXT = "transformer/config.json", "vae/config.json", "text_encoder/config.json"
SCHEDULER, TOKENIZER = "scheduler/scheduler_config.json", "tokenizer/tokenizer_config.json"

BAD: tuple[Any, ...] = (None, 0, -1, 10**6, 10**9, "", [], {}, float("nan"), "text")


def copied(source: Path, target: Path) -> Path:
    """A model directory with files of its own, and the weights of the other."""
    for path in source.glob("*/*"):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            shutil.copy(path, place)
        elif path.is_file():
            place.symlink_to(path.resolve())
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    shared = source / SHARED_PARTS_FILE
    for part in json.loads(shared.read_text())["from_parent"] if shared.is_file() else ():
        copy = shutil.copytree if (source.parent / part).is_dir() else shutil.copy
        copy(source.parent / part, target.parent / part)
    return target


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return copied(small_pipeline.directory(), tmp_path / "model")


def changed(directory: Path, file: str, *keys: str, value: Any) -> None:
    path = directory / file
    content = json.loads(path.read_text()) if path.exists() else {}
    inner = functools.reduce(lambda part, key: part[key], keys[:-1], content)
    inner[keys[-1]] = value
    path.write_text(json.dumps(content))


def check(directory: Path) -> None:
    """All that is done with configurations before the first weight is read."""
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"))
    side = max(pipeline.limits.size_min, pipeline.limits.size_multiple)
    frames = 1 if pipeline.limits.frames_max == 1 else 1 + pipeline.limits.frames_multiple
    settings = pipeline.settings(height=side, width=side, num_frames=frames, num_inference_steps=2)
    pipeline.plan(settings)
    pipeline.embedding_shapes(settings)
    pipeline.running.check_components(*pipeline.family.components)


REFUSED: list[tuple[str, str, Any, str]] = [
    (TRANSFORMER, "num_layers", 10**6, r"asks for (more than \d+ weights|weights with more than \d+ numbers), and its"),
    (TRANSFORMER, "num_layers", 10**9, "has num_layers=1000000000, expected 1048576 at most; download"),
    (TRANSFORMER, "num_layers", 0, "has num_layers=0, expected a whole number"),
    (TRANSFORMER, "num_layers", 2, "in the checkpoint, but the model has no place for them: blocks.2"),
    (TRANSFORMER, "num_layers", 4, "missing from the checkpoint: blocks.3"),
    (TRANSFORMER, "num_layers", None, "has num_layers=None, expected a whole number"),
    (TRANSFORMER, "attention_head_dim", 0, "has attention_head_dim=0, expected a whole number"),
    (TRANSFORMER, "attention_head_dim", 10**6, r"asks for (a table of shape|weights with more than)"),
    (TRANSFORMER, "attention_head_dim", 10**9, r"asks for a table of shape \(\d+,\), which no known model has"),
    (TRANSFORMER, "num_attention_heads", "8", "has num_attention_heads='8', expected a whole number"),
    (TRANSFORMER, "ffn_dim", 10**9, r"asks for weights with more than \d+ numbers, and its checkpoint has \d+"),
    (TRANSFORMER, "ffn_dim", 10**18, r"the config.json of the transformer cannot be used \(\w+Error"),
    (TRANSFORMER, "ffn_dim", 10**30, "expected 18446744073709551615 at most"),
    (TRANSFORMER, "rope_max_seq_len", 10**9, r"asks for a table of shape \(1000000000,\)"),
    (TRANSFORMER, "rope_max_seq_len", -1, r"transformer cannot be used \(RuntimeError: upper bound and lower bound"),
    (TRANSFORMER, "patch_size", [2, 2], r"has patch_size=\[2, 2\], expected 3 whole numbers"),
    (TRANSFORMER, "patch_size", [1, 0, 2], r"has patch_size=\[1, 0, 2\], expected 3 whole numbers"),
    (TRANSFORMER, "patch_size", 2, "has patch_size=2, expected 3 whole numbers"),
    (TRANSFORMER, "patch_size", None, "has patch_size=None, expected 3 whole numbers"),
    (TRANSFORMER, "eps", "text", "WanTransformer3DModel has eps='text', expected a value such as 1e-06; download"),
    (TRANSFORMER, "eps", None, "WanTransformer3DModel has eps=None, expected a value such as 1e-06; download"),
    (TRANSFORMER, "eps", float("nan"), "transformer.config.json: eps=nan is not a number; download the model again"),
    (TRANSFORMER, "cross_attn_norm", [], r"WanTransformer3DModel has cross_attn_norm=\[\], expected a value such as"),
    (TRANSFORMER, "qk_norm", 5, "WanTransformer3DModel has qk_norm=5, expected a value such as"),
    (TRANSFORMER, "_class_name", "Other", r"describes a Other, expected WanTransformer3DModel"),
    (TRANSFORMER, "text_dim", "wide", "has text_dim='wide', expected a whole number"),
    (VAE, "z_dim", 10**9, "describes latents of 1000000000 channels, expected 1 to 65536"),
    (VAE, "z_dim", 0, "describes latents of 0 channels, expected 1 to 65536"),
    (VAE, "z_dim", None, "AutoencoderKLWan has z_dim=None, expected a value such as 16; download"),
    (VAE, "z_dim", 5, "4 means and 4 deviations for latents of 5 channels"),
    (VAE, "latents_mean", None, "AutoencoderKLWan has latents_mean=None, expected a value such as"),
    (VAE, "latents_mean", [0.0], "1 means and 4 deviations for latents of 4 channels"),
    (VAE, "latents_std", [1.0, 1.0, 1.0, 0.0], "a deviation 0"),
    (VAE, "latents_std", [1.0, 1.0, 1.0, float("nan")], "a mean or deviation of the latents is infinite"),
    (VAE, "base_dim", 0, "the config.json of the vae cannot be used|does not fit the model"),
    (VAE, "base_dim", 10**6, r"the config.json of the vae asks for weights with more than \d+ numbers"),
    (VAE, "num_res_blocks", 10**6, r"the config.json of the vae asks for (more than|weights with more)"),
    (VAE, "dim_mult", [], r"the config.json of the vae cannot be used \(\w+Error"),
    (VAE, "temperal_downsample", [True], "the config.json of the vae cannot be used|does not fit the model"),
    (VAE, "dropout", "much", "AutoencoderKLWan has dropout='much', expected a value such as 0.0"),
    (TEXT, "d_model", 10**9, r"the config.json of the text_encoder (asks for weights|cannot be used)"),
    (TEXT, "vocab_size", -1, r"the config.json of the text_encoder cannot be used \(RuntimeError"),
    (TEXT, "num_layers", 10**6, r"the config.json of the text_encoder asks for (more than|weights with more)"),
    (TEXT, "num_heads", None, r"text_encoder.config.json cannot be used \(.*'num_heads' expected int, got"),
    (TEXT, "num_heads", True, r"text_encoder.config.json cannot be used \(.*'num_heads' expected int, got"),
    (TEXT, "dense_act_fn", "text", r"the config.json of the text_encoder cannot be used \(\w+"),
    (TOKENIZER, "tokenizer_class", 5, "names the tokenizer 5, which transformers .* does not know; upgrade"),
    (TEXT, "architectures", 5, r"text_encoder.config.json cannot be used \(TypeError"),
    ("model_index.json", "boundary_ratio", "half", "has boundary_ratio='half', expected a number; download"),
    ("generation.json", "height", None, "height=None is not a whole number; download the model again"),
    ("generation.json", "num_frames", 10**9, "expected 1048576 at most"),
    ("generation.json", "num_inference_steps", 0, "num_inference_steps=0 is not allowed"),
    ("generation.json", "guidance_scale", float("nan"), "guidance_scale=nan is not a number"),
    ("generation.json", "scheduler", {}, "scheduler={} is unknown; choose from unipc"),
    ("generation.json", "negative_prompt", 5, "negative_prompt is a int, expected text"),
]


@pytest.mark.parametrize(
    ("file", "key", "value", "text"), REFUSED, ids=[f"{file} {key}={value}" for file, key, value, _ in REFUSED]
)
def test_a_value_that_cannot_be_is_refused(file: str, key: str, value: Any, text: str, directory: Path) -> None:
    changed(directory, file, key, value=value)
    with pytest.raises(ComfyTpuError, match=text):
        check(directory)


def test_nothing_is_left_out_of_a_configuration_without_a_word(directory: Path) -> None:
    path = directory / TEXT
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "num_heads"}))
    with pytest.raises(CheckpointError, match="has num_heads=None, expected a whole number from 1"):
        check(directory)


def test_what_is_wrong_with_the_vae_is_found_before_the_text_is_encoded(directory: Path) -> None:
    changed(directory, VAE, "num_res_blocks", value=3)
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"))
    settings = pipeline.settings(height=16, width=16, num_frames=5, num_inference_steps=1)
    seen: list[object] = []
    pipeline.on_progress = seen.append
    with pytest.raises(CheckpointError, match=r"^model=.*vae does not fit the model"):
        pipeline.encode("a red circle", settings)
    assert seen == []


@pytest.mark.parametrize(
    ("file", "key", "value", "text"),
    [
        (
            TOKENIZER,
            "pad_token",
            None,
            r"the tokenizer of model=.* cannot be used \(ValueError",
        ),
        (TOKENIZER, "model_max_length", [], r"the tokenizer of model=.* cannot be used \(Type"),
        (TEXT, "vocab_size", 3, "gives token [0-9]+, and its text_encoder knows 3: they do not belong together"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(
    file: str, key: str, value: Any, text: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(directory, file, key, value=value)
    monkeypatch.setattr(RunningModel, "check_components", lambda self, *specs: None)
    pipeline = VideoPipeline.open(directory, RuntimeConfig(mesh="single"))
    with pytest.raises(CheckpointError, match=text):
        pipeline.encode_text("a red circle", pipeline.settings(height=16, width=16, num_frames=5))


def test_the_vocabulary_is_that_of_the_part_for_text() -> None:
    """Qwen2.5-VL's configuration names it twice, and a small model's differs in that part only."""
    assert vocabulary_size({"vocab_size": 152064, "text_config": {"vocab_size": 384}}) == 384
    assert vocabulary_size({"vocab_size": 384, "text_config": {"hidden_size": 48}}) == 384
    assert vocabulary_size({"vocab_size": 384}) == 384
    assert vocabulary_size({}) is None


def test_a_value_that_only_the_trace_meets_is_one_sentence(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(directory, TEXT, "relative_attention_max_distance", value=0)
    monkeypatch.chdir(directory)
    assert main(["generate", "a red circle", "--model", str(directory), "--mesh", "single"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"comfy-tpu: --model {directory}: the text_encoder cannot be run as its config.json describes it (ValueError: "
        "math domain error); download the model again, or report it with that file; see docs/porting.md#trace"
    )


@pytest.mark.parametrize(
    ("file", "key", "value", "text"),
    [
        (TRANSFORMER, "num_layers", 10**6, "asks for more than 8192 weights, which no known model has"),
        (TRANSFORMER, "rope_max_seq_len", 10**9, "asks for a table of shape (1000000000,), which no known model has"),
        (TRANSFORMER, "num_layers", 10**9, "has num_layers=1000000000, expected 1048576 at most"),
        (TRANSFORMER, "patch_size", [2], "has patch_size=[2], expected 3 whole numbers"),
        (VAE, "z_dim", "text", "has z_dim='text', expected a value such as 16"),
    ],
)
def test_a_plan_has_limits_without_a_checkpoint(
    file: str, key: str, value: Any, text: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in directory.rglob("*.safetensors"):
        path.unlink()
    changed(directory, file, key, value=value)
    assert main(["plan", str(directory), "--tpu", "v6e-1", "--size", "48x48x5", "--no-compile"]) == 1
    assert text in capsys.readouterr().err


SMALL: dict[str, Callable[[], Path]] = {
    "demo": lambda: DEMO_DIRECTORIES["demo"],
    "demo-image": lambda: DEMO_DIRECTORIES["demo-image"],
    "wan 5B": lambda: wan_pipelines.directory("5B"),
    "flux": lambda: small_flux.directory("dev"),
    "flux2": lambda: small_flux2.directory("klein"),
    "hunyuan": small_hunyuan.directory,
    "hunyuan image": small_hunyuan_image.directory,
    "ltx": small_ltx.directory,
}


def paths(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in content.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in paths(value))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", SMALL)
def test_every_value_of_every_configuration(family: str, tmp_path: Path) -> None:
    """Each either does no harm or is refused by an error of ours. The time limit of the test is that of all of them."""
    directory = copied(SMALL[family](), tmp_path / "model")
    check(directory)
    components = [spec.name for spec in ModelFiles.open(directory).family.components]
    files = [*(f"{name}/config.json" for name in components), SCHEDULER, "model_index.json"]
    files = [file for file in files if (directory / file).is_file()]  # of demo-image, the others are demo's
    problems, refused = [], 0
    for file in files:
        original = (directory / file).read_text()
        for keys, value in itertools.product(paths(json.loads(original)), BAD):
            changed(directory, file, *keys, value=value)
            try:
                check(directory)
            except ComfyTpuError:
                refused += 1
            except Exception as error:  # noqa: BLE001 - what is looked for
                problems.append(f"{file} {keys} {value!r}: {type(error).__name__}: {error}")
            (directory / file).write_text(original)
    assert problems == []
    assert refused > 100
