"""Prompts of every kind for one long-lived ComfyUI server, chosen at random: results, cancels, errors, Free."""

import copy
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

from tests.comfyui.client import ComfyClient, Prompt, RefusedError, Run
from tests.comfyui.family_models import RUNS, family_prompt
from tests.comfyui.graphs import DECODER, FRAMES_OUT, SAMPLER, keep, three_nodes, whole_pipeline
from tests.comfyui.images import read_kept
from tests.comfyui.test_hostile_nodes import problems, surrounded
from tests.comfyui.test_native_nodes import compiled, stock, with_model_node

SEEDS = (1, 2, 3)
"""Of a sampler. Few, so that every result is drawn many times, and a fresh server draws all of them."""
RESULT = "result"
_STEPS = ("num_inference_steps", "steps")


@dataclass(frozen=True)
class Case:
    """A graph with a result."""

    name: str
    prompt: Prompt
    source: list[Any]
    """The output that is compared."""
    is_ours: bool = True
    """Whether the sampler is one of ours. False: ComfyUI's own."""

    def make(self, seed: int, **sampler: Any) -> Prompt:
        """`sampler`: other values of the node with the seed."""
        prompt = copy.deepcopy(self.prompt)
        node = prompt[self.sampler]
        node["inputs"] |= {"seed": seed, **sampler}
        return keep(prompt, **{RESULT: self.source})

    @property
    def sampler(self) -> str:
        (found,) = (name for name, node in self.prompt.items() if "seed" in node["inputs"])
        return found

    @property
    def steps(self) -> str:
        (found,) = (name for name in _STEPS if name in self.prompt[self.sampler]["inputs"])
        return found


def make_cases(client: ComfyClient) -> list[Case]:
    cases = [_family_case(f"{Path(name).stem} {model}", family_prompt(name, model, client)) for name, model in RUNS]
    patched = with_model_node(compiled(steps=2), "NativeStepPatch", reads_sigmas=True)
    return [
        *cases,
        Case("three nodes", three_nodes(), [DECODER, 0]),
        Case("one node", whole_pipeline(), ["pipeline", 0]),
        Case("stock", stock(steps=2), ["frames", 0], is_ours=False),
        Case("compiled", compiled(steps=2), ["frames", 0], is_ours=False),
        Case("compiled, patched on the host", patched, ["frames", 0], is_ours=False),
    ]


def _family_case(name: str, prompt: Prompt) -> Case:
    (source,) = (node["inputs"]["images"] for node in prompt.values() if "images" in node["inputs"])
    return Case(name, prompt, source)


