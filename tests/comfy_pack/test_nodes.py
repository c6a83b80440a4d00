"""What the pack declares to ComfyUI, against the specification, which is written out here. Needs no ComfyUI."""

import ast

import pytest

from comfy_tpu.families.registry import family_cards
from tests.comfy_pack.loading import ROOT, load_pack
from tools.pages.facts import KINDS

HUB = [
    "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers",
]
HUB_22 = [
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
]
PROMPTS = [
    ("prompt", "STRING", {"multiline": True}),
    ("negative_prompt", "STRING", {"multiline": True, "default": ""}),
]
EMBEDS = [("prompt_embeds", "CONDITIONING", {}), ("negative_prompt_embeds", "CONDITIONING", {})]
SAMPLING = [
    ("height", "INT", {"default": 720, "min": 256, "max": 1280, "step": 16}),
    ("width", "INT", {"default": 1280, "min": 256, "max": 1280, "step": 16}),
    ("num_frames", "INT", {"default": 81, "min": 17, "max": 121, "step": 4}),
    ("num_inference_steps", "INT", {"default": 50, "min": 1, "max": 100}),
    ("guidance_scale", "FLOAT", {"default": 5.0, "min": 0, "max": 20, "step": 0.1}),
    ("seed", "INT", {"default": 2025, "min": 0, "max": 2**64 - 1, "control_after_generate": True}),
    ("flow_shift", "FLOAT", {"default": 5.0, "min": 1, "max": 10, "step": 0.1}),
]
SAMPLING_22 = [
    *SAMPLING[:3],
    ("num_inference_steps", "INT", {"default": 40, "min": 1, "max": 100}),
    ("guidance_scale", "FLOAT", {"default": 4.0, "min": 0, "max": 20, "step": 0.1}),
    ("guidance_scale_2", "FLOAT", {"default": 3.0, "min": 0, "max": 20, "step": 0.1}),
    SAMPLING[5],
    ("flow_shift", "FLOAT", {"default": 12.0, "min": 1, "max": 20, "step": 0.1}),
]
FPS = ("fps", "INT", {"default": 16, "min": 1, "max": 240})
MODEL = ("model_id", "COMBO", {"default": HUB[0], "options": [*HUB, "demo", "demo-image", "mine", "owner/theirs"]})
MODEL_22 = ("model_id", "COMBO", {"default": HUB_22[0], "options": [*HUB_22, "pair"]})
LAST = ("last_image", "IMAGE", {"optional": True})
IMAGE_INPUTS = [("image", "IMAGE", {"optional": True}), LAST]
EMBEDDED = ("image_embeds", "TPU_IMAGE_EMBEDS", {"optional": True})
SCHEDULER = (
    "scheduler",
    "COMBO",
    {"default": "unipc", "options": ["unipc", "euler", "dpm++", "euler-trailing"], "optional": True},
)
START = [
    ("initial_latents", "LATENT", {"optional": True}),
    ("strength", "FLOAT", {"default": 0.5, "min": 0.01, "max": 1, "step": 0.01, "optional": True}),
]
LORA = ("lora", "TPU_LORA", {"optional": True})
PIPELINE = ("pipeline", "TPU_PIPELINE", {"optional": True})
FILE = {"default": "none", "options": ["none", "a_model.safetensors"]}
OPTIONS = ("options", "TPU_OPTIONS", {"optional": True})
SERVER = ("server", "TPU_SERVER", {"optional": True})
FRAMES = [("frames", "IMAGE"), ("fps", "FLOAT"), ("video", "VIDEO")]

PRESETS = ["none", "auto", "4step", "8step", "causvid", "turbo", "16step"]
CHOICES = [
    ("mesh", "COMBO", {"default": "auto", "options": ["auto", "single", "seed"]}),
    ("precision", "COMBO", {"default": "auto", "options": ["auto", "bfloat16", "float32"]}),
    ("attention", "COMBO", {"default": "auto", "options": ["auto", "splash", "hopper", "cudnn", "chunked", "int8"]}),
]

