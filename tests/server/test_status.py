"""What the server says of itself."""

from __future__ import annotations

import httpx
import openai
import pytest

from server.service import Service
from tests.server.builders import CONTEXT, MODEL_NAME


def test_models_are_listed_as_the_openai_client_reads_them(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [MODEL_NAME]
        card = client.models.retrieve(MODEL_NAME)
    assert card.object == "model"
    assert card.max_model_len == CONTEXT


def test_liveness_readiness_and_version(http: httpx.Client) -> None:
    assert http.get("/live").json() == {"status": "alive"}
    assert http.get("/health").json() == {"status": "ready"}
    assert set(http.get("/version").json()) == {"version"}


@pytest.mark.parametrize("path", ["/live", "/health"])
def test_head_is_get_without_the_body(http: httpx.Client, path: str) -> None:
    got, head = http.get(path), http.head(path)
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == got.headers["content-length"]


def test_server_info_tells_what_was_measured_and_where_the_limits_are(http: httpx.Client, service: Service) -> None:
    info = http.get("/v1/server_info").json()
    exactness = info["exactness"]
    assert exactness["level"] == "L0"
    names = {check["name"] for check in exactness["checks"]}
    assert {"finite logits", "each place in a tile", "sampling", "logprobs"} <= names
    assert any(name.startswith("128 rows with a prefill") for name in names)  # the token budget
    assert exactness["padding"].startswith("rows to tiles of ")
    assert isinstance(exactness["cached"], bool)
    assert info["kernels"]["setting"] in ("auto", "torch")
    assert info["kernels"]["forward"] == info["executor"].partition("/")[2]
    assert info["executor"]
    assert info["model"]["served_names"] == [MODEL_NAME]
    assert info["kv_cache"]["num_blocks"] == service.settings.num_blocks
    assert info["limits"]["max_model_len"] == CONTEXT
    assert info["settings"]["num_speculative_tokens"] == info["speculation"]["num_speculative_tokens"]


def test_the_documentation_describes_every_field_of_a_completion(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    body = schema["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "logit_bias", "speculation"} <= set(body["properties"])
    assert http.get("/docs").status_code == 200
