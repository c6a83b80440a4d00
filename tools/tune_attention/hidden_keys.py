"""Schedules of the splash kernel where keys are hidden: `python -m tools.tune_attention.hidden_keys`.

Only tiles that an end of the keys cuts through may pay for hiding them. Each case is compiled for v6e by libtpu, with
no TPU, and its four bodies are told: both forms of the softmax, for whole and for cut tiles.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from comfy_tpu.config import AttentionConfig
from comfy_tpu.planning.schedule_files import Region
from tools.tune_attention.kernel_schedule import compile_elsewhere, compile_kernel, find_leaves

logger = logging.getLogger(__name__)

HEAD_DIM = 128
_HEADS = 10
_WAN_720P = 75_600
_HUNYUAN_720P = 111_600 + 1_256
"""The tokens of 121 frames, and of the text, which is padded: its length is known when the program runs."""
_OPTIONS: Mapping[str, Any] = {
    "scale": HEAD_DIM**-0.5,
    "blocks": None,
    "interpret": False,
    "smooth_keys": AttentionConfig().smooth_keys,
}


def attend_full(chip: str) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    return functools.partial(_attend, chip=chip, partial=False), _heads(_WAN_720P, _WAN_720P)


def attend_lengths(chip: str) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    shapes = _heads(_HUNYUAN_720P, _HUNYUAN_720P)
    return functools.partial(_attend, chip=chip, partial=False), shapes | {"lengths": (1,)}


def attend_ring(chip: str) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    """One of four devices: its queries with the keys of another, to be merged."""
    share = _WAN_720P // 4
    return functools.partial(_attend, chip=chip, partial=True), _heads(share, share) | {"lengths": (1,)}


def attend_shares(chip: str) -> tuple[Callable[..., Any], dict[str, tuple[int, ...]]]:
    """Four devices' tokens after Ulysses' exchange: each has 18,900 in 18,912 rows."""
    from comfy_tpu.kernels.splash import Shares, splash_columns

    shape = (1, 4 * 18_912, _HEADS * HEAD_DIM)
    call = functools.partial(splash_columns, heads=_HEADS, shares=Shares(18_900, 18_912), chip=chip, **_OPTIONS)
    return call, {"query": shape, "key": shape, "value": shape}


CASES = {
    "75,600 tokens": attend_full,
    "four shares of 18,900 tokens (Ulysses, Wan)": attend_shares,
    "112,856 tokens with a length (HunyuanVideo-1.5)": attend_lengths,
    "18,900 by 18,900 tokens with a length (a ring's part)": attend_ring,
}


def _heads(queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    return {
        name: (1, _HEADS, length, HEAD_DIM) for name, length in (("query", queries), ("key", keys), ("value", keys))
    }


def _attend(query: Any, key: Any, value: Any, lengths: Any = None, **options: Any) -> Any:
    from comfy_tpu.kernels.masking import Masking
    from comfy_tpu.kernels.splash import splash_attention

    return splash_attention(query, key, value, Masking(lengths=lengths), **_OPTIONS, **options)


def describe_bodies(regions: Sequence[Region]) -> dict[str, int]:
    """Bundles of the four bodies of a kernel that may hide keys.

    Raises ValueError where the regions are not those of such a kernel.
    """
    leaves = find_leaves([region for region in regions if region.bundles >= 100])
    most = max((leaf.used["MATMUL"] for leaf in leaves), default=0)
    bodies = [leaf for leaf in leaves if leaf.used["MATMUL"] > most / 2]
    # The exact form has an exp2 more for each query, and a cut tile an addition more for each score.
    bodies.sort(key=lambda body: body.used["EUP"])
    if len(bodies) != 4 or bodies[1].used["EUP"] == bodies[2].used["EUP"]:
        raise ValueError(f"expected two forms for whole and cut tiles, got {len(bodies)} bodies")
    whole, cut = sorted(bodies[:2], key=lambda body: body.used["VALU"])
    exact, exact_cut = sorted(bodies[2:], key=lambda body: body.used["VALU"])
    return {
        "bounded": whole.bundles,
        "bounded, cut": cut.bundles,
        "exact": exact.bundles,
        "exact, cut": exact_cut.bundles,
    }


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in CASES:
        found = compile_elsewhere("tools.tune_attention.hidden_keys", "v6e", [name])
        if isinstance(found, str):
            logger.info("%s: %s", name, found)
            continue
        compiled, schedule = found
        bodies = ", ".join(f"{body} {bundles:,}" for body, bundles in describe_bodies(schedule.regions).items())
        made_by = f"libtpu {compiled['libtpu']}; nothing ran on a TPU"
        logger.info("%s: %s bundles, %s in all (%s)", name, bodies, f"{schedule.bundles:,}", made_by)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        chip, case = json.loads(sys.argv[1])
        sys.stdout.write(json.dumps(compile_kernel(chip, *CASES[case](chip), "bfloat16")) + "\n")
    else:
        main()
