"""An entry of the model cache is complete or absent, whoever dies or races."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from model.model_cache import MANIFEST, ModelCache, default_home, heartbeat
from model.source_error import ModelSourceError


def fill(folder: Path) -> dict[str, Any]:
    (folder / "weights").write_bytes(b"w" * 1000)
    (folder / "config.json").write_text("{}")
    return {"from": "a test"}


def silent(line: str) -> None:
    pass


def test_an_entry_is_made_once_and_found_afterwards(tmp_path: Path) -> None:
    made = []

    def make(folder: Path) -> dict[str, Any]:
        made.append(folder)
        return fill(folder)

    first = ModelCache(tmp_path).get_or_make("key", make, silent)
    second = ModelCache(tmp_path).get_or_make("key", make, silent)
    assert first == second == ModelCache(tmp_path).find("key")
    assert len(made) == 1
    assert sorted(path.name for path in first.iterdir()) == ["config.json", MANIFEST, "weights"]


def test_a_failing_maker_leaves_nothing_behind(tmp_path: Path) -> None:
    def make(folder: Path) -> dict[str, Any]:
        fill(folder)
        raise ModelSourceError("the download broke off")

    with pytest.raises(ModelSourceError, match="broke off"):
        ModelCache(tmp_path).get_or_make("key", make, silent)
    assert ModelCache(tmp_path).find("key") is None
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_what_a_killed_process_left_is_never_used_and_is_cleared_away(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from model.model_cache import ModelCache\n"
        "from tests.model.test_model_cache import fill\n"
        "ModelCache(Path(sys.argv[1])).get_or_make('key', lambda folder: (fill(folder), os._exit(9)), print)"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=False)
    assert ran.returncode == 9
    (leftover,) = (tmp_path / "models").glob("*.part")
    assert ModelCache(tmp_path).find("key") is None
    assert (ModelCache(tmp_path).get_or_make("key", fill, silent) / "weights").is_file()
    assert not leftover.exists()


def test_concurrent_starts_make_an_entry_once(tmp_path: Path) -> None:
    made: list[Path] = []
    inside = threading.Event()
    others_wait = threading.Event()
    told: list[str] = []

    def make(folder: Path) -> dict[str, Any]:
        made.append(folder)
        inside.set()
        assert others_wait.wait(60)
        return fill(folder)

    def report(line: str) -> None:
        told.append(line)
        if len(told) == 3:
            others_wait.set()

    results: list[Path] = []

    def start() -> None:
        results.append(ModelCache(tmp_path).get_or_make("key", make, report))

    threads = [threading.Thread(target=start) for _ in range(4)]
    threads[0].start()
    assert inside.wait(60)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1
    assert results == [tmp_path / "models" / "key"] * 4
    assert all("waiting for another process" in line for line in told)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "weights").write_bytes(b"w" * 999),
        lambda folder: (folder / "weights").write_bytes(b"x" * 1000),
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text("{"),
    ],
    ids=["a file is missing", "cut off", "changed", "no manifest", "broken manifest"],
)
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: Any) -> None:
    cache = ModelCache(tmp_path)
    damage(cache.get_or_make("key", fill, silent))
    assert cache.find("key") is None
    assert (cache.get_or_make("key", fill, silent) / "weights").read_bytes() == b"w" * 1000


def test_a_home_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelSourceError, match=r"cannot write the model cache .*home \(TRUEDRAFT_HOME\)"):
        ModelCache(tmp_path / "home").get_or_make("key", fill, silent)


@pytest.mark.parametrize("key", ["", "../up", "a/b", ".hidden"])
def test_a_key_cannot_leave_the_cache(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="plain file name"):
        ModelCache(tmp_path).find(key)


def test_the_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRUEDRAFT_HOME", str(tmp_path / "home"))
    assert default_home() == tmp_path / "home"
    monkeypatch.delenv("TRUEDRAFT_HOME")
    assert default_home() == tmp_path / "cache" / "truedraft"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    assert default_home() == tmp_path / ".cache" / "truedraft"


def test_long_work_reports_that_it_goes_on() -> None:
    told: list[str] = []
    twice = threading.Event()

    def report(line: str) -> None:
        told.append(line)
        if len(told) >= 2:
            twice.set()

    with heartbeat(report, "counting", every_seconds=0.01):
        assert twice.wait(60)
    assert told[0].startswith("counting (")


def test_a_large_file_that_was_cut_off_is_noticed(tmp_path: Path) -> None:
    def make(folder: Path) -> dict[str, Any]:
        with (folder / "weights").open("wb") as file:
            file.truncate(17 << 20)
        return {}

    cache = ModelCache(tmp_path)
    folder = cache.get_or_make("key", make, silent)
    assert cache.find("key") == folder
    os.truncate(folder / "weights", (17 << 20) - 1)
    assert cache.find("key") is None
