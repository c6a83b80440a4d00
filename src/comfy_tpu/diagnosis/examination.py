"""Gathers facts and checks them; a failing probe becomes a finding, because broken machines are the normal case
here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from packaging.requirements import Requirement

import comfy_tpu
from comfy_tpu.compiler.cache import cache_directory
from comfy_tpu.config import CacheConfig
from comfy_tpu.diagnosis import checks, facts
from comfy_tpu.diagnosis.checks import Finding
from comfy_tpu.diagnosis.tested_versions import read_tested_versions

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Probes:
    """The functions that gather facts; tests replace them."""

    python: Callable[[], facts.Python] = facts.python
    requirements: Callable[[], tuple[str, ...]] = facts.requirements
    versions: Callable[[Iterable[str]], Mapping[str, str | None]] = facts.versions
    devices: Callable[[], facts.Devices] = facts.devices
    torch_extensions: Callable[[], Mapping[str, facts.TorchExtension]] = facts.torch_extensions
    hardware: Callable[[], facts.Hardware] = facts.hardware
    host_memory: Callable[[], facts.HostMemory] = facts.host_memory
    compile_cache: Callable[[], facts.Directory] = lambda: facts.directory(cache_directory(CacheConfig()), "*-cache")
    model_cache: Callable[[], facts.Directory] = lambda: facts.directory(facts.model_cache_directory(), "models--*")


@dataclasses.dataclass(frozen=True)
class Report:
    """The facts and findings. A fact that could not be gathered is None, and a finding gives the reason."""

    python: facts.Python | None
    versions: Mapping[str, str | None]
    devices: facts.Devices | None
    torch_extensions: Mapping[str, facts.TorchExtension] | None
    hardware: facts.Hardware | None
    host_memory: facts.HostMemory | None
    compile_cache: facts.Directory | None
    model_cache: facts.Directory | None
    findings: tuple[Finding, ...]
    model: facts.ModelFacts | None = None
    """Where one was asked about."""
    hosts: tuple[Any, ...] | None = None
    """The hosts of a run (`diagnosis.hosts.HostFacts`), where several were asked about."""

    @property
    def blocked(self) -> bool:
        return any(finding.status == "blocked" for finding in self.findings)


class _Findings:
    def __init__(self) -> None:
        self.found: list[Finding] = []

    def attempt(self, name: str, action: Callable[..., T], *arguments: object) -> T | None:
        try:
            return action(*arguments)
        except Exception as failure:  # noqa: BLE001 - a check that fails is itself a finding
            detail = f"could not be checked: {type(failure).__name__}: {failure}"
            self.found.append(Finding(name, "warning", detail))
            return None

    def judge(self, name: str, check: Callable[..., Finding | None], *given: object) -> None:
        if any(fact is None for fact in given):
            return  # the attempt to learn it has already left a finding
        if finding := self.attempt(name, check, *given):
            self.found.append(finding)


def examine(
    probes: Probes | None = None,
    *,
    model: str | None = None,
    look_at_model: Callable[[str, facts.Devices, facts.HostMemory | None], facts.ModelFacts] = facts.model,
) -> Report:
    """`model`: also whether it would run here. Its weights are not read, and nothing is downloaded."""
    probes = probes or Probes()
    findings = _Findings()

    tested = findings.attempt("tested versions", read_tested_versions) or {}
    python = findings.attempt("python", probes.python)
    findings.judge("python", checks.check_python, python, tested.get("python", ()))

    lines = findings.attempt("requirements", probes.requirements) or ()
    requirements = [Requirement(line) for line in lines]
    names = [requirement.name for requirement in requirements] + list(facts.COMPANIONS)
    versions = dict(findings.attempt("versions", probes.versions, names) or {})
    for requirement in requirements if versions else []:
        findings.judge(requirement.name, checks.check_package, requirement, versions, tested.get(requirement.name, ()))

    devices = findings.attempt("devices", probes.devices)
    hardware = findings.attempt("hardware", probes.hardware)
    findings.judge("devices", checks.check_devices, devices, versions)
    findings.judge("tracing", checks.check_tracing, devices, versions)
    torch_extensions = findings.attempt("torch extensions", probes.torch_extensions)
    for name in torch_extensions or ():
        findings.judge(name, checks.check_torch_extension, name, torch_extensions, versions)
    findings.judge("demo models", checks.check_demo_models, devices, torch_extensions or {})
    findings.judge("tpu", checks.check_tpu, hardware, devices, versions)
    findings.judge("gpu", checks.check_nvidia, hardware, devices, versions)

    host_memory = findings.attempt("host memory", probes.host_memory)
    findings.judge("host memory", checks.check_memory, host_memory)
    compile_cache = findings.attempt("compile cache", probes.compile_cache)
    findings.judge("compile cache", checks.check_compile_cache, compile_cache)
    model_cache = findings.attempt("model cache", probes.model_cache)
    findings.judge("model cache", checks.check_model_cache, model_cache)

    found = None
    if model is not None and devices is not None:
        found = findings.attempt("model", look_at_model, model, devices, host_memory)
        for finding in checks.check_model(found) if found is not None else ():
            findings.found.append(finding)

    return Report(
        python=python,
        versions={"comfy-tpu": comfy_tpu.__version__, **versions},
        devices=devices,
        torch_extensions=torch_extensions,
        hardware=hardware,
        host_memory=host_memory,
        compile_cache=compile_cache,
        model_cache=model_cache,
        findings=tuple(findings.found),
        model=found,
    )
