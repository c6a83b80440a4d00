"""Parts that measure nothing, for a process of their own."""

import os
import signal
import sys

from comfy_tpu.bench.results import Row


def measure(job, emit):
    names = ("XLA_FLAGS", "TORCHINDUCTOR_CACHE_DIR", "XLA_PYTHON_CLIENT_PREALLOCATE")
    emit("a remark")
    sys.stdout.write("what a library prints\n")
    facts = {"environment": {name: os.environ.get(name) for name in names}, "process": os.getpid()}
    emit(Row(job.part, "nothing", "ours", facts=facts | {"imported": sorted({"jax", "torch"} & set(sys.modules))}))


def end(job, emit):
    os.kill(os.getpid(), signal.SIGKILL)
