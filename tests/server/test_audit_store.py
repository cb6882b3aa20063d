"""The folder of audit records: bounded, private, whole files only."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.assemble import StartError, _audit_store
from server.audit_store import AuditStore
from tests.server.builders import build_settings


def save(store: AuditStore, *records: bytes) -> list[str | None]:
    """One after the other; returns the names of the files, of which each is there when its name is told."""
    names: list[str | None] = []

    def done(name: str | None) -> None:
        assert name is None or (store.folder / name).is_file()
        names.append(name)

    for record in records:
        store.save(record, done)
        store._thread.submit(lambda: None).result()  # written before the next
    assert len(names) == len(records)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir(mode=0o700)
    return tmp_path / "store"


def test_the_newest_records_stay_within_both_bounds(tmp_path: Path) -> None:
    store = AuditStore(tmp_path / "store", max_files=3, max_bytes=100)
    names = save(store, b"a" * 10, b"b" * 10, b"c" * 10, b"d" * 10)
    assert sorted(file.name for file in store.folder.iterdir()) == names[1:]
    (last,) = save(store, b"e" * 95)
    assert [file.name for file in store.folder.iterdir()] == [last]
    assert save(store, b"f" * 101) == [None]
    assert [file.name for file in store.folder.iterdir()] == [last]
    store.close()


def test_a_new_folder_and_its_files_are_private(tmp_path: Path) -> None:
    store = AuditStore(tmp_path / "store", max_files=1, max_bytes=100)
    (name,) = save(store, b"a")
    assert name is not None
    assert stat.S_IMODE((store.folder / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    store.close()


def own_name(i: int) -> str:
    return f"audit-{i:020d}-1-000001.json"


OTHERS: dict[str, Callable[[Path], object]] = {
    "another file": lambda folder: (folder / "mine.json").write_text("mine"),
    "a name much like an own one": lambda folder: (folder / "audit-00.json").write_text("mine"),
    "a dangling link": lambda folder: (folder / "audit-00.json").symlink_to("nowhere"),
    "a dangling link with an own name": lambda folder: (folder / own_name(0)).symlink_to("nowhere"),
    "a link to a file": lambda folder: (folder / own_name(0)).symlink_to(__file__),
    "a folder with an own name": lambda folder: (folder / own_name(0)).mkdir(),
    "a pipe with an own name": lambda folder: os.mkfifo(folder / own_name(0)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_the_store_did_not_write_neither_stops_it_nor_is_touched(folder: Path, what: str) -> None:
    OTHERS[what](folder)
    (other,) = folder.iterdir()
    before = other.lstat()
    store = AuditStore(folder, max_files=2, max_bytes=100)
    names = save(store, b"a", b"b", b"c")
    assert None not in names
    assert {file.name for file in folder.iterdir()} == {other.name, *names[1:]}
    assert other.lstat() == before
    store.close()


def test_a_record_that_another_server_removed_meanwhile_is_no_hindrance(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        (folder / own_name(i)).write_bytes(b"old")
    store = AuditStore(folder, max_files=2, max_bytes=100)
    unlink, removed = os.unlink, []

    def faster(path: Path) -> None:
        if Path(path).name.startswith("audit-"):
            removed.append(path)
            unlink(path)
        unlink(path)

    monkeypatch.setattr("server.audit_store.os.unlink", faster)
    (name,) = save(store, b"new")
    assert {file.name for file in folder.iterdir()} == {own_name(2), name}
    assert len(removed) == 2
    store.close()


def test_a_record_that_vanishes_while_they_are_counted_is_no_hindrance(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AuditStore(folder, max_files=2, max_bytes=100)
    scandir = os.scandir

    @contextlib.contextmanager
    def scan(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        for i in range(2):
            (folder / own_name(i)).write_bytes(b"old")
        with scandir(path) as entries:
            found = list(entries)
        (folder / own_name(0)).unlink()
        yield found

    monkeypatch.setattr("server.audit_store.os.scandir", scan)
    (name,) = save(store, b"new")
    assert {file.name for file in folder.iterdir()} == {own_name(1), name}
    store.close()


@pytest.mark.parametrize("max_files", [1, 3])
def test_a_record_that_cannot_be_removed_costs_the_next_ones_place_or_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_files: int, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / own_name(0)).write_bytes(b"old")
    store = AuditStore(folder, max_files=max_files, max_bytes=100)
    unlink = os.unlink

    def stuck(path: Path) -> None:
        if Path(path).name == own_name(0):
            raise PermissionError(errno.EPERM, "planted")
        unlink(path)

    monkeypatch.setattr("server.audit_store.os.unlink", stuck)
    names = save(store, b"a", b"b", b"c")
    kept = {file.name for file in folder.iterdir()}
    if max_files == 1:  # the bound holds
        assert names == [None] * 3
        assert kept == {own_name(0)}
        assert "older records cannot be removed" in caplog.text
    else:
        assert None not in names
        assert kept == {own_name(0), *names[1:]}
    store.close()


def test_a_disk_that_fails_is_told_and_the_next_record_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = AuditStore(folder, max_files=3, max_bytes=100)
    with monkeypatch.context() as patch:
        patch.setattr("server.audit_store.os.replace", raise_full)
        assert save(store, *[b"a"] * 20) == [None] * 20
    assert "planted" in caplog.text
    assert list(folder.iterdir()) == []
    assert None not in save(store, b"b")
    store.close()


def raise_full(*args: object) -> None:
    raise OSError(errno.ENOSPC, "planted")


def test_when_too_many_wait_to_be_written_the_next_is_told_at_once(folder: Path) -> None:
    store = AuditStore(folder, max_files=100, max_bytes=100)
    gate = threading.Event()
    store._thread.submit(gate.wait, 30)
    names: list[str | None] = []
    for _ in range(20):
        store.save(b"a", names.append)
    assert names == [None] * 4
    gate.set()
    store.close()
    assert len([name for name in names if name is not None]) == 16 == len(list(folder.iterdir()))


@pytest.mark.parametrize(("mode", "warns"), [(0o700, 0), (0o755, 0), (0o770, 1), (0o777, 1), (0o1777, 1), (0o702, 1)])
def test_a_folder_in_which_others_may_write_is_told_once(
    folder: Path, mode: int, warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder.chmod(mode)
    store = AuditStore(folder, max_files=3, max_bytes=100)
    save(store, b"a", b"b")
    store.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warns
    assert caplog.text.count(f"{mode:04o}") == warns


def test_a_folder_that_cannot_be_used_is_told_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StartError, match=r"audit_store .* cannot be used"):
        _audit_store(build_settings(audit_store=file, audit_rate=0.1))
