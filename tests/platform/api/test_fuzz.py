"""Requests made from our own OpenAPI description, right and wrong ones: none is answered with a 5xx."""

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode

from lazytrain.jobs.errors import DataError

Service = Any


def test_no_request_makes_the_service_fail(service: Service) -> None:
    service.planner.answer = DataError("no usable row")
    client = service.client("root")
    schema = schemathesis.openapi.from_dict(client.get("/api/openapi.json").json())
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:
        _try(operation, client)


def _try(operation: Any, client: Any) -> None:
    cases = st.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )

    @given(case=cases)
    @settings(
        max_examples=4,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def answers(case: Any) -> None:
        sent = case.as_transport_kwargs(base_url="http://127.0.0.1:8470")
        sent["headers"] = {**(sent.get("headers") or {}), **dict(client.headers)}
        answer = client.request(**{name: value for name, value in sent.items() if name not in ("cookies",)})
        assert answer.status_code < 500, (operation.label, answer.text)

    answers()
