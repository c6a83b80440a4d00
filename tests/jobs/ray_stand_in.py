"""A worker module without a model: each job writes a tiny image whose metadata are the job's.

Environment: STAND_IN_SECONDS, how long a job takes; STAND_IN_HANG, a prompt at which it makes no
progress, once: STAND_IN_HUNG is the file that tells.
"""

import json
import os
import time
from pathlib import Path

from PIL import Image, PngImagePlugin

from comfy_tpu.jobs.driver import ModelFacts
from comfy_tpu.jobs.outcome import Outcome, outcome_of_error
from comfy_tpu.pipeline.progress import Progress


class Executor:
    current_jobs = ()

    def __init__(self, folder, *, batch_size, on_outcome, on_progress, learns_colours=False):
        self._folder = folder
        self._on_outcome = on_outcome
        self._on_progress = on_progress
        self._seconds = float(os.environ.get("STAND_IN_SECONDS", "0"))
        self._hang = os.environ.get("STAND_IN_HANG")

    def run(self, jobs):
        for job in jobs:
            self.current_jobs = (job.id,)
            try:
                self._on_outcome(self._carry_out(job))
            except Exception as error:  # noqa: BLE001 - as in the real one
                self._on_outcome(outcome_of_error(job.id, error))

    def _carry_out(self, job):
        started = time.monotonic()
        self._on_progress(Progress("denoising", "", 0, 2))
        if job.request.prompt == self._hang and not (hung := Path(os.environ["STAND_IN_HUNG"])).exists():
            hung.touch()
            time.sleep(3600)
        for step in range(2):
            time.sleep(self._seconds / 2)
            self._on_progress(Progress("denoising", "", step + 1, 2, preview=lambda row=0: None))
        with self._folder.writing() as directory:
            path = Path(self._folder.check_inside(directory, job.output))
            write_image(path, job.request)
            outputs = tuple(self._folder.place(directory, [job.output]))
        return Outcome(job.id, "done", outputs, seconds={"total": time.monotonic() - started})

    def render_previews(self, fetch, wanted):
        return tuple(b"a preview" if id_ in wanted else b"" for id_ in self.current_jobs)

    def close(self):
        pass


def write_image(path, request):
    seed = request.values.get("seed", 0)
    information = PngImagePlugin.PngInfo()
    information.add_text("Comment", json.dumps({"prompt": request.prompt, "seed": str(seed)}))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    Image.new("RGB", (8, 8), (seed % 256, seed // 256 % 256, 0)).save(partial, format="png", pnginfo=information)
    partial.replace(path)


def find_model_facts(request):
    return ModelFacts("stand-in", makes_images=True)


def join_hosts(place):
    """Has the place and the environment of the process where a test finds them."""
    record = {
        "coordinator": place.coordinator,
        "num_processes": place.num_processes,
        "process_id": place.process_id,
        "stale": sorted(name for name in os.environ if name.startswith(("MEGASCALE_", "TPU_PROCESS_"))),
        "tpu_name": os.environ.get("TPU_NAME"),
        "worker": os.environ.get("TPU_WORKER_ID"),
        "process": os.getpid(),
    }
    Path(os.environ["STAND_IN_RECORDS"], f"{place.process_id}-{os.getpid()}.json").write_text(json.dumps(record))
