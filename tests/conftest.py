"""Before jax is imported anywhere: eight CPU devices, so that every mesh layout can be tested on any machine.

Compiled programs are kept in build/, not in the user's cache, and shared by the workers.
"""

import os
import signal
from pathlib import Path

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Test programs run for milliseconds and take longer to optimise than to run: half the time of the parity tests.
    "--xla_backend_optimization_level=0",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *FLAGS)).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a run on an accelerator names its own
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "test-programs"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts background jobs, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
