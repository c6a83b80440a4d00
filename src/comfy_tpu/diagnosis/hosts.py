"""What each host of a run has, as the doctor tells it: gathered from the reports of all of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from comfy_tpu.diagnosis.checks import Finding
from comfy_tpu.diagnosis.examination import Report


@dataclasses.dataclass(frozen=True)
class HostFacts:
    process: int
    host: str
    platform: str | None
    """ "tpu", "gpu", "cpu"; None where no device started."""
    devices: int
    """The number of devices of this host alone."""
    kind: str
    problems: tuple[str, ...]
    """Why a run cannot start on this host."""


def summarize_host(report: Report) -> dict[str, Any]:
    """What one host tells the first one, as JSON."""
    found = report.devices.devices if report.devices else ()
    return {
        "platform": report.devices.platform if report.devices else None,
        "devices": len(found),
        "kind": found[0].kind if found else "",
        "problems": [f"{each.name}: {each.detail}" for each in report.findings if each.status == "blocked"],
    }


def join_reports(report: Report, names: Mapping[int, str], summaries: Mapping[int, Mapping[str, Any]]) -> Report:
    """The report of the first host, with what the others told."""
    hosts = tuple(
        HostFacts(number, names[number], each["platform"], each["devices"], each["kind"], tuple(each["problems"]))
        for number, each in sorted(summaries.items())
    )
    return dataclasses.replace(report, hosts=hosts, findings=(*report.findings, check_hosts(hosts)))


def check_hosts(hosts: tuple[HostFacts, ...]) -> Finding:
    described = [f"{each.process} {each.host}: {_devices(each)}" for each in hosts]
    detail = f"{len(hosts)} processes; " + ", ".join(described)
    if broken := [each for each in hosts if each.problems]:
        first = broken[0]
        fix = f"run `comfy-tpu doctor` on {first.host}, and do what it says there"
        return Finding("hosts", "blocked", f"{detail}; process {first.process}: {first.problems[0]}", fix)
    kinds = Counter((each.platform, each.devices, each.kind) for each in hosts)
    if len(kinds) > 1:
        usual = kinds.most_common(1)[0][0]
        other = next(each for each in hosts if (each.platform, each.devices, each.kind) != usual)
        return Finding(
            "hosts",
            "warning",
            f"{detail}; process {other.process} differs from most others",
            "give every host the same devices: look at JAX_PLATFORMS, XLA_FLAGS and the driver there",
        )
    total = sum(each.devices for each in hosts)
    return Finding("hosts", "ok", f"{detail}; together {total} devices, so a mesh has sizes whose product is {total}")


def _devices(host: HostFacts) -> str:
    return f"{host.devices} × {host.kind or host.platform}" if host.devices else "no device"