FLUX = ["black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.1-schnell"]
FLUX_SAMPLING = [
    ("height", "INT", {"default": 1024, "min": 256, "max": 2048, "step": 16}),
    ("width", "INT", {"default": 1024, "min": 256, "max": 2048, "step": 16}),
    ("num_inference_steps", "INT", {"default": 28, "min": 1, "max": 100}),
    ("guidance_scale", "FLOAT", {"default": 3.5, "min": 0, "max": 20, "step": 0.1}),
    SAMPLING[5],
]
FLUX_MODEL = ("model_id", "COMBO", {"default": FLUX[0], "options": FLUX})
EULER = ("scheduler", "COMBO", {"default": "euler", "options": ["euler", "unipc", "dpm++"], "optional": True})
STRENGTH = ("strength", "FLOAT", {"default": 0.6, "min": 0.01, "max": 1, "step": 0.01, "optional": True})
IMAGES = [("images", "IMAGE")]
FLUX2 = [
    "black-forest-labs/FLUX.2-dev",
    "black-forest-labs/FLUX.2-klein-4B",
    "black-forest-labs/FLUX.2-klein-9B",
    "black-forest-labs/FLUX.2-klein-base-4B",
    "black-forest-labs/FLUX.2-klein-base-9B",
]
FLUX2_SAMPLING = [
    *FLUX_SAMPLING[:2],
    SAMPLING[3],
    ("guidance_scale", "FLOAT", {"default": 4.0, "min": 0, "max": 20, "step": 0.1}),
    SAMPLING[5],
]
FLUX2_MODEL = ("model_id", "COMBO", {"default": FLUX2[0], "options": [*FLUX2, "small klein"]})
REFERENCES = [(name, "IMAGE", {"optional": True}) for name in ("image", "image_2", "image_3", "image_4")]
HUNYUAN = [
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_i2v",
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
]
HUNYUAN_SAMPLING = [
    *SAMPLING[:2],
    ("num_frames", "INT", {"default": 121, "min": 17, "max": 121, "step": 4}),
    SAMPLING[3],
    ("guidance_scale", "FLOAT", {"default": 6.0, "min": 0, "max": 20, "step": 0.1}),
    SAMPLING[5],
    ("flow_shift", "FLOAT", {"default": 9.0, "min": 1, "max": 20, "step": 0.1}),
]
HUNYUAN_MODEL = ("model_id", "COMBO", {"default": HUNYUAN[0], "options": HUNYUAN})
HUNYUAN_FPS = ("fps", "INT", {"default": 24, "min": 1, "max": 240})
LTX_SAMPLING = [
    ("height", "INT", {"default": 512, "min": 256, "max": 1280, "step": 32}),
    ("width", "INT", {"default": 704, "min": 256, "max": 1280, "step": 32}),
    ("num_frames", "INT", {"default": 161, "min": 17, "max": 257, "step": 8}),
    SAMPLING[3],
    ("guidance_scale", "FLOAT", {"default": 3.0, "min": 0, "max": 20, "step": 0.1}),
    SAMPLING[5],
    ("flow_shift", "FLOAT", {"default": 1.0, "min": 1, "max": 10, "step": 0.1}),
]
LTX_MODEL = ("model_id", "COMBO", {"default": "Lightricks/LTX-Video", "options": ["Lightricks/LTX-Video"]})
LTX_FPS = ("fps", "INT", {"default": 25, "min": 1, "max": 240})
BOTH = [("prompt_embeds", "CONDITIONING"), ("negative_prompt_embeds", "CONDITIONING")]

