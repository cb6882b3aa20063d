"""API keys: read from a file or the environment, kept as SHA-256 digests, compared in constant time.

A line of the file is a name and a key, or the key's digest, and what the name may use of the server if that is not
what the settings say::

    # name  key                                limits
    alice   sk-4fQ0...
    batch   sha256:9f86d081884c7d65...         requests=600 tokens=none

A name may have several keys (the old and the new one, say); they are one user.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from server.rate import RateLimits

KEYS_VARIABLE = "TRUEDRAFT_API_KEYS"
MAX_NAME = 64
MAX_FILE_BYTES = 1024**2

_NAME = re.compile(rf"[A-Za-z0-9._\-]{{1,{MAX_NAME}}}")
_KEY = re.compile(r"[\x21-\x7e]+")
_DIGEST_MARK = "sha256:"
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_LIMIT = re.compile(r"(requests|tokens)=(none|[0-9]{1,15})")


class KeysError(Exception):
    """The keys cannot be used; the message is one line that says where, and never holds a key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    digest: bytes = field(repr=False)  # SHA-256 of the key


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """All keys. Without any, everybody may use the server."""

    keys: tuple[ApiKey, ...] = ()
    limits: dict[str, dict[str, int | None]] = field(default_factory=dict)  # by name: fields of RateLimits that differ

    def __bool__(self) -> bool:
        return bool(self.keys)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key.name for key in self.keys))

    def find(self, key: bytes) -> str | None:
        """The name that ``key`` belongs to. How long it takes tells the number of keys and nothing else of them."""
        digest = hashlib.sha256(key).digest()
        found = None
        for known in self.keys:
            if hmac.compare_digest(known.digest, digest):
                found = known.name
        return found

    def limits_of(self, name: str, default: RateLimits) -> RateLimits:
        own = self.limits.get(name, {})
        return RateLimits(
            requests=own.get("requests", default.requests),
            tokens=own.get("tokens", default.tokens),
        )


NO_KEYS = ApiKeys()


def load_keys(path: Path | None, environment: MutableMapping[str, str]) -> ApiKeys:
    """The keys of a file and of the environment together. Raises KeysError.

    The variable is taken out of ``environment``, so that no child process inherits it. Naming a source that holds no
    key is an error: a secret that was not filled in must not open the server to everybody.
    """
    found = _Found()
    text = environment.pop(KEYS_VARIABLE, None)
    if text is not None:
        before = len(found.keys)
        for i, entry in enumerate(filter(None, (part.strip() for part in text.split(","))), start=1):
            name, colon, key = entry.partition(":")
            where = f"{KEYS_VARIABLE}, entry {i}"
            if not colon:
                raise KeysError(f"{where}: write name:key")
            found.add(where, name.strip(), key.strip())
        if len(found.keys) == before:
            raise KeysError(f"{KEYS_VARIABLE} is set but holds no key")
    if path is not None:
        before = len(found.keys)
        for number, line in _lines(path):
            where = f"api_keys_file {path}, line {number}"
            name, *rest = line.split()
            if not rest:
                raise KeysError(f"{where}: write a name and a key")
            found.add(where, name, rest[0], rest[1:])
        if len(found.keys) == before:
            raise KeysError(f"api_keys_file {path} holds no key")
    return ApiKeys(tuple(found.keys), found.limits)


def open_to_others(path: Path) -> str | None:
    """Its mode, as ``0644``, if the group or others may read the file or put other keys into it; else None."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None
    return f"{mode:04o}" if mode & (stat.S_IRWXG | stat.S_IRWXO) else None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are neither empty nor a comment, with their numbers. Raises KeysError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise KeysError(f"api_keys_file {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        # The error itself holds the file's bytes.
        raise KeysError(f"api_keys_file {path} is not valid UTF-8 (byte {error.start})") from None
    if len(raw) > MAX_FILE_BYTES:
        raise KeysError(f"api_keys_file {path} is larger than {MAX_FILE_BYTES} bytes")
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line.strip()


class _Found:
    """The keys read so far; what contradicts them is an error."""

    def __init__(self) -> None:
        self.keys: list[ApiKey] = []
        self.limits: dict[str, dict[str, int | None]] = {}
        self._names: dict[bytes, str] = {}  # by digest

    def add(self, where: str, name: str, key: str, limits: list[str] | None = None) -> None:
        if not _NAME.fullmatch(name):
            raise KeysError(f"{where}: a name has 1 to {MAX_NAME} letters, digits, dots, dashes or underscores")
        digest = _digest(where, name, key)
        other = self._names.setdefault(digest, name)
        if other != name:
            raise KeysError(f"{where}: {name} and {other} have the same key")
        self.keys.append(ApiKey(name, digest))
        own = _limits(where, limits or [])
        for what, value in own.items():
            if self.limits.setdefault(name, {}).setdefault(what, value) != value:
                raise KeysError(f"{where}: {name} has another limit for {what} already")


def _digest(where: str, name: str, key: str) -> bytes:
    if key.startswith(_DIGEST_MARK):
        digest = key.removeprefix(_DIGEST_MARK)
        if not _HEX.fullmatch(digest):
            raise KeysError(f"{where}: the digest of {name}'s key is not {_DIGEST_MARK} and 64 hexadecimal digits")
        return bytes.fromhex(digest)
    if not _KEY.fullmatch(key):
        raise KeysError(f"{where}: the key of {name} must be printable ASCII without spaces")
    return hashlib.sha256(key.encode("ascii")).digest()


def _limits(where: str, words: list[str]) -> dict[str, int | None]:
    limits: dict[str, int | None] = {}
    for word in words:
        match = _LIMIT.fullmatch(word)
        value = None if match is None or match[2] == "none" else int(match[2])
        # The word is not shown: it may be a part of a key that was written with spaces.
        if match is None or value == 0 or match[1] in limits:
            raise KeysError(
                f"{where}: behind the key stand requests=N or tokens=N, each once, N being 1 or more or none"
            )
        limits[match[1]] = value
    return limits
