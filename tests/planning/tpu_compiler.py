"""The mark of tests that compile with the real TPU compiler."""

import pytest

from comfy_tpu.planning.compilation import has_tpu_compiler

needs_tpu_compiler = pytest.mark.skipif(
    not has_tpu_compiler(),
    reason="libtpu, the TPU's compiler, is not installed, and there is none but for Linux on x86_64: it needs no TPU, "
    "and pip install '.[tpu]' is enough to run this test",
)
