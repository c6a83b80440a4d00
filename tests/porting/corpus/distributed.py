"""Collectives without asking whether there are others."""

import torch
import torch.distributed as dist


class Trapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dist.init_process_group("nccl")  # trap: distributed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)  # trap: distributed
        return x / dist.get_world_size()  # trap: distributed


class Mended(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(x)
            x = x / dist.get_world_size()
        return x
