"""Jobs on several hosts as one: the first host has the ledger and gives out jobs, and all carry them out together."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from comfy_tpu.jobs.execution import Executor
from comfy_tpu.jobs.ledger import Job
from comfy_tpu.jobs.request import Request
from comfy_tpu.parallel import hosts
from comfy_tpu.pipeline.progress import FetchPreview


class LeadingExecutor:
    """The first host's: tells the others of all jobs that it carries out."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._is_in_step = True
        """Whether the others wait for jobs. Where a group ended early, they are inside it until the run fails."""

    @property
    def current_jobs(self) -> tuple[str, ...]:
        return self._executor.current_jobs

    def run(self, jobs: Sequence[Job]) -> None:
        self._is_in_step = False
        hosts.first_host_value(lambda: len(jobs))
        for job in jobs:  # in a message each: a line may have a megabyte
            hosts.first_host_value(lambda job=job: _to_json(job))  # type: ignore[misc]
        self._executor.run(jobs)
        self._is_in_step = not self._executor.is_cancelled

    def render_previews(self, fetch: FetchPreview, wanted: Collection[str]) -> tuple[bytes, ...]:
        return ()  # latents may be split over the hosts, and only this one knows who watches

    def close(self) -> None:
        if self._is_in_step:
            self._is_in_step = False
            hosts.first_host_value(lambda: 0)
        self._executor.close()


def follow(executor: Executor) -> None:
    """Carries out the jobs of the first host on another one, until there are no more."""
    try:
        for jobs in _receive():
            executor.run(jobs)
    finally:
        executor.close()


def _receive() -> Iterator[list[Job]]:
    while count := hosts.first_host_value(lambda: 0):
        yield [_from_json(hosts.first_host_value(lambda: None)) for _ in range(count)]


def _to_json(job: Job) -> dict[str, object]:
    return {**dataclasses.asdict(job), "request": dict(job.request.values)}


def _from_json(fields: dict[str, object]) -> Job:
    return Job(**{**fields, "request": Request(fields["request"])})  # type: ignore[arg-type]
