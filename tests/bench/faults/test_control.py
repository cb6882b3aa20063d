"""The endpoint that arms faults, beside an application that knows nothing of it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from bench.faults.__main__ import serve_with_faults
from bench.faults.control import FaultsEndpoint
from bench.faults.faults import POINTS, Faults
from server.cli import main


def ask(faults: Faults, method: str, path: str = "/faults", json: object = None) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(FaultsEndpoint(PlainTextResponse("the server"), faults))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, json=json)

    return asyncio.run(send())


def test_faults_are_armed_told_and_cleared() -> None:
    faults = Faults()
    fault = {"point": "sample", "action": "hang", "match": 7, "times": 2, "after": 1, "seconds": 0.5}
    assert ask(faults, "POST", json=fault).json() == {"number": 1}
    assert faults.take("sample", (7,)) is None
    told = ask(faults, "GET").json()
    assert told == {"faults": [{"number": 1, "fault": fault, "passed": 1, "fired": 0, "hanging": 0}]}
    assert ask(faults, "DELETE").json() == told
    assert ask(faults, "GET").json() == {"faults": []}


@pytest.mark.parametrize("point", POINTS)
def test_every_point_can_be_named(point: str) -> None:
    assert ask(Faults(), "POST", json={"point": point}).status_code == 200


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({}, "point"),
        ({"point": "nonsense"}, "point"),
        ({"point": "sample", "action": "explode"}, "action"),
        ({"point": "sample", "times": 0}, "times"),
        ({"point": "sample", "unknown": 1}, "unknown"),
        ([], "Input"),
    ],
    ids=str,
)
def test_a_fault_that_is_none_is_a_400_that_says_why(fault: Any, told: str) -> None:
    faults = Faults()
    answer = ask(faults, "POST", json=fault)
    assert answer.status_code == 400
    assert told in answer.json()["error"]
    assert faults.armed == ()


def test_an_engine_out_of_reach_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--engine-process"], serve_with_faults) == 1
    assert "error: engine_process cannot be on" in capsys.readouterr().err


def test_all_else_is_the_applications() -> None:
    assert ask(Faults(), "GET", "/faults/").text == "the server"
    assert ask(Faults(), "PUT").status_code == 405
