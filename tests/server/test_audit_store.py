"""The folder of audit records: bounded, private, whole files only."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from server.assemble import StartError, _audit_store
from server.audit_store import AuditStore
from tests.server.builders import build_settings


def save(store: AuditStore, *records: bytes) -> list[str | None]:
    names = []
    for record in records:
        names.append(store.save(record))
        store._thread.submit(lambda: None).result()  # written before the next
    return names


def test_the_newest_records_stay_within_both_bounds(tmp_path: Path) -> None:
    store = AuditStore(tmp_path / "store", max_files=3, max_bytes=100)
    names = save(store, b"a" * 10, b"b" * 10, b"c" * 10, b"d" * 10)
    assert sorted(file.name for file in store.folder.iterdir()) == names[1:]
    (last,) = save(store, b"e" * 95)
    assert [file.name for file in store.folder.iterdir()] == [last]
    assert save(store, b"f" * 101) == [None]
    assert [file.name for file in store.folder.iterdir()] == [last]
    store.close()


def test_files_and_folder_are_private_and_others_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    mine = tmp_path / "store" / "mine.json"
    mine.write_text("mine")
    store = AuditStore(tmp_path / "store", max_files=1, max_bytes=100)
    (_, name) = save(store, b"a", b"b")
    assert name is not None
    assert stat.S_IMODE((store.folder / name).stat().st_mode) == 0o600
    assert sorted(store.folder.iterdir()) == sorted([mine, store.folder / name])
    store.close()


def test_a_folder_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StartError, match=r"audit_store .* cannot be used"):
        _audit_store(build_settings(audit_store=file, audit_rate=0.1))
