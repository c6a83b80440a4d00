"""The Python interface: open a model, call it with a prompt, save the video.

import comfy_tpu

pipe = comfy_tpu.open("demo")
video = pipe("a red circle moving left", seed=7)
video.save("x.mp4")
"""

from comfy_tpu.facade.calls import Settings
from comfy_tpu.facade.pipeline import Pipeline, open
from comfy_tpu.facade.video import Video

__all__ = ["Pipeline", "Settings", "Video", "open"]
