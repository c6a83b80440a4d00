"""Results from jax to torch on the GPU where both are, while neither they nor the host wait for each other."""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch.utils.dlpack import from_dlpack

from comfy_tpu.bridge.boundary import is_on_one_gpu


class GpuHandover:
    """Gives results of running programs to torch, and keeps what the GPU still reads.

    Both libraries take memory for free as soon as the host lets go of it, and count on the order of their own stream.
    Here one reads what is the other's, so all of it is kept until torch's stream has come to the end of its copies,
    which begin where the program has ended.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[torch.cuda.Event, Any]] = []

    @staticmethod
    def is_for(results: Any, device: torch.device) -> bool:
        """Whether these results are on torch's GPU `device`, all of them."""
        if device.type != "cuda":
            return False
        index = torch.cuda.current_device() if device.index is None else device.index

        def is_there(leaf: Any) -> bool:
            return isinstance(leaf, jax.Array) and is_on_one_gpu(leaf.sharding) and _gpu_index(leaf) == index

        return all(map(is_there, jax.tree.leaves(results)))

    def take(self, results: Any, device: torch.device, inputs: Any) -> Any:
        """The results as torch's own tensors on `device`, which torch's current stream waits for and nobody else.

        `inputs`: arrays that the program reads, among them some over torch's memory.
        """
        self._kept = [(copied, arrays) for copied, arrays in self._kept if not copied.query()]
        copies = jax.tree.map(lambda array: from_dlpack(array).clone(), results)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        self._kept.append((copied, (results, inputs)))
        return copies


def _gpu_index(array: Any) -> int:
    index: int = array.__dlpack_device__()[1]
    return index
