"""Before jax is imported anywhere: eight CPU devices, so that every mesh layout can be tested on any machine."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a run on an accelerator names its own