# id: shown as, category, inputs, outputs
SPECIFIED = {
    **{
        f"{key}{kind}": (f"{name} {shown}", category, inputs, outputs)
        for key, name, category, sampling, model in (
            ("Wan21", "Wan 2.1", "TPU/Wan2.1", SAMPLING, MODEL),
            ("Wan22", "Wan 2.2", "TPU/Wan2.2", SAMPLING_22, MODEL_22),
        )
        for kind, shown, inputs, outputs in (
            (
                "TextEncoder",
                "Text Encoder (TPU)",
                [*PROMPTS, model],
                [("prompt_embeds", "CONDITIONING"), ("negative_prompt_embeds", "CONDITIONING")],
            ),
            (
                "ImageEncoder",
                "Image Encoder (TPU)",
                [("image", "IMAGE", {}), *sampling[:3], model, LAST],
                [("image_embeds", "TPU_IMAGE_EMBEDS")],
            ),
            (
                "TPUSampler",
                "TPU Sampler",
                [*EMBEDS, *sampling, model, SCHEDULER, LORA, EMBEDDED, *START],
                [("latents", "LATENT"), ("num_frames", "INT")],
            ),
            ("TPUVAEDecoder", "TPU VAE Decoder", [("latents", "LATENT", {}), FPS, model], FRAMES),
            (
                "TPUPipeline",
                "TPU Full Pipeline",
                [*PROMPTS, *sampling, FPS, model, SCHEDULER, LORA, *IMAGE_INPUTS],
                FRAMES,
            ),
        )
    },
    "FluxTextEncoder": ("Flux Text Encoder (TPU)", "TPU/Flux", [PROMPTS[0], FLUX_MODEL], BOTH[:1]),
    "FluxTPUSampler": (
        "Flux TPU Sampler",
        "TPU/Flux",
        [EMBEDS[0], *FLUX_SAMPLING, FLUX_MODEL, EULER, LORA, *START],
        [("latents", "LATENT")],
    ),
    "FluxTPUVAEDecoder": ("Flux TPU VAE Decoder", "TPU/Flux", [("latents", "LATENT", {}), FLUX_MODEL], IMAGES),
    "FluxTPUPipeline": (
        "Flux TPU Full Pipeline",
        "TPU/Flux",
        [PROMPTS[0], *FLUX_SAMPLING, FLUX_MODEL, EULER, LORA, IMAGE_INPUTS[0], STRENGTH],
        IMAGES,
    ),
    "Flux2TextEncoder": ("Flux.2 Text Encoder (TPU)", "TPU/Flux", [*PROMPTS, FLUX2_MODEL], BOTH),
    "Flux2ImageEncoder": (
        "Flux.2 Image Encoder (TPU)",
        "TPU/Flux",
        [("image", "IMAGE", {}), FLUX2_MODEL, *REFERENCES[1:]],
        [("image_embeds", "TPU_IMAGE_EMBEDS")],
    ),
    "Flux2TPUSampler": (
        "Flux.2 TPU Sampler",
        "TPU/Flux",
        [*EMBEDS, *FLUX2_SAMPLING, FLUX2_MODEL, EULER, LORA, EMBEDDED, *START],
        [("latents", "LATENT")],
    ),
    "Flux2TPUVAEDecoder": ("Flux.2 TPU VAE Decoder", "TPU/Flux", [("latents", "LATENT", {}), FLUX2_MODEL], IMAGES),
    "Flux2TPUPipeline": (
        "Flux.2 TPU Full Pipeline",
        "TPU/Flux",
        [*PROMPTS, *FLUX2_SAMPLING, FLUX2_MODEL, EULER, LORA, *REFERENCES],
        IMAGES,
    ),
    "HunyuanVideo15TextEncoder": (
        "HunyuanVideo 1.5 Text Encoder (TPU)",
        "TPU/HunyuanVideo",
        [*PROMPTS, HUNYUAN_MODEL],
        BOTH,
    ),
    "HunyuanVideo15ImageEncoder": (
        "HunyuanVideo 1.5 Image Encoder (TPU)",
        "TPU/HunyuanVideo",
        [("image", "IMAGE", {}), *HUNYUAN_SAMPLING[:3], HUNYUAN_MODEL],
        [("image_embeds", "TPU_IMAGE_EMBEDS")],
    ),
    "HunyuanVideo15TPUSampler": (
        "HunyuanVideo 1.5 TPU Sampler",
        "TPU/HunyuanVideo",
        [*EMBEDS, *HUNYUAN_SAMPLING, HUNYUAN_MODEL, EULER, LORA, EMBEDDED, *START],
        [("latents", "LATENT"), ("num_frames", "INT")],
    ),
    "HunyuanVideo15TPUVAEDecoder": (
        "HunyuanVideo 1.5 TPU VAE Decoder",
        "TPU/HunyuanVideo",
        [("latents", "LATENT", {}), HUNYUAN_FPS, HUNYUAN_MODEL],
        FRAMES,
    ),
    "HunyuanVideo15TPUPipeline": (
        "HunyuanVideo 1.5 TPU Full Pipeline",
        "TPU/HunyuanVideo",
        [*PROMPTS, *HUNYUAN_SAMPLING, HUNYUAN_FPS, HUNYUAN_MODEL, EULER, LORA, IMAGE_INPUTS[0]],
        FRAMES,
    ),
    "LTXVideoTextEncoder": ("LTX-Video Text Encoder (TPU)", "TPU/LTX-Video", [*PROMPTS, LTX_MODEL], BOTH),
    "LTXVideoImageEncoder": (
        "LTX-Video Image Encoder (TPU)",
        "TPU/LTX-Video",
        [("image", "IMAGE", {}), *LTX_SAMPLING[:3], LTX_MODEL],
        [("image_embeds", "TPU_IMAGE_EMBEDS")],
    ),
    "LTXVideoTPUSampler": (
        "LTX-Video TPU Sampler",
        "TPU/LTX-Video",
        [*EMBEDS, *LTX_SAMPLING, LTX_FPS, LTX_MODEL, EULER, LORA, EMBEDDED, *START],
        [("latents", "LATENT"), ("num_frames", "INT")],
    ),
    "LTXVideoTPUVAEDecoder": (
        "LTX-Video TPU VAE Decoder",
        "TPU/LTX-Video",
        [("latents", "LATENT", {}), LTX_FPS, LTX_MODEL],
        FRAMES,
    ),
    "LTXVideoTPUPipeline": (
        "LTX-Video TPU Full Pipeline",
        "TPU/LTX-Video",
        [*PROMPTS, *LTX_SAMPLING, LTX_FPS, LTX_MODEL, EULER, LORA, IMAGE_INPUTS[0]],
        FRAMES,
    ),
    "TPULoraLoader": (
        "TPU Load LoRA",
        "TPU",
        [
            ("lora_name", "COMBO", {}),
            ("strength", "FLOAT", {"default": 1.0, "min": -100, "max": 100, "step": 0.01}),
            ("previous_lora", "TPU_LORA", {"optional": True}),
            ("noise", "COMBO", {"default": "all", "options": ["all", "high", "low", "auto"], "optional": True}),
        ],
        [("lora", "TPU_LORA")],
    ),
    "TPULoadPipeline": (
        "TPU Load Pipeline",
        "TPU",
        [
            *((name, "COMBO", FILE) for name in ("transformer", "text_encoder", "vae")),
            ("base_model", "COMBO", {"default": "auto"}),
            *(
                (name, "COMBO", {**FILE, "optional": True})
                for name in ("transformer_2", "text_encoder_2", "image_encoder")
            ),
        ],
        [("pipeline", "TPU_PIPELINE")],
    ),
    "TPUOptions": (
        "TPU Options",
        "TPU",
        [
            ("mesh", "STRING", {"default": "auto"}),
            ("dtype", "COMBO", {"default": "auto", "options": ["auto", "bfloat16", "float32"]}),
            ("quantize", "COMBO", {"default": "none", "options": ["none", "fp8", "int8"]}),
            ("vae_backend", "COMBO", {"default": "torchax", "options": ["torchax", "nnx", "tiny"]}),
            ("reuse", "FLOAT", {"default": 0.0, "min": 0, "max": 1, "step": 0.01}),
            ("guidance_until", "FLOAT", {"default": 1.0, "min": 0, "max": 1, "step": 0.05}),
            ("num_videos", "INT", {"default": 1, "min": 1, "max": 16}),
            CHOICES[2],
            ("attention_window", "STRING", {"default": "full"}),
            ("attention_blocks", "STRING", {"default": "auto"}),
            ("dense_max_tokens", "INT", {"default": 4096, "min": 1, "max": 65536}),
            ("fast", "BOOLEAN", {"default": False, "optional": True}),
            ("context", "COMBO", {"default": "auto", "optional": True}),
            ("context_frames", "INT", {"default": 0, "min": 0, "max": 1025, "optional": True}),
            ("context_overlap", "INT", {"default": -1, "min": -1, "max": 1024, "optional": True}),
            ("context_weights", "COMBO", {"default": "pyramid", "optional": True}),
            ("context_stride", "INT", {"default": 1, "min": 1, "max": 16, "optional": True}),
            ("context_noise", "COMBO", {"default": "random", "optional": True}),
            ("preset", "COMBO", {"default": "none", "optional": True, "options": PRESETS}),
            ("tiny_vae", "COMBO", {"default": "none", "optional": True}),
            ("context_keyframes", "FLOAT", {"default": 0.0, "min": 0.0, "max": 1.0, "optional": True}),
            ("tile", "STRING", {"default": "", "optional": True}),
            ("tile_overlap", "FLOAT", {"default": 0.25, "min": 0.0, "max": 0.75, "optional": True}),
            ("cpu_fallback", "BOOLEAN", {"default": False, "optional": True}),
            ("allow_download", "BOOLEAN", {"default": False, "optional": True}),
            ("ignore_config_keys", "STRING", {"default": "", "optional": True}),
        ],
        [("options", "TPU_OPTIONS")],
    ),
    "TPUServer": (
        "TPU Server",
        "TPU",
        [
            ("address", "STRING", {"default": "http://127.0.0.1:8000"}),
            ("wait_seconds", "FLOAT", {"default": 60.0, "min": 0, "max": 86400, "step": 1}),
        ],
        [("server", "TPU_SERVER")],
    ),
    "TPUCompileModel": ("TPU Compile Model", "TPU", [("model", "MODEL", {}), *CHOICES], [("model", "MODEL")]),
    "TPUCompileVAE": ("TPU Compile VAE", "TPU", [("vae", "VAE", {}), *CHOICES], [("vae", "VAE")]),
    "TPUCompileCLIP": ("TPU Compile CLIP", "TPU", [("clip", "CLIP", {}), *CHOICES], [("clip", "CLIP")]),
    "TPULoadDiffusionModel": (
        "TPU Load Diffusion Model",
        "TPU",
        [("unet_name", "COMBO", {}), *CHOICES],
        [("model", "MODEL")],
    ),
    "TPUInfo": ("TPU Info", "TPU", [("after", "*", {"optional": True})], [("info", "STRING")]),
}

