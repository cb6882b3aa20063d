"""TLS: the port speaks HTTPS, and files that cannot be used are told at once."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import httpx
import openai
import pytest

from server.assemble import StartError, build_service
from server.run import _Runner
from server.service import Service
from server.settings import SettingsError, load_settings
from server.tls import TlsError, check_tls, tls_options
from tests.server import builders
from tests.server.builders import MODEL_NAME
from tests.server.fixtures import server_fixtures

FILES = Path(__file__).parent / "tls"
CERTIFICATE, KEY, ENCRYPTED = FILES / "certificate.pem", FILES / "key.pem", FILES / "encrypted_key.pem"
PASSWORD = "correct"
SETTINGS = {
    "ssl_certfile": str(CERTIFICATE),
    "ssl_keyfile": str(ENCRYPTED),
    "ssl_keyfile_password": PASSWORD,
    "ssl_ca_certs": str(CERTIFICATE),
}


@pytest.fixture(scope="module")
def service(tiny_model: Path, model_home: Path) -> Service:
    return builders.build_service(tiny_model, model_home, **SETTINGS)


base, _ = server_fixtures("module")


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


def known() -> ssl.SSLContext:
    context = trusting()
    context.load_cert_chain(CERTIFICATE, KEY)
    return context


def test_a_client_whose_certificate_is_trusted_is_served_over_tls(base: str) -> None:
    assert base.startswith("https://")
    with (
        httpx.Client(verify=known(), trust_env=False) as transport,
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", http_client=transport) as client,
    ):
        whole = client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=4, seed=1)
        chunks = client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=4, seed=1, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_a_client_without_a_certificate_is_not_served(base: str) -> None:
    with httpx.Client(verify=trusting(), trust_env=False) as client, pytest.raises(httpx.HTTPError):
        client.get(f"{base}/live")


def test_a_client_that_does_not_know_the_server_does_not_trust_it(base: str) -> None:
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
        client.get(f"{base}/live")


def test_the_port_speaks_nothing_else(base: str) -> None:
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.HTTPError):
        client.get(base.replace("https", "http") + "/live")


def test_the_start_up_line_says_https(service: Service) -> None:
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as sock:
        _Runner(service, sock, lines.append, lambda *_: None)._announce()  # type: ignore[arg-type,return-value]
        port = sock.getsockname()[1]
    assert lines[0].endswith(f"on https://127.0.0.1:{port}")


def test_nothing_of_the_files_is_told(service: Service) -> None:
    assert PASSWORD not in repr(service.settings)
    shown = str(service.info)
    assert PASSWORD not in shown
    assert str(FILES) not in shown
    assert "ssl" not in str(sorted(service.info["settings"]))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ssl_certfile": "no/such.pem"}, "ssl_certfile no/such.pem cannot be read: No such file"),
        ({"ssl_keyfile": "no/such.pem"}, "ssl_keyfile no/such.pem cannot be read"),
        ({"ssl_ca_certs": "no/such.pem"}, "ssl_ca_certs no/such.pem cannot be read"),
        ({"ssl_certfile": str(KEY)}, "and its key cannot be used"),
        ({"ssl_keyfile": str(CERTIFICATE)}, "and its key cannot be used"),
        ({"ssl_keyfile_password": "false"}, "and its key cannot be used"),
        ({"ssl_ca_certs": str(KEY)}, "ssl_ca_certs .* cannot be used"),
    ],
)
def test_files_that_cannot_be_used_are_one_line_at_the_start(changes: dict[str, str], match: str) -> None:
    settings = load_settings({**SETTINGS, **changes, "model": "no-such-model"})
    with pytest.raises(TlsError, match=match) as caught:
        check_tls(settings)
    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)
    with pytest.raises(StartError, match=match):
        build_service(settings, print)


def test_an_encrypted_key_without_a_password_does_not_wait_at_the_terminal() -> None:
    with pytest.raises(TlsError, match="and its key cannot be used"):
        check_tls(load_settings({"ssl_certfile": str(CERTIFICATE), "ssl_keyfile": str(ENCRYPTED)}))


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"])
def test_parts_of_tls_without_a_certificate_are_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} needs ssl_certfile"):
        load_settings({name: "x"})


def test_a_password_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("ssl_keyfile_password: 471108\n")
    with pytest.raises(SettingsError, match="ssl_keyfile_password") as caught:
        load_settings({}, file)
    assert "471108" not in str(caught.value)


def test_without_a_certificate_there_are_no_options() -> None:
    assert tls_options(load_settings()) == {}
    check_tls(load_settings())
