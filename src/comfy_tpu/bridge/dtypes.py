"""torch tensors and numpy arrays over the same memory, also for the dtypes numpy does not know."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from comfy_tpu.errors import InvalidValueError

_EXTENDED = {
    torch.bfloat16: (torch.uint16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
_EXTENDED_TO_TORCH = {np.dtype(extended): (plain, dtype) for dtype, (plain, extended) in _EXTENDED.items()}


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as a numpy array: no copy if it is contiguous and on the host, and never through another
    dtype."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype in _EXTENDED:
        plain, extended = _EXTENDED[tensor.dtype]
        return tensor.view(plain).numpy().view(extended)
    return tensor.numpy()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The array's memory as a torch tensor; the array must be writable."""
    if array.dtype in _EXTENDED_TO_TORCH:
        plain, dtype = _EXTENDED_TO_TORCH[array.dtype]
        return torch.from_numpy(array.view(str(plain).removeprefix("torch."))).view(dtype)
    return torch.from_numpy(array)


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    if dtype in _EXTENDED:
        return np.dtype(_EXTENDED[dtype][1])
    return np.dtype(str(dtype).removeprefix("torch."))


def check_integer_range(array: np.ndarray) -> None:
    """Raises InvalidValueError for an integer beyond 32 bits, which jax would silently wrap."""
    if array.dtype.kind not in "iu" or array.dtype.itemsize < 8 or array.size == 0:
        return
    narrow = np.iinfo(np.int32 if array.dtype.kind == "i" else np.uint32)
    low, high = int(array.min()), int(array.max())
    if low < narrow.min or high > narrow.max:
        worst = high if high > narrow.max else low
        raise InvalidValueError(
            f"an integer tensor of shape {array.shape} holds {worst}, but devices hold {narrow.dtype} "
            f"({narrow.min} to {narrow.max}); use smaller numbers, or a float"
        )
