"""Makes the thumbnails that ComfyUI shows for example_workflows/: frames of the demo model over the nodes.

python -m tools.thumbnails example_workflows [NAME…]
"""

import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from comfy_tpu.pipeline.video import VideoPipeline

# By workflow: what the frames show, and its nodes from left to right (ours with a star).
THUMBNAILS = {
    "wan21_tpu_demo": ("a red circle moving right on a black background", "Encoder* Sampler* Decoder* Video"),
    "wan21_tpu_basic": ("an orange circle growing on a brown background", "Encoder* Sampler* Decoder* Video"),
    "wan21_tpu_full_pipeline": ("a blue square growing on a white background", "Full_Pipeline* Video"),
    "wan21_tpu_videohelpersuite": ("a cyan star moving down on a black background", "Encoder* Sampler* Decoder* VHS"),
    "wan21_tpu_native_vae": ("a green triangle moving up on a gray background", "Encoder* Sampler* VAE_Decode Video"),
    "wan21_native_tpu_model": ("a yellow star moving left on a black background", "Loaders Compile* KSampler Video"),
    "wan21_native_tpu_vae": ("a purple square moving left on a gray background", "CLIP KSampler Decoder* Video"),
    "wan21_tpu_server": ("a green star moving left on a white background", "Server* Encoder* Sampler* Video"),
    "wan21_tpu_image_to_video": ("a pink star moving right on a black background", "Image Encoder* Decoder* Video"),
    "wan22_tpu_basic": ("a blue star spinning on a white background", "Wan_2.2* Sampler* Decoder* Video"),
    "wan22_tpu_image_to_video": ("a green circle moving down on a white background", "Image Wan_2.2* Decoder* Video"),
    "wan22_tpu_second_pass": ("an orange square moving up on a gray background", "Wan_2.2* Small* Large* Video"),
    "wan21_tpu_video_to_video": ("a purple star moving up on a white background", "Video Encoder* Decoder* Video"),
    "wan_vace_tpu_basic": ("a red triangle spinning on a gray background", "Video Wan_VACE* Decoder* Video"),
    "wan_animate_tpu_basic": ("an orange circle moving left on a white background", "Video Animate* Decoder* Video"),
    "flux_tpu_basic": ("a red square growing on a gray background", "Flux* Sampler* Decoder* Image"),
    "flux2_tpu_basic": ("a green star growing on a white background", "Flux.2* Sampler* Decoder* Image"),
    "flux_tpu_image_to_image": ("a cyan square growing on a brown background", "Image Flux* Image"),
    "hunyuanvideo15_tpu_image_to_video": (
        "a purple circle moving left on a white background",
        "Image Hunyuan* Decoder* Video",
    ),
    "ltx2_tpu_basic": ("a green circle moving right on a black background", "LTX-2* Sampler* Decoder* Video"),
    "ltx2_tpu_image_to_video": ("a yellow triangle moving left on a gray background", "Image LTX-2* Decoder* Video"),
    "ltxv_tpu_basic": ("a pink circle moving down on a gray background", "LTX-Video* Sampler* Decoder* Video"),
    "ltxv_tpu_image_to_video": ("a red star moving up on a white background", "Image LTX-Video* Decoder* Video"),
    "z_image_tpu_basic": ("an orange star growing on a black background", "Z-Image* Sampler* Decoder* Image"),
    "z_image_tpu_image_to_image": ("a pink square growing on a white background", "Image Z-Image* Image"),
    "qwen_image_tpu_basic": ("a purple triangle growing on a white background", "Qwen* Sampler* Decoder* Image"),
    "qwen_image_tpu_edit": ("a cyan circle growing on a gray background", "Image Qwen_Edit* Decoder* Image"),
    "hunyuanvideo15_tpu_basic": ("a yellow circle moving up on a black background", "Hunyuan* Sampler* Decoder* Video"),
}
WIDTH, HEIGHT, CELL, MARGIN = 640, 360, 196, 14
SHOWN_FRAMES = (1, 8, 15)
BACKGROUND, OURS, STOCK, WORDS = "#16181d", "#2f6fdd", "#3c414b", "#ffffff"


def draw_thumbnail(frames: torch.Tensor, nodes: str) -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT), BACKGROUND)
    left = (WIDTH - len(SHOWN_FRAMES) * CELL - (len(SHOWN_FRAMES) - 1) * MARGIN) // 2
    for place, number in enumerate(SHOWN_FRAMES):
        frame = Image.fromarray(frames[number].mul(255).round().byte().numpy())
        image.paste(frame.resize((CELL, CELL), Image.Resampling.LANCZOS), (left + place * (CELL + MARGIN), 30))
    _draw_nodes(ImageDraw.Draw(image), nodes.split(), left)
    return image


def _draw_nodes(draw: ImageDraw.ImageDraw, nodes: list[str], left: int) -> None:
    gap, top, bottom = 34, 262, 322
    width = (WIDTH - 2 * left - gap * (len(nodes) - 1)) / len(nodes)
    middle = (top + bottom) / 2
    for place, node in enumerate(nodes):
        x = left + place * (width + gap)
        draw.rounded_rectangle((x, top, x + width, bottom), 10, fill=OURS if node.endswith("*") else STOCK)
        label = node.rstrip("*").replace("_", " ")
        font = ImageFont.load_default(19)
        draw.text((x + width / 2, middle), label, fill=WORDS, font=font, anchor="mm")
        if place:
            draw.line((x - gap + 4, middle, x - 8, middle), fill=WORDS, width=3)
            draw.polygon([(x - 4, middle), (x - 13, middle - 6), (x - 13, middle + 6)], fill=WORDS)


def main(directory: str, *names: str) -> None:
    """Writes the thumbnails of all workflows, or of `names` only."""
    pipeline = VideoPipeline.open("demo")
    for name, (prompt, nodes) in THUMBNAILS.items():
        if names and name not in names:
            continue
        frames = torch.cat(list(pipeline.generate(prompt, pipeline.settings(seed=7))), dim=1)[0]
        # .jpg, because that is the only name the frontend asks for (1.35.9).
        draw_thumbnail(frames, nodes).save(Path(directory) / f"{name}.jpg", quality=88, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
