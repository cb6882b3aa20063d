"""Settings: one source of names, a fixed precedence, one clear line for a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.cli import build_parser
from server.setting_flags import flag_name
from server.settings import Settings, SettingsError, load_settings
from server.sizes import parse_size


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in Settings.model_fields:
        monkeypatch.delenv(f"TRUEDRAFT_{field.upper()}", raising=False)


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('port = 1\nhost = "file"\nblock-size = 8\n')
    monkeypatch.setenv("TRUEDRAFT_PORT", "2")
    monkeypatch.setenv("TRUEDRAFT_HOST", "environment")
    settings = load_settings({"port": "3"}, file)
    assert (settings.port, settings.host, settings.block_size, settings.max_n) == (3, "environment", 8, 16)


def test_a_file_leaves_nothing_behind_for_the_next_call(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 77\nserved_model_name: [a, b]\n")
    assert load_settings({}, file).served_model_name == ("a", "b")
    assert load_settings().port == Settings.model_fields["port"].default


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({"port": "x"}, "port = 'x': input should be a valid integer"),
        ({"port": "70000"}, "port = '70000'"),
        ({"port": "tcp://10.0.0.1:8000"}, "enableServiceLinks"),
        ({"dtype": "int4"}, "dtype = 'int4'"),
        ({"nonsense": "1"}, "unknown setting: nonsense"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory = 'much'"),
        ({"stall_timeout": "inf"}, "stall_timeout = 'inf': input should be a finite number"),
        ({"request_timeout": "nan"}, "request_timeout = 'nan'"),
        ({"num_blocks": "4", "kv_cache_memory": "1GiB"}, "exclude each other"),
        ({"max_num_seqs": "64", "max_num_batched_tokens": "32"}, "at least max_num_seqs"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(flags: dict[str, str], match: str) -> None:
    with pytest.raises(SettingsError, match=match) as caught:
        load_settings(flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.toml", "port = ", "not valid"),
        ("a.yaml", "port: [", "not valid"),
        ("a.yaml", "prot: 1", "unknown setting: prot"),
        ("a.json", "{}", "must end in"),
        ("a.yaml", "- 1", "names and values"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, name: str, text: str, match: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(SettingsError, match=match) as caught:
        load_settings({}, file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("2KiB", 2048), ("1.5 MB", 3 * 2**19), ("3g", 3 * 2**30), ("1tib", 2**40)]
)
def test_sizes_take_units_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "name", [name for name, info in Settings.model_fields.items() if "with a unit" in (info.description or "")]
)
def test_what_may_have_a_unit_takes_one(name: str) -> None:
    assert getattr(load_settings({name: "64MiB"}), name) == 64 * 2**20


def test_every_setting_is_described_and_has_a_flag_with_that_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    shown = capsys.readouterr().out
    for field, info in Settings.model_fields.items():
        assert info.description, field
        assert flag_name(field) in shown