def digest(value: Any) -> str:
    """Of everything that ProbeKeep wrote."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for name in sorted(part):
                found.update(name.encode())
                add(part[name])
        elif isinstance(part, list | tuple):
            for each in part:
                add(each)
        else:
            found.update(repr(part).encode())

    add(value)
    return found.hexdigest()


@dataclass
class Soak:
    """Runs prompts in one server and compares each result with that of a fresh one."""

    client: ComfyClient
    random: random.Random
    log: TextIO
    fresh: dict[tuple[str, int], str]
    """The digest of a result by case and seed."""
    cases: list[Case]
    ran: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    number: int = 0

    @property
    def actions(self) -> list[Callable[[], None]]:
        """As often as they are chosen."""
        return [
            *[self.result] * 8,
            self.surrounded,
            self.with_foreign_thread,
            self.with_previews,
            *[self.cancelled] * 2,
            self.failed_at_ours,
            self.failed_at_another,
            self.refused,
            *[self.freed] * 2,
            self.freed_meanwhile,
            self.three_queued,
        ]

    def run(self, prompts: int) -> None:
        """One action after the other until there were so many prompts."""
        end = self.number + prompts
        while self.number < end:
            self.do(self.random.choice(self.actions))

    def do(self, action: Callable[[], None]) -> None:
        name = getattr(action, "__name__", str(action))
        begin, first = time.monotonic(), self.number
        self.ran[name] += 1
        self.write(begin=name, prompt=first)
        action()
        seconds = round(time.monotonic() - begin, 2)
        self.write(end=name, prompts=self.number - first, seconds=seconds, host=self.client.server.resident_bytes())
        assert self.client.server.alive, self.client.server.tail()

    def write(self, **entry: Any) -> None:
        print(json.dumps(entry), file=self.log, flush=True)

    def level(self) -> dict[str, int]:
        """After Free: what is left on the devices and in the process, without ComfyUI's history of prompts."""
        self.client.empty_device()
        for number in range(2):
            # ComfyUI empties its cache of outputs between prompts: once the second has run, it has done so.
            words = {"class_type": "ProbeText", "inputs": {"value": f"level {self.number} {number}"}}
            self.client.succeed({"words": words, **keep({}, level=["words", 0])})
        assert [device["weights_bytes"] for device in self.client.status()["devices"]] == [0]
        probe = self.client.get("/probe")
        with_history = self.client.get("/probe/memory")["live"]
        self.client.post("/history", {"clear": True})
        memory = self.client.get("/probe/memory")
        found = {
            "arrays": probe["arrays"],
            "device": probe["bytes"],
            **memory,
            "history": with_history - memory["live"],
        }
        self.write(level=found, prompt=self.number)
        return found

    # actions

    def result(self) -> None:
        case, seed = self._choose()
        self._check(case, seed, self.client.succeed(self._prompt(case, seed)))

    def surrounded(self) -> None:
        seed = self.random.choice(SEEDS)
        self.number += 1
        assert problems(self.client.succeed(surrounded(1000 * self.number + seed))) == {}

    def with_foreign_thread(self) -> None:
        case, seed = self._choose()
        words = {"class_type": "ProbeText", "inputs": {"value": f"start {self.number}"}}
        start = {"class_type": "HostileThreadStart", "inputs": {"value": ["words", 0]}}
        self.client.succeed({"words": words, "start": start, **keep({}, started=["start", 0])})
        run = self.client.succeed(self._prompt(case, seed))
        stop = {"class_type": "HostileThreadStop", "inputs": {"value": ["words", 0]}}
        stopped = self.client.succeed({"words": words, "stop": stop})
        assert stopped.outputs("stop")["report"][0]["problems"] == []
        self._check(case, seed, run)

    def with_previews(self) -> None:
        case, seed = self._choose()
        self._check(case, seed, self.client.succeed(self._prompt(case, seed), preview_method="latent2rgb"))

    def cancelled(self) -> None:
        case, seed = self._choose()
        prompt = self._prompt(case, 100 + seed, **{case.steps: 100})
        run = self.client.queue(prompt)
        wanted = self.random.choice(["step 0/", "step 1/", "step 2/"])
        told = [wanted] if case.is_ours or case.name == "compiled" else []
        self.client.wait(run, lambda run: _is_at(run, case.sampler, told), f"{told} of {case.name}")
        self.client.interrupt()
        assert self.client.finish(run).outcome == "execution_interrupted"

    def failed_at_ours(self) -> None:
        case, seed = self._choose(lambda case: case.is_ours)
        prompt = self._prompt(case, 100 + seed)
        prompt["foreign"] = {"class_type": "ProbeInteger", "inputs": {"value": 0}}
        prompt[case.sampler]["inputs"][case.steps] = ["foreign", 0]
        assert f"{case.steps}=0" in self.client.fail(prompt)["exception_message"]

    def failed_at_another(self) -> None:
        case, seed = self._choose()
        how = self.random.choice(["error", "memory", "interrupt"])
        prompt = self._prompt(case, 100 + seed)
        prompt["raises"] = {"class_type": "HostileRaise", "inputs": {"value": case.source, "how": how}}
        prompt[f"keep {RESULT}"]["inputs"]["value"] = ["raises", 0]
        wanted = "execution_interrupted" if how == "interrupt" else "execution_error"
        assert self.client.run(prompt).outcome == wanted

    def refused(self) -> None:
        """By ComfyUI's own checks, before anything runs."""
        self.number += 1
        prompt = three_nodes(seed=1)
        prompt[SAMPLER]["inputs"]["height"] = "tall"
        del prompt[FRAMES_OUT]["inputs"]["images"]
        with pytest.raises(RefusedError):
            self.client.queue(prompt)

    def freed(self) -> None:
        how = self.random.choice([(True, False), (False, True), (True, True)])
        self.client.free(unload_models=how[0], free_memory=how[1])
        self.result()

    def freed_meanwhile(self) -> None:
        case, seed = self._choose()
        run = self.client.queue(self._prompt(case, seed))
        self.client.free()
        self._check(case, seed, self.client.finish(run))

    def three_queued(self) -> None:
        """The last one is taken back while the first runs."""
        chosen = [self._choose() for _ in range(3)]
        runs = []
        for number, (case, seed) in enumerate(chosen):
            prompt = self._prompt(case, seed)
            prompt[f"keep {RESULT}"]["inputs"]["name"] = f"{RESULT} {number}"
            runs.append(self.client.queue(prompt))
        self.client.post("/queue", {"delete": [runs[2].id]})
        for number, (case, seed) in enumerate(chosen[:2]):
            self._check(case, seed, self.client.finish(runs[number]), f"{RESULT} {number}")
        # Where it ran before it was taken back: its end is waited for, so that the next one is alone.
        history = self.client.get("/queue")
        if any(entry[1] == runs[2].id for part in history.values() for entry in part) or runs[2].messages:
            self.client.finish(runs[2])

    # parts of them

    def _choose(self, wanted: Callable[[Case], bool] = lambda case: True) -> tuple[Case, int]:
        case = self.random.choice([case for case in self.cases if wanted(case)])
        return case, self.random.choice(SEEDS)

    def _prompt(self, case: Case, seed: int, **sampler: Any) -> Prompt:
        self.write(case=case.name, seed=seed, prompt=self.number, **sampler)
        self.number += 1
        for file in (self.client.server.base / "output").glob(f"{RESULT}*.pt"):
            if file.stem == RESULT:
                file.unlink()
        return case.make(seed, **sampler)

    def _check(self, case: Case, seed: int, run: Run, name: str = RESULT) -> None:
        assert run.outcome == "execution_success", f"{case.name}: {run.outcome}\n{self.client.server.tail()}"
        if f"keep {RESULT}" not in run.executed:
            self.compared["in ComfyUI's cache"] += 1
            return
        found = digest(read_kept(self.client.server.base, name))
        assert found == self.fresh[case.name, seed], f"{case.name} at seed {seed} differs from a fresh server's"
        self.compared[case.name] += 1


def _is_at(run: Run, node: str, texts: list[str]) -> bool:
    """Whether the node has said one of `texts`; without any, whether it runs and has begun to count its steps."""
    if run.finished:
        return True
    if texts:
        return any(text in told for text in texts for told in run.texts(node))
    return any(data["node"] == node for data in run.of("progress"))


def draw_fresh(client: ComfyClient, cases: list[Case]) -> dict[tuple[str, int], str]:
    """Every result once, from a server that has done nothing else."""
    found = {}
    for case in cases:
        for seed in SEEDS:
            client.succeed(case.make(seed))
            found[case.name, seed] = digest(read_kept(client.server.base, RESULT))
    return found
