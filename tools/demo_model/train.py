"""Train the demo model on one GPU and write it as a diffusers directory.

    python -m tools.demo_model.train vae --work build/demo-model
    python -m tools.demo_model.train video --work build/demo-model

The second command goes on where an earlier one stopped (``--stop-after``), and writes the averaged weights each time.
``decoder`` sharpens the VAE's decoder after the fact, on latents that stay as they are.
"""

import argparse
import logging
import time
from dataclasses import fields, replace
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from tools.demo_model.model import save
from tools.demo_model.train_vae import VaeTraining, train_vae
from tools.demo_model.train_video import Trainer, VideoTraining

logger = logging.getLogger("tools.demo_model")


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    for name, settings in (("vae", VaeTraining()), ("decoder", VaeTraining()), ("video", VideoTraining())):
        stage = stages.add_parser(name)
        stage.add_argument("--work", type=Path, required=True, help="where everything is kept")
        stage.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        for field in fields(settings):
            default = getattr(settings, field.name)
            kind = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
            stage.add_argument(f"--{field.name}", default=default, help=f"default {default}", **kind)
    stages.choices["video"].add_argument("--stop-after", type=float, default=float("inf"), help="seconds")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    arguments.work.mkdir(parents=True, exist_ok=True)

    settings = VideoTraining() if arguments.stage == "video" else VaeTraining()
    settings = replace(settings, **{field.name: getattr(arguments, field.name) for field in fields(settings)})
    if arguments.stage == "video":
        _train_video(settings, arguments.work, arguments.device, began + arguments.stop_after)
    else:
        train_vae(settings, arguments.work / "vae", arguments.device, decoder_only=arguments.stage == "decoder")
    logger.info("%s took %.0f s", arguments.stage, time.monotonic() - began)


def _train_video(settings: VideoTraining, work: Path, device: str, until: float) -> None:
    vae = AutoencoderKLWan.from_pretrained(work / "vae").to(device).eval()
    trainer = Trainer(settings, vae, device, work)
    checkpoint = work / "video.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    done = trainer.run(until)
    trainer.save(checkpoint)
    average = trainer.average.cpu()
    save(work / "model", vae.cpu(), average.text_encoder, average.transformer)
    logger.info("%s at step %d of %d", "done" if done else "stopped", trainer.step, settings.steps)


if __name__ == "__main__":
    main()
