"""What installing makes by itself."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from bench.peers.home import PeersHome
from bench.peers.install import Installer, metadata_wheel, unpack
from bench.peers.recipes import Metadata, Recipe
from server.commands import CommandError

NAMED = Metadata("some-peer", "1.2.3+cpu", "for a test")


def test_a_wheel_of_metadata_alone_gives_the_version_that_it_is_made_for(tmp_path: Path) -> None:
    with zipfile.ZipFile(metadata_wheel(NAMED, tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
    (found,) = distributions(path=[str(tmp_path / "site")])
    assert (found.name, found.version) == ("some-peer", "1.2.3+cpu")


def test_a_wheels_record_has_all_of_its_files_and_their_digests(tmp_path: Path) -> None:
    with zipfile.ZipFile(metadata_wheel(NAMED, tmp_path)) as wheel:
        (record,) = (name for name in wheel.namelist() if name.endswith("/RECORD"))
        rows = {row[0]: row[1] for row in csv.reader(io.StringIO(wheel.read(record).decode()))}
        assert rows.keys() == set(wheel.namelist())
        for name in rows.keys() - {record}:
            digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest()).rstrip(b"=").decode()
            assert rows[name] == f"sha256={digest}"


def test_a_source_distribution_is_unpacked_without_the_folder_around_it(tmp_path: Path) -> None:
    (tmp_path / "peer-1.0" / "deep").mkdir(parents=True)
    (tmp_path / "peer-1.0" / "deep" / "file.c").write_text("x")
    with tarfile.open(tmp_path / "peer-1.0.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "peer-1.0", "peer-1.0")
    unpack(tmp_path / "peer-1.0.tar.gz", tmp_path / "out")
    assert (tmp_path / "out" / "deep" / "file.c").read_text() == "x"


def test_a_peer_whose_check_fails_is_not_installed_and_a_second_try_mends_it(tmp_path: Path) -> None:
    home = PeersHome(tmp_path / "home")
    installer = Installer(home, nice=0, jobs=1, say=lambda line: None)
    with pytest.raises(CommandError, match="no_such_module"):
        installer.install(Recipe("peer", "none", (), "import no_such_module"))
    assert home.installed("peer") is None
    installer.install(Recipe("peer", "none", (), "import json", metadata=NAMED))
    found = home.installed("peer")
    assert found is not None
    assert found["packages"] == {"some-peer": "1.2.3+cpu"}
