"""compose.yaml, read as Compose reads it: it has never been started by these tests, so every word of it is checked."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from tilewise_fleet.cli.fleet import serve as start_service

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
FILE = ROOT / "compose.yaml"
KEYS = {"image", "command", "environment", "volumes", "healthcheck", "restart", "depends_on", "ports", "shm_size",
         "stop_grace_period"}  # fmt: skip


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    compose: dict[str, Any] = yaml.safe_load(FILE.read_text())
    assert set(compose) == {"services", "volumes"}
    services_by_name: dict[str, Any] = compose["services"]
    return services_by_name


def words(service: dict[str, Any]) -> list[str]:
    """What the shell in a container runs, variables filled in."""
    text = service["command"].replace("${TILEWISE_DB_PASSWORD}", "secret")
    shell, flag, script = shlex.split(text)
    assert (shell, flag) == ("sh", "-c")
    return shlex.split(script)


def test_services_have_known_keys_and_stand_on_each_other(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert set(service) <= KEYS, name
        assert set(service.get("depends_on", {})) <= set(services)
        assert re.fullmatch(r"(postgres|python):[0-9.]+(-slim)?", service["image"])
        for port in service.get("ports", []):
            assert re.fullmatch(r"(127\.0\.0\.1:)?\d+:\d+", port)
    assert services["service"]["depends_on"]["database"]["condition"] == "service_healthy"


def test_a_password_has_to_be_given(services: dict[str, Any]) -> None:
    assert services["database"]["environment"]["POSTGRES_PASSWORD"].startswith("${TILEWISE_DB_PASSWORD:?")


def test_the_health_check_asks_for_the_user_and_database_that_are_made(services: dict[str, Any]) -> None:
    environment, test = services["database"]["environment"], services["database"]["healthcheck"]["test"]
    assert test == ["CMD-SHELL", f"pg_isready -U {environment['POSTGRES_USER']} -d {environment['POSTGRES_DB']}"]


def test_the_service_is_started_as_the_command_line_takes_it(services: dict[str, Any]) -> None:
    database, flags_given = services["database"]["environment"], words(services["service"])
    for service, package in (("service", "tilewise-fleet"), ("head", "tilewise-fleet[ray]")):
        assert package in words(services[service])
    serve = flags_given[flags_given.index("serve") :]
    store = serve[serve.index("--store") + 1]
    assert store == f"postgresql://{database['POSTGRES_USER']}:secret@database/{database['POSTGRES_DB']}"
    one = typer.Typer()
    one.command()(start_service)
    options = typer.main.get_command(one).make_context("serve", serve[1:]).params
    assert options["store"] == store and options["host"] == "0.0.0.0"
    assert services["service"]["ports"][0].endswith(f":{options['port']}")


def test_the_head_is_started_with_options_that_ray_has(services: dict[str, Any]) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed; `make test-fleet` installs it")
    options = words(services["head"])
    assert options[options.index("ray") :][:2] == ["ray", "start"]
    ray_flags = {name for option in scripts.start.params for name in option.opts}
    flags = {word.partition("=")[0] for word in options[options.index("start") :] if word.startswith("--")}
    assert flags <= ray_flags


def test_compose_itself_has_nothing_against_it() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    done = subprocess.run(
        [docker, "compose", "-f", str(FILE), "config", "--quiet"], capture_output=True, text=True, check=False,
        env={"TILEWISE_DB_PASSWORD": "secret", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
