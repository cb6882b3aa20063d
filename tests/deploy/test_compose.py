"""deploy/compose: files of the compose specification, whose containers can do no more than they must.

No container is started here: there is no engine for it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from load_test.flags import FLAGS

from server.settings import SettingsError, load_settings
from tests.deploy import image
from tests.deploy.prometheus import needs_promtool
from tests.deploy.settings_of import seconds_to_end, settings_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "compose"
FILES = sorted(path.name for path in FOLDER.glob("compose*.yaml"))
MAIN = "compose.yaml"
CONSTRAINTS = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))


@cache
def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text("utf-8"))
    return loaded


SERVICES: dict[str, dict[str, Any]] = load(MAIN)["services"]
each_service = pytest.mark.parametrize("name", sorted(SERVICES))


def mounts(name: str) -> list[tuple[str, str, str]]:
    """Source, target and mode of a service's volumes."""
    parts = [volume.split(":") for volume in SERVICES[name].get("volumes", ())]
    return [(source, target, *(mode or ["rw"])) for source, target, *mode in parts]  # type: ignore[misc]


def mounted(name: str, path: str) -> Path:
    """The file or folder of this project that a service finds at ``path``."""
    for source, target, _ in sorted(mounts(name), key=lambda mount: -len(mount[1])):
        if source.startswith(".") and Path(path).is_relative_to(target):
            return (FOLDER / source / Path(path).relative_to(target)).resolve()
    raise AssertionError(f"{name} has nothing at {path}")


def env_file() -> dict[str, str]:
    lines = (FOLDER / "truedraft.env").read_text("utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def with_defaults(text: str) -> str:
    """``text`` as compose reads it where nobody has set a variable."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def environment(*names: str) -> dict[str, str]:
    """The server's variables with these files, those of the image among them."""
    found = {**image.environment(), **env_file()}
    for name in names:
        found |= load(name)["services"].get("truedraft", {}).get("environment", {})
    found.pop("PATH")
    return {name: with_defaults(value) for name, value in found.items()}


@pytest.mark.parametrize("name", FILES)
def test_each_file_keeps_to_the_compose_specification(name: str) -> None:
    schema = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text("utf-8"))
    jsonschema.validate(load(name), schema, cls=jsonschema.validators.validator_for(schema))


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_about_services_that_there_are(name: str) -> None:
    assert set(load(name)["services"]) <= set(SERVICES)
    for service in load(name)["services"].values():
        assert set(service.get("depends_on", ())) <= set(SERVICES)


