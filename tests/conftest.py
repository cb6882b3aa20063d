"""What all tests share: no network by accident, and the default model where a test needs a real one."""

from __future__ import annotations

import functools
import gc
import os
import ssl

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports the hub's client
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Idle threads sleep at once: two programs whose threads spin for each other's cores cost ten times and more.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Every engine of the tests checks every slot that it reads or writes.
os.environ.setdefault("TRUEDRAFT_LEDGER", "1")

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certifi
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.specdec.gtest import Family

# The machine decides how long an example takes, so no deadline; a failure is printed as a line that replays it.
settings.register_profile("truedraft", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("truedraft")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: looking at all of them again and again is a part of what importing takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _authorities_are_read_once() -> Iterator[None]:
    """Each client of httpx reads those of the whole world, which takes longer than most of what it then asks."""
    fresh = ssl.create_default_context
    once = functools.cache(fresh)
    of_the_world = (certifi.where(), os.environ.get("SSL_CERT_FILE"))

    def context(*arguments: Any, **options: Any) -> ssl.SSLContext:
        return (once if options.get("cafile", "") in of_the_world else fresh)(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", context)
        yield


@pytest.fixture(scope="session")
def family() -> Family:
    """All distribution tests of a run, which share one error rate."""
    from tests.specdec.gtest import Family

    return Family()


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The converted default model; fetched by the code that `make serve` uses if this is the first time."""
    from model.source import resolve_model

    return resolve_model().path
