"""Foreign nodes that do what foreign nodes do: torch maths, `.to()` on everything, threads, exceptions.

They stand before, between and after ours in one workflow. What they find is reported as JSON in their output; a wrong
result or a changed torch is an entry in "problems".
"""

import copy
import threading

import comfy.model_management
import torch

from .handling import handle_everything, handle_loaded_models, handle_tensors_of_the_process
from .maths import compute, expected, random_states
from .state import differences, snapshot

AT_START = snapshot()
"""Taken when the pack is imported: before any node of ours has run."""

ANY = "*"


class Foreign:
    CATEGORY = "test"
    OUTPUT_NODE = True
    RETURN_TYPES = (ANY,)
    FUNCTION = "run"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - ComfyUI's name
        return {"required": {"value": (ANY,)}, "optional": {"also": (ANY,), "salt": ("INT", {"default": 0})}}

    @classmethod
    def VALIDATE_INPUTS(cls, input_types):  # noqa: N802
        return True


class HostileMaths(Foreign):
    """Computes, handles whatever passes, compares torch with what it was, and gives the value on."""

    last = None

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        types = super().INPUT_TYPES()
        # The first one of a workflow: ComfyUI's own nodes may have drawn random numbers since the last prompt.
        types["optional"]["first"] = ("BOOLEAN", {"default": False})
        return types

    def run(self, value, also=None, salt=0, first=False):
        problems = differences(AT_START, snapshot())
        now = random_states()
        moved = [] if first else [name for name, state in HostileMaths.last.items() if now[name] != state]
        problems += [f"the random numbers of {name} were moved" for name in moved]
        problems += compute()
        problems += handle_everything(value) + handle_everything(also)
        problems += handle_loaded_models(comfy.model_management.current_loaded_models)
        problems += handle_tensors_of_the_process()
        problems += differences(AT_START, snapshot())
        HostileMaths.last = random_states()
        return {"ui": {"report": [{"problems": problems}]}, "result": (value,)}


class HostileRaise(Foreign):
    """Fails, in one of the ways a node can. Its own value arrived, so it stands in mid-workflow."""

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802
        return {"required": {"value": (ANY,), "how": (["error", "memory", "interrupt"],)}}

    def run(self, value, how):
        if how == "memory":  # ComfyUI answers it with unload_all_models
            raise comfy.model_management.OOM_EXCEPTION("a foreign node ran out of memory")
        if how == "interrupt":
            raise comfy.model_management.InterruptProcessingException()
        raise RuntimeError("a foreign node failed")


class HostileThreadStart(Foreign):
    """Leaves a thread behind that computes until HostileThreadStop ends it: while our nodes run, that is."""

    running = None

    def run(self, value, also=None, salt=0):
        if HostileThreadStart.running is not None:
            HostileThreadStart.running.stop()
        HostileThreadStart.running = Worker()
        HostileThreadStart.running.start()
        return (value,)

    @classmethod
    def IS_CHANGED(cls, **_):  # noqa: N802
        return float("nan")


class HostileThreadStop(Foreign):
    def run(self, value, also=None, salt=0):
        worker, HostileThreadStart.running = HostileThreadStart.running, None
        worker.stop()
        report = {"problems": worker.problems, "rounds": worker.rounds}
        return {"ui": {"report": [report]}, "result": (value,)}

    @classmethod
    def IS_CHANGED(cls, **_):  # noqa: N802
        return float("nan")


class Worker(threading.Thread):
    def __init__(self):
        super().__init__(name="hostile", daemon=True)
        self.problems, self.rounds, self.ended = [], 0, threading.Event()

    def run(self):
        try:
            while not self.ended.is_set():
                self.problems += compute()
                copy.deepcopy(expected())
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 - it is what the test wants to see
            self.problems.append(f"{type(error).__name__}: {error}")

    def stop(self):
        self.ended.set()
        self.join(60)


NODE_CLASS_MAPPINGS = {
    "HostileMaths": HostileMaths,
    "HostileRaise": HostileRaise,
    "HostileThreadStart": HostileThreadStart,
    "HostileThreadStop": HostileThreadStop,
}
assert torch.is_tensor(expected()), "the expected result is computed at import, before anything else could change it"