KEEP_NUMBERS = ("Wan21TextEncoder", "Wan21TPUSampler", "Wan21TPUVAEDecoder", "Wan21TPUPipeline")
ZERO = ("height", "width", "num_frames", "num_inference_steps", "flow_shift", "fps")
MINUS_ONE = ("guidance_scale", "guidance_scale_2")


def with_own(given):
    """The input as it starts with 0, or with -1 where 0 means something: the model's own value."""
    name, kind, values = given
    if name not in (*ZERO, *MINUS_ONE):
        return given
    own = 0 if name in ZERO else -1
    changed = {**values, "default": own, "min": own}
    if name == "num_frames":
        changed["step"] = 1
    return name, kind, changed


SPECIFIED = {
    node_id: (*node[:2], node[2] if node_id in KEEP_NUMBERS else [with_own(each) for each in node[2]], *node[3:])
    for node_id, node in SPECIFIED.items()
}
SPECIFIED = {
    node_id: (shown, category, inputs if node_id.startswith("TPU") else [*inputs, PIPELINE], outputs)
    for node_id, (shown, category, inputs, outputs) in SPECIFIED.items()
}
WITHOUT_OPTIONS = ("TPULoraLoader", "TPULoadPipeline", "TPUOptions", "TPUServer", "TPUInfo")
"""Nodes that run no model; `options` is the last input of every other one, and `server` follows it where a model of a
family is run."""
SPECIFIED = {
    node_id: (
        name,
        category,
        [*inputs, *([] if node_id in WITHOUT_OPTIONS else [OPTIONS]), *([] if node_id.startswith("TPU") else [SERVER])],
        outputs,
    )
    for node_id, (name, category, inputs, outputs) in SPECIFIED.items()
}


