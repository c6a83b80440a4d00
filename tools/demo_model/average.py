"""Average the weights of VAEs that were trained on from the same one: what each alone gets wrong becomes less.

python -m tools.demo_model.average build/a/vae:0.3 build/b/vae:0.7 --output src/comfy_tpu/assets/demo/vae
"""

import argparse
import math
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan


def average(parts: list[tuple[Path, float]], output: Path) -> None:
    """``parts``: directories, and the share of each; together 1."""
    if not math.isclose(sum(share for _, share in parts), 1.0):
        raise ValueError(f"the shares {[share for _, share in parts]} do not add up to 1")
    models = [AutoencoderKLWan.from_pretrained(directory) for directory, _ in parts]
    states = [model.state_dict() for model in models]
    mean = dict(states[0])
    for name, first in mean.items():
        if any(not torch.equal(first, state[name]) for state in states):  # what was not trained stays, to the bit
            mean[name] = sum(share * state[name] for (_, share), state in zip(parts, states, strict=True))
    settings = {name: value for name, value in models[0].config.items() if not name.startswith("_")}  # without its path
    averaged = AutoencoderKLWan(**settings)
    averaged.load_state_dict(mean)
    averaged.save_pretrained(output, safe_serialization=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", metavar="DIRECTORY:SHARE")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    split = [part.rpartition(":") for part in arguments.parts]
    average([(Path(directory), float(share)) for directory, _, share in split], arguments.output)


if __name__ == "__main__":
    main()
