"""Checks XLA_FLAGS and LIBTPU_INIT_ARGS in a subprocess: XLA and libtpu terminate their process at an unknown flag, and
a server with it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

from comfy_tpu.errors import InvalidValueError

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_TIMEOUT = 60

_HARMLESS = re.compile(r"--xla_(force_host_platform_device_count|backend_optimization_level)=\d{1,3}")
"""Flags that are known to be valid, and need no subprocess."""

# The two calls that parse the variables. Neither starts a device. 0.2 s for XLA, 0.3 s for libtpu (two CPU cores).
_PROBE = """
import importlib.util, os
from jaxlib import xla_client
xla_client.CompileOptions()
if os.environ.get("LIBTPU_INIT_ARGS") and importlib.util.find_spec("libtpu"):
    import libtpu
    xla_client.load_pjrt_plugin_dynamically("tpu", libtpu.get_library_path())
    xla_client.initialize_pjrt_plugin("tpu")
"""
# Chips that are here are not touched, and no metadata server is asked for them.
_PROBE_ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}

_REFUSAL = re.compile(
    r"^(?:[EF]\d{4} \S+ +\d+ \S+\] |ERROR: )"
    r"(?P<why>Unknown flag.*|Could not open file .*?(?=\. \()|Couldn't interpret .*|Unknown command line flag.*|"
    r"Illegal value.*)",
    re.MULTILINE,
)


def check_runtime_flags() -> None:
    """Raises InvalidValueError if the runtime would terminate this process because of one of its variables.

    Called before jax starts a device. Starts a process only where a variable is set to something unusual.
    """
    given = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name, "").strip()}
    if all(_HARMLESS.fullmatch(flag) for flags in given.values() for flag in flags.split()):
        return
    if reason := _refusal(tuple(given.items())):
        raise InvalidValueError(
            f"{' or '.join(given)} in the environment would end the process ({reason}); correct it or unset it"
        )


@functools.cache
def _refusal(given: tuple[tuple[str, str], ...]) -> str | None:
    """The runtime's message about these variables; None if it accepts them, or if that could not be found out."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, **_PROBE_ENVIRONMENT, **dict(given)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _REFUSAL.search(done.stderr) if done.returncode else None
    return found["why"].rstrip(".") if found else None
