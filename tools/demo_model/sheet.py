"""Contact sheets: a row of frames for every video."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

SHOWN_FRAMES = (0, 4, 8, 12, 16)


def write_sheet(path: Path, videos: np.ndarray, columns: int = 4, frames: Sequence[int] = SHOWN_FRAMES) -> None:
    """Videos [B, F, H, W, 3] in 0..1, these frames of each side by side, ``columns`` videos in a row."""
    strips = np.concatenate([videos[:, frame] for frame in frames], axis=2)  # [B, H, 5 W, 3]
    strips = np.pad(strips, ((0, 0), (0, 2), (0, 6), (0, 0)), constant_values=0.8)
    blank = np.full_like(strips[:1], 0.8)
    rows = [strips[start : start + columns] for start in range(0, len(strips), columns)]
    rows[-1] = np.concatenate([rows[-1], *[blank] * (columns - len(rows[-1]))])
    sheet = np.concatenate([np.concatenate(list(row), axis=1) for row in rows])
    Image.fromarray((sheet.clip(0, 1) * 255).round().astype(np.uint8)).save(path)
