"""Train the demo model on one GPU and write it as a diffusers directory.

    python -m tools.demo_model.train vae --work build/demo-model
    python -m tools.demo_model.train video --work build/demo-model
    python -m tools.demo_model.train image --work build/demo-model --base src/comfy_tpu/assets/demo

``video`` and ``image`` go on where an earlier one stopped (``--stop-after``), and write the averaged weights each time;
or they begin with the weights of a saved model (``--start``), with a rate of their own.
``decoder`` sharpens the VAE's decoder after the fact, on latents that stay as they are. ``image`` is the sibling that
begins with an image: it shares the VAE and the text encoder of the finished model ``--base``, in whose folder
``image_to_video`` it is written.
"""

import argparse
import logging
import time
from dataclasses import fields, replace
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import nn
from transformers import UMT5EncoderModel

from tools.demo_model.model import save, save_image_model
from tools.demo_model.train_image import ImageTrainer, ImageTraining
from tools.demo_model.train_vae import VaeTraining, train_vae
from tools.demo_model.train_video import Trainer, VideoTraining

logger = logging.getLogger("tools.demo_model")
STAGES = {"vae": VaeTraining(), "decoder": VaeTraining(), "video": VideoTraining(), "image": ImageTraining()}


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    for name, settings in STAGES.items():
        stage = stages.add_parser(name)
        stage.add_argument("--work", type=Path, required=True, help="where everything is kept")
        stage.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        stage.add_argument("--log", type=Path, help="a file that is given the log's lines too")
        for field in fields(settings):
            default = getattr(settings, field.name)
            kind = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": type(default)}
            stage.add_argument(f"--{field.name}", default=default, help=f"default {default}", **kind)
    for name in ("video", "image"):
        stages.choices[name].add_argument("--stop-after", type=float, default=float("inf"), help="seconds")
        stages.choices[name].add_argument("--start", type=Path, help="a saved model, to go on from its weights")
    stages.choices["image"].add_argument("--base", type=Path, required=True, help="a finished text-to-video model")
    arguments = parser.parse_args()
    handlers = [logging.StreamHandler(), *([logging.FileHandler(arguments.log, "w")] if arguments.log else [])]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=handlers)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    arguments.work.mkdir(parents=True, exist_ok=True)

    settings = STAGES[arguments.stage]
    settings = replace(settings, **{field.name: getattr(arguments, field.name) for field in fields(settings)})
    logger.info("%s on %s, torch %s: %s", arguments.stage, _device_name(arguments.device), torch.__version__, settings)
    if isinstance(settings, VideoTraining):
        train = _train_image if isinstance(settings, ImageTraining) else _train_video
        train(settings, arguments, began + arguments.stop_after)
    else:
        train_vae(settings, arguments.work / "vae", arguments.device, decoder_only=arguments.stage == "decoder")
    logger.info("%s took %.0f s", arguments.stage, time.monotonic() - began)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def _train_video(settings: VideoTraining, arguments: argparse.Namespace, until: float) -> None:
    work, device = arguments.work, arguments.device
    vae = AutoencoderKLWan.from_pretrained(work / "vae").to(device).eval()
    average = _run(Trainer(settings, vae, device, work), work / "video.pt", arguments.start, until)
    save(work / "model", vae.cpu(), average.text_encoder, average.transformer)


def _train_image(settings: ImageTraining, arguments: argparse.Namespace, until: float) -> None:
    work, base, device = arguments.work, arguments.base, arguments.device
    vae = AutoencoderKLWan.from_pretrained(base / "vae").to(device).eval()
    text_encoder = UMT5EncoderModel.from_pretrained(base / "text_encoder", dtype=torch.float32)
    average = _run(ImageTrainer(settings, vae, text_encoder, device, work), work / "image.pt", arguments.start, until)
    save_image_model(base / "image_to_video", base, average.image_encoder, average.transformer)


def _run(trainer: Trainer, checkpoint: Path, start: Path | None, until: float) -> nn.Module:
    """The averaged weights after as many steps as there was time for."""
    if checkpoint.exists():
        trainer.load(checkpoint)
    elif start is not None:
        trainer.start_from(start)
    done = trainer.run(until)
    trainer.save(checkpoint)
    logger.info("%s at step %d of %d", "done" if done else "stopped", trainer.step, trainer.settings.steps)
    return trainer.average.cpu()


if __name__ == "__main__":
    main()
