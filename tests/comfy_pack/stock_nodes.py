"""The nodes of ComfyUI 0.7.0 and VideoHelperSuite 1.7.9 that the examples use, as far as a workflow depends on them.

In the form in which the stand-in records ours. A COMBO without options lists files of the user's.
"""


def _input(name, kind, **options):
    return {"id": name, "type": kind, "optional": False, **options}


def _node(inputs, *outputs, is_output_node=False):
    return {
        "inputs": inputs,
        "outputs": [{"name": name, "type": kind} for name, kind in outputs],
        "is_output_node": is_output_node,
    }


_BIG = 16384

STOCK = {
    "SaveVideo": _node(
        [
            _input("video", "VIDEO"),
            _input("filename_prefix", "STRING"),
            _input("format", "COMBO", options=["auto", "mp4"]),
            _input("codec", "COMBO", options=["auto", "h264"]),
        ],
        is_output_node=True,
    ),
    "CreateVideo": _node(
        [
            _input("images", "IMAGE"),
            _input("fps", "FLOAT", min=1.0, max=120.0, step=1.0),
            _input("audio", "AUDIO", optional=True),
        ],
        ("VIDEO", "VIDEO"),
    ),
    "SaveImage": _node([_input("images", "IMAGE"), _input("filename_prefix", "STRING")], is_output_node=True),
    "LoadImage": _node([_input("image", "COMBO")], ("IMAGE", "IMAGE"), ("MASK", "MASK")),
    "LoadVideo": _node([_input("file", "COMBO")], ("VIDEO", "VIDEO")),
    "GetVideoComponents": _node([_input("video", "VIDEO")], ("images", "IMAGE"), ("audio", "AUDIO"), ("fps", "FLOAT")),
    "VAELoader": _node([_input("vae_name", "COMBO")], ("VAE", "VAE")),
    "VAEDecode": _node([_input("samples", "LATENT"), _input("vae", "VAE")], ("IMAGE", "IMAGE")),
    "UNETLoader": _node(
        [
            _input("unet_name", "COMBO"),
            _input("weight_dtype", "COMBO", options=["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"]),
        ],
        ("MODEL", "MODEL"),
    ),
    "CLIPLoader": _node(
        [
            _input("clip_name", "COMBO"),
            _input("type", "COMBO", options=["stable_diffusion", "sd3", "wan"]),
            _input("device", "COMBO", options=["default", "cpu"], optional=True),
        ],
        ("CLIP", "CLIP"),
    ),
    "CLIPTextEncode": _node([_input("text", "STRING"), _input("clip", "CLIP")], ("CONDITIONING", "CONDITIONING")),
    "ModelSamplingSD3": _node(
        [_input("model", "MODEL"), _input("shift", "FLOAT", min=0.0, max=100.0)], ("MODEL", "MODEL")
    ),
    "EmptyHunyuanLatentVideo": _node(
        [
            _input("width", "INT", min=16, max=_BIG, step=16),
            _input("height", "INT", min=16, max=_BIG, step=16),
            _input("length", "INT", min=1, max=_BIG, step=4),
            _input("batch_size", "INT", min=1, max=4096),
        ],
        ("LATENT", "LATENT"),
    ),
    "KSampler": _node(
        [
            _input("model", "MODEL"),
            _input("seed", "INT", min=0, max=2**64 - 1, control_after_generate=True),
            _input("steps", "INT", min=1, max=10000),
            _input("cfg", "FLOAT", min=0.0, max=100.0),
            _input("sampler_name", "COMBO", options=["euler", "uni_pc", "dpmpp_2m"]),
            _input("scheduler", "COMBO", options=["simple", "normal"]),
            _input("positive", "CONDITIONING"),
            _input("negative", "CONDITIONING"),
            _input("latent_image", "LATENT"),
            _input("denoise", "FLOAT", min=0.0, max=1.0),
        ],
        ("LATENT", "LATENT"),
    ),
    "VHS_VideoCombine": _node(
        [
            _input("images", "IMAGE"),
            _input("frame_rate", "FLOAT", min=1),
            _input("loop_count", "INT", min=0, max=100),
            _input("filename_prefix", "STRING"),
            _input("format", "COMBO", options=["image/gif", "image/webp", "video/h264-mp4"]),
            _input("pingpong", "BOOLEAN"),
            _input("save_output", "BOOLEAN"),
            _input("audio", "AUDIO", optional=True),
            _input("meta_batch", "VHS_BatchManager", optional=True),
            _input("vae", "VAE", optional=True),
        ],
        ("Filenames", "VHS_FILENAMES"),
        is_output_node=True,
    ),
}
NOTES = {"MarkdownNote", "Note"}
WIDGETS = {"INT", "FLOAT", "STRING", "COMBO", "BOOLEAN"}
# It writes its widgets by name, with those that its format adds (video_formats/h264-mp4.json) and its preview.
VHS_ADDED = {"pix_fmt", "crf", "save_metadata", "trim_to_audio", "videopreview"}
