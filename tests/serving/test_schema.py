"""Requests made from the served OpenAPI schema: no answer of 500 or more, and answers as the schema has them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.families import small_flux
from tests.serving.stand_in import Executor, running

schemathesis = pytest.importorskip("schemathesis")

KEY = "a-key-of-ann-0001"


@schemathesis.serializer("application/x-safetensors")
def send_bytes(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


HEADERS = {"Authorization": f"Bearer {KEY}"}


def check_cases(directory: Path, model: str, cases_per_operation: int) -> int:
    """The number of cases that were sent."""
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    count = itertools.count()
    with running(directory, model, keys={"ann": KEY}) as (client, service, executor):
        executor.may_go_on.set()  # a generated prompt may be "wait"
        app = client.app
        kind = service.find_model(None).kind
        ids = [client.post(f"/v1/{kind}s", json={"prompt": "a cat"}, headers=HEADERS).json()["id"] for _ in range(3)]
        schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=HEADERS)
        for each in schema.get_all_operations():
            operation = each.ok()

            @settings(
                max_examples=cases_per_operation,
                database=None,
                derandomize=True,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.explicit, Phase.generate],
            )
            @given(case=operation.as_strategy())
            def send(case: Any) -> None:
                number = next(count)
                if "id_" in case.path_parameters and number % 2 and case.method != "DELETE":
                    case.path_parameters["id_"] = ids[number % len(ids)]  # else every answer would be 404
                case.call_and_validate(headers=HEADERS, checks=checks)

            send()
        schema_of_bodies = client.get("/openapi.json", headers=HEADERS).json()["paths"]["/v1/videos"]["post"]
        assert set(schema_of_bodies["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    return next(count)


def test_a_few_cases_of_every_operation(tmp_path: Path) -> None:
    assert check_cases(tmp_path, "demo", 4) > 80


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cases"), [("demo", 130), ("flux", 60)])
def test_thousands_of_cases(model: str, cases: int, tmp_path: Path) -> None:
    name = model if model == "demo" else str(small_flux.directory("dev"))
    assert check_cases(tmp_path, name, cases) > 25 * cases
