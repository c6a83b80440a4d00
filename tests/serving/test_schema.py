"""Requests made from the served OpenAPI schema: no answer of 500 or more, and answers as the schema has them."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.families import small_flux
from tests.serving.stand_in import running

schemathesis = pytest.importorskip("schemathesis")
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402 - after the check above, which brings it
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi import checks as openapi_checks  # noqa: E402

CHECKS = [
    not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]

ROUND = 25
KEY = "a-key-of-ann-0001"


@schemathesis.serializer("application/x-safetensors")
def send_bytes(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


HEADERS = {"Authorization": f"Bearer {KEY}"}


def check_cases(directory: Path, model: str, cases: int) -> int:
    """Sends about `cases` of each operation, and four times as many where it has a body; the number that was sent."""
    count = itertools.count()
    with running(directory, model, keys={"ann": KEY}) as (client, service, executor):
        executor.may_go_on.set()  # a generated prompt may be "wait"
        kind = service.find_model(None).kind
        ids = [client.post(f"/v1/{kind}s", json={"prompt": "a cat"}, headers=HEADERS).json()["id"] for _ in range(3)]
        schema = schemathesis.openapi.from_asgi("/openapi.json", client.app, headers=HEADERS)
        for operation in (each.ok() for each in schema.get_all_operations()):
            share = cases * (4 if list(operation.body) else 1) // 2
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                if mode == GenerationMode.POSITIVE or list(operation.body) or list(operation.query):
                    for number in range(0, share, ROUND):
                        send_cases(operation.as_strategy(generation_mode=mode), number, min(ROUND, share), ids, count)
    return next(count)


def send_cases(strategy: Any, number: int, cases: int, ids: list[str], count: Iterator[int]) -> None:
    """`number`: of the round, for other cases than those before."""

    @seed(number)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=strategy)
    def send(case: Any) -> None:
        sent = next(count)
        if "id_" in case.path_parameters and sent % 2 and case.method != "DELETE":
            case.path_parameters["id_"] = ids[sent % len(ids)]  # else every answer would be 404
        case.call_and_validate(headers=HEADERS, checks=CHECKS)

    try:
        send()
    except ValueError as error:  # of schemathesis 4.32, which cannot make some wrong values of files
        if str(error) != "Unsupported type: 'Binary'":
            raise


def test_bodies_are_in_the_schema(tmp_path: Path) -> None:
    with running(tmp_path) as (client, _, _):
        paths = client.get("/openapi.json").json()["paths"]
    for path in ("/v1/videos", "/v1/images", "/v1/images/generations", "/v1/images/edits"):
        content = paths[path]["post"]["requestBody"]["content"]
        assert set(content) == {"application/json", "multipart/form-data"}
        assert set(content["application/json"]["schema"]["properties"]) >= {"prompt", "num_inference_steps", "steps"}


def test_a_few_cases_of_every_operation(tmp_path: Path) -> None:
    assert check_cases(tmp_path, "demo", 4) > 100


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cases", "least"), [("demo", 140, 3500), ("flux", 60, 1500)])
def test_five_thousand_cases(model: str, cases: int, least: int, tmp_path: Path) -> None:
    name = model if model == "demo" else str(small_flux.directory("dev"))
    sent = check_cases(tmp_path, name, cases)
    print(f"{sent} cases of {model}")  # noqa: T201 - for the record, with -s
    assert sent >= least
