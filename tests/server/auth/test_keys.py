"""API keys: what a file and the environment may hold, and that nothing of a key is kept or shown."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.auth import keys as keys_module
from server.auth.keys import KEYS_VARIABLE, NO_KEYS, ApiKeys, KeysError, load_keys, open_to_others
from server.rate import RateLimits

SECRET = "sk-very-secret-1234"
DIGEST = hashlib.sha256(b"hashed-key").hexdigest()


def read(tmp_path: Path, text: str, **environment: str) -> ApiKeys:
    path = tmp_path / "keys"
    path.write_text(text)
    return load_keys(path, environment)


def test_a_file_holds_names_and_keys_or_digests_between_comments(tmp_path: Path) -> None:
    keys = read(tmp_path, f"# who\n\n  alice   {SECRET}\nbob sha256:{DIGEST.upper()}\n")
    assert keys.names == ("alice", "bob")
    assert keys.find(SECRET.encode()) == "alice"
    assert keys.find(b"hashed-key") == "bob"


def test_file_and_environment_hold_keys_together_and_the_environment_forgets_them(tmp_path: Path) -> None:
    environment = {KEYS_VARIABLE: f"carol:one, dave:sha256:{DIGEST},", "OTHER": "stays"}
    path = tmp_path / "keys"
    path.write_text("alice two\n")
    keys = load_keys(path, environment)
    assert [keys.find(key) for key in (b"one", b"hashed-key", b"two")] == ["carol", "dave", "alice"]
    assert environment == {"OTHER": "stays"}


def test_without_a_source_there_are_no_keys() -> None:
    assert not load_keys(None, {})
    assert NO_KEYS.find(b"") is None


def test_a_name_may_have_two_keys(tmp_path: Path) -> None:
    keys = read(tmp_path, "alice old requests=5\nalice new\n")
    assert keys.names == ("alice",)
    assert keys.find(b"old") == keys.find(b"new") == "alice"
    assert keys.limits_of("alice", RateLimits(1, 2)) == RateLimits(5, 2)


def test_the_limits_of_a_line_replace_those_of_the_settings(tmp_path: Path) -> None:
    keys = read(tmp_path, "a ka requests=7 tokens=none\nb kb tokens=9\nc kc\n")
    default = RateLimits(100, 200)
    assert keys.limits_of("a", default) == RateLimits(7, None)
    assert keys.limits_of("b", default) == RateLimits(100, 9)
    assert keys.limits_of("c", default) == default


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "holds no key"),
        ("# alice key\n\n", "holds no key"),
        ("alice\n", "line 1: write a name and a key"),
        (f"\nal/ice {SECRET}\n", "line 2: a name has"),
        (f"{'a' * 65} {SECRET}", "a name has"),
        (f"alice {SECRET}\nbob {SECRET}\n", "line 2: bob and alice have the same key"),
        (f"alice sha256:{DIGEST[:-1]}", "digest of alice's key"),
        (f"alice sha256:{SECRET}", "digest of alice's key"),
        (f"alice {SECRET}ä", "printable ASCII"),
        (f"alice {SECRET} requests=0", "behind the key"),
        (f"alice first {SECRET}", "behind the key"),
        (f"alice {SECRET} requests=1 requests=1", "behind the key"),
        (f"alice {SECRET} tokens=-5", "behind the key"),
        (f"alice {SECRET} requests=1\nalice other requests=2", "line 2: alice has another limit for requests"),
    ],
)
def test_a_bad_file_is_one_line_that_says_where_and_shows_no_key(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(KeysError, match=match) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("text", ["", ",", " "])
def test_an_empty_variable_does_not_open_the_server(text: str) -> None:
    with pytest.raises(KeysError, match="holds no key"):
        load_keys(None, {KEYS_VARIABLE: text})


def test_an_entry_of_the_variable_without_a_name_is_not_shown() -> None:
    with pytest.raises(KeysError, match="entry 2: write name:key") as caught:
        load_keys(None, {KEYS_VARIABLE: f"alice:one,{SECRET}"})
    assert SECRET not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="cannot be read: No such file"):
        load_keys(tmp_path / "none", {})
    (tmp_path / "binary").write_bytes(b"alice \xff" + SECRET.encode())
    with pytest.raises(KeysError, match="not valid UTF-8") as caught:
        load_keys(tmp_path / "binary", {})
    assert SECRET not in str(caught.value)
    (tmp_path / "long").write_bytes(b"#" * (keys_module.MAX_FILE_BYTES + 1))
    with pytest.raises(KeysError, match="larger than"):
        load_keys(tmp_path / "long", {})


def test_neither_a_key_nor_its_digest_is_shown_by_the_objects(tmp_path: Path) -> None:
    keys = read(tmp_path, f"alice {SECRET}\nbob sha256:{DIGEST}\n")
    digest = hashlib.sha256(SECRET.encode()).digest()
    for text in (repr(keys), str(keys.keys)):
        assert SECRET not in text
        assert repr(digest) not in text
        assert digest.hex() not in text


@given(st.sampled_from([b"one", b"two", b"three", b"none of them", b""]))
def test_every_key_is_compared_whichever_matches(key: bytes) -> None:
    keys = load_keys(None, {KEYS_VARIABLE: "a:one,b:two,c:three"})
    compared = []

    class Recording:
        @staticmethod
        def compare_digest(known: bytes, given: bytes) -> bool:
            compared.append((known, len(given)))
            return hmac.compare_digest(known, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_module, "hmac", Recording)
        found = keys.find(key)
    assert found == {b"one": "a", b"two": "b", b"three": "c"}.get(key)
    assert compared == [(each.digest, 32) for each in keys.keys]


@pytest.mark.parametrize(
    ("mode", "told"),
    [(0o600, None), (0o400, None), (0o700, None), (0o640, "0640"), (0o644, "0644"), (0o620, "0620"), (0o601, "0601")],
)
def test_a_file_that_others_may_use_is_known_by_its_mode(tmp_path: Path, mode: int, told: str | None) -> None:
    path = tmp_path / "keys"
    path.touch()
    path.chmod(mode)
    assert open_to_others(path) == told


def test_a_file_that_went_away_is_open_to_nobody(tmp_path: Path) -> None:
    assert open_to_others(tmp_path / "none") is None