def specified(order):
    """Without nodes of further families, which their cards specify."""
    keys = [nodes.key for card in family_cards() for nodes in card.node_sets]
    made = {f"{key}{kind}" for key in keys for kind in KINDS}
    return [node_id for node_id in order if node_id in SPECIFIED or node_id not in made]


def test_the_nodes_and_their_order(pack):
    assert specified(pack["order"]) == list(SPECIFIED)


@pytest.mark.parametrize("node_id", SPECIFIED)
def test_node_is_as_specified(node_id, nodes):
    node = nodes[node_id]
    display_name, category, inputs, outputs = SPECIFIED[node_id]
    assert (node["display_name"], node["category"]) == (display_name, category)
    assert [(given["id"], given["type"]) for given in node["inputs"]] == [(name, kind) for name, kind, _ in inputs]
    for given, (name, _, options) in zip(node["inputs"], inputs, strict=True):
        assert {key: given.get(key) for key in ("optional", *options)} == {"optional": False, **options}, name
        bounds = {"min", "max", "default"} & set(given)
        assert bounds <= set(options), f"{name} has {bounds}, which nobody specified"
    assert [(given["name"], given["type"]) for given in node["outputs"]] == outputs
    assert node["is_output_node"] == (node_id == "TPUInfo")


@pytest.mark.parametrize("node_id", SPECIFIED)
def test_everything_is_explained(node_id, nodes):
    node = nodes[node_id]
    assert len(node["description"]) > 20
    for each in (*node["inputs"], *node["outputs"]):
        assert len(each["tooltip"] or "") > 15, each["id"]
        assert each["tooltip"].endswith(".")


