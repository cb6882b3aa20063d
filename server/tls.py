"""TLS of the port: settings in, uvicorn's options out."""

from __future__ import annotations

import ssl
from typing import Any

from server.settings import Settings


class TlsError(Exception):
    """Certificate and key cannot be used; the message is one line."""


def uses_tls(settings: Settings) -> bool:
    return settings.ssl_certfile is not None


def tls_options(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of ``uvicorn.Config``; empty without TLS."""
    if not uses_tls(settings):
        return {}
    return {
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile,
        "ssl_keyfile_password": _password(settings),
        "ssl_ca_certs": settings.ssl_ca_certs,
        # Naming who signs clients' certificates asks for them; uvicorn by itself would load the file and ask for none.
        "ssl_cert_reqs": ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        "ssl_ciphers": "DEFAULT",
    }


def check_tls(settings: Settings) -> None:
    """Raises TlsError if the files cannot be used: now, instead of when the model is loaded."""
    if not uses_tls(settings):
        return
    assert settings.ssl_certfile is not None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(settings, name)
        try:
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise TlsError(f"{name} {path} cannot be read: {error.strerror or error}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Without one, OpenSSL would ask for it at the terminal.
    password = _password(settings) or ""
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, lambda: password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise TlsError(f"ssl_certfile {settings.ssl_certfile} and its key cannot be used: {_reason(error)}") from None
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(f"ssl_ca_certs {settings.ssl_ca_certs} cannot be used: {_reason(error)}") from None


def _password(settings: Settings) -> str | None:
    return None if settings.ssl_keyfile_password is None else settings.ssl_keyfile_password.get_secret_value()


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
    return str(reason).replace("_", " ").lower()