@pytest.mark.parametrize("name", FILES)
def test_every_variable_has_a_default_or_says_what_it_is_for(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8")
    used = re.findall(r"\$\{[^}]*\}", re.sub(r"(?m)^\s*#.*$", "", text))
    assert all(re.fullmatch(r"\$\{[A-Z_]+(:-|:\?).+\}", variable) for variable in used), used


@pytest.mark.parametrize("overrides", [[], ["compose.keys.yaml"], ["compose.gpu.yaml"]], ids=str)
def test_the_server_takes_its_settings(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(environment(MAIN, *overrides), monkeypatch)
    assert settings.port == 8000
    assert (settings.device == "cuda") == ("compose.gpu.yaml" in overrides)


def test_the_lines_of_the_settings_file_that_are_off_could_be_on(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (FOLDER / "truedraft.env").read_text("utf-8")
    settings_of(dict(re.findall(r"^# (TRUEDRAFT_\w+)=(.*)$", text, re.MULTILINE)), monkeypatch)


def test_the_server_has_as_many_threads_as_cores() -> None:
    limits = SERVICES["truedraft"]["deploy"]["resources"]["limits"]
    assert SERVICES["truedraft"]["environment"]["TRUEDRAFT_NUM_THREADS"] == limits["cpus"]


def test_the_server_is_not_killed_before_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(environment(MAIN), monkeypatch)
    grace = SERVICES["truedraft"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > seconds_to_end(settings)


def test_the_server_keeps_its_models() -> None:
    assert image.environment()["TRUEDRAFT_HOME"] in [target for _, target, _ in mounts("truedraft")]


def test_the_servers_image_is_built_from_this_project() -> None:
    assert (FOLDER / SERVICES["truedraft"]["build"]["context"]).resolve() == ROOT
    version = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[0]
    assert SERVICES["truedraft"]["image"] == f"truedraft:{version}"
    gpu = load("compose.gpu.yaml")["services"]["truedraft"]
    assert gpu["image"] == f"truedraft:{version}-cuda"
    assert all(f"\nARG {argument}" in image.DOCKERFILE for argument in gpu["build"]["args"])


@each_service
def test_the_image_is_a_certain_one(name: str) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


@each_service
def test_a_service_tells_whether_it_is_healthy(name: str) -> None:
    if name == "truedraft":
        assert image.health_check()
        assert "healthcheck" not in SERVICES[name]
    else:
        assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


@each_service
def test_a_service_can_do_no_more_than_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "user"} & set(service)


@each_service
def test_a_service_has_bounds(name: str) -> None:
    limits = SERVICES[name]["deploy"]["resources"]["limits"]
    assert set(limits) == {"cpus", "memory", "pids"}
    assert set(SERVICES[name]["logging"]["options"]) == {"max-size", "max-file"}


@each_service
def test_a_service_is_reached_from_this_machine_alone(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name]["ports"])


@each_service
def test_what_a_service_mounts_is_there_and_cannot_be_written(name: str) -> None:
    for source, _, mode in mounts(name):
        if source.startswith("."):
            assert (FOLDER / source).exists(), source
            assert mode == "ro"
        else:
            assert source in load(MAIN)["volumes"]


def test_every_port_of_this_machine_is_asked_for_once() -> None:
    published = [port.split(":")[1:] for service in SERVICES.values() for port in service["ports"]]
    assert len({str(port) for port in published}) == len(published)


def test_locust_comes_only_when_asked_for_and_waits_for_the_server() -> None:
    assert [name for name, service in SERVICES.items() if service.get("profiles")] == ["locust"]
    assert SERVICES["locust"]["depends_on"] == {"truedraft": {"condition": "service_healthy"}}


def test_locust_runs_the_file_that_is_tested_here_with_the_version_that_it_was_tested_with() -> None:
    command = SERVICES["locust"]["command"]
    assert mounted("locust", command[command.index("-f") + 1]) == ROOT / "deploy" / "locust" / "locustfile.py"
    assert SERVICES["locust"]["image"] == f"locustio/locust:{CONSTRAINTS['locust']}"
    assert float(command[command.index("--stop-timeout") + 1]) > 0  # without it answers are cut off at a test's end


def test_locust_is_given_the_key_that_it_reads_where_the_server_wants_one() -> None:
    (flag,) = (flag for flag in FLAGS if flag.name == "api_key_env")
    variables = load("compose.keys.yaml")["services"]["locust"]["environment"]
    assert variables == {flag.default: None}  # no value: compose takes that of the shell or of .env


@pytest.mark.parametrize(("cpus", "taken"), [("3", True), ("1.5", False)])
def test_the_number_of_cores_has_to_be_whole(cpus: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEDRAFT_NUM_THREADS", cpus)
    with contextlib.nullcontext() if taken else pytest.raises(SettingsError, match=r"num.threads"):
        assert load_settings().num_threads == 3


def prometheus_config() -> dict[str, Any]:
    option = next(word for word in SERVICES["prometheus"]["command"] if word.startswith("--config.file="))
    config: dict[str, Any] = yaml.safe_load(mounted("prometheus", option.partition("=")[2]).read_text("utf-8"))
    return config


def test_prometheus_loads_every_rule() -> None:
    (pattern,) = prometheus_config()["rule_files"]
    folder = mounted("prometheus", f"/etc/prometheus/{Path(pattern).parent}")
    loaded = set(folder.glob(Path(pattern).name))
    assert loaded == set((ROOT / "deploy" / "prometheus").glob("*.rules.yml"))
    assert loaded


def test_prometheus_scrapes_the_server_as_boards_and_rules_expect() -> None:
    (job,) = [job for job in prometheus_config()["scrape_configs"] if job["job_name"] == "truedraft"]
    assert job["static_configs"] == [{"targets": ["truedraft:8000"]}]


@needs_promtool
def test_promtool_takes_prometheus_configuration(tmp_path: Path) -> None:
    # Laid out as in the container, since paths of rules are relative to the file.
    shutil.copy(FOLDER / "prometheus.yml", tmp_path)
    shutil.copytree(ROOT / "deploy" / "prometheus", tmp_path / "truedraft")
    command = ["promtool", "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "truedraft.rules.yml" in done.stdout


def test_grafana_asks_this_prometheus() -> None:
    folder = mounted("grafana", "/etc/grafana/provisioning")
    (file,) = (folder / "datasources").glob("*.y*ml")
    variables = SERVICES["grafana"]["environment"]
    (source,) = yaml.safe_load(file.read_text("utf-8"))["datasources"]
    url = re.sub(r"\$\{?(\w+)\}?", lambda match: variables[match[1]], source["url"])
    host, _, port = url.removeprefix("http://").partition(":")
    assert port == SERVICES[host]["ports"][0].rsplit(":", 1)[1]
    assert host == "prometheus"


def test_grafana_finds_the_boards() -> None:
    folder = mounted("grafana", "/etc/grafana/provisioning")
    (file,) = (folder / "dashboards").glob("*.y*ml")
    (provider,) = yaml.safe_load(file.read_text("utf-8"))["providers"]
    assert list(mounted("grafana", provider["options"]["path"]).glob("*.json"))


def test_nobody_can_log_in_to_grafana_with_a_password_that_everybody_knows() -> None:
    variables = SERVICES["grafana"]["environment"]
    assert variables["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    admin = load("compose.admin.yaml")["services"]["grafana"]["environment"]
    assert admin["GF_SECURITY_ADMIN_PASSWORD"].startswith("${GRAFANA_PASSWORD:?")


def test_api_keys_are_no_variables() -> None:
    keys = load("compose.keys.yaml")
    assert keys["services"]["truedraft"]["environment"]["TRUEDRAFT_API_KEYS_FILE"] == "/run/secrets/api_keys"
    # Of a container with a read-only root, compose makes secrets from files alone.
    assert set(keys["secrets"]["api_keys"]) == {"file"}