@pytest.mark.parametrize("node_id", SPECIFIED)
def test_comfyui_accepts_the_ids(node_id, nodes):
    """It refuses a node of which an input and an output have the same id."""
    ids = [each["id"] for each in (*nodes[node_id]["inputs"], *nodes[node_id]["outputs"])]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("node", "accepted", "refused"),
    [
        (
            "Wan21TPUSampler",
            ["17", "21", "81", "121"],
            {"80": "num_frames=80 is not 4n+1; use 77 or 81", "125": "num_frames=125 is outside 17 to 121"},
        ),
        (
            "LTXVideoTPUSampler",
            ["17", "81", "121", "257"],
            {"21": "num_frames=21 is not 8n+1; use 17 or 25", "265": "num_frames=265 is outside 17 to 257"},
        ),
    ],
)
def test_frames_that_a_latent_does_not_hold_are_refused_before_running(node, accepted, refused, pack):
    answers = pack["frames"][node]
    assert [count for count, answer in answers.items() if answer is True] == accepted
    assert {count: answers[count] for count in refused} == refused


def test_every_refused_value_names_its_input():
    """By its field: a node's input is found without taking a sentence apart."""
    unnamed = [
        f"{path.name}:{call.lineno}"
        for path in (ROOT / "src" / "comfy_tpu" / "comfy").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("InvalidValueError", "MeshError")
        if "field" not in {keyword.arg for keyword in call.keywords}
    ]
    assert unnamed == []


def test_one_route_that_only_answers(pack):
    assert pack["routes"] == [["get", "/comfy_tpu/status"]]


def test_web_directory(pack):
    assert pack["web_directory"] == "./web"
    assert (ROOT / "web").is_dir()
    assert pack["legacy"] == []  # ComfyUI would read those and pass over the entry point


def test_what_our_modules_log_has_no_control_characters(pack):
    assert pack["logged"] == "no place for \\x1b[31m\n"


def test_importing_loads_nothing_heavy_and_changes_nothing(pack):
    assert pack["heavy"] == []
    assert pack["changed"] == {}


def test_a_clone_without_an_installed_package_only_appends_its_sources(tmp_path):
    """To the end of sys.path: nothing of ours may hide a module of ComfyUI or of another pack."""
    loaded = load_pack(tmp_path, installed=False)
    assert list(loaded["changed"]) == ["path"]
    before, after = loaded["changed"]["path"]
    assert after == [*before, str(ROOT / "src")]
    assert specified(loaded["order"]) == list(SPECIFIED)
