"""The node's settings: who overrides whom, and where each value came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from cli.main import app
from node.config import NodeConfig, load_config, unknown_variables, write_config
from protocol.errors import ConfigError

VALUES = {"device": "cpu", "threads": 1, "memory_bytes": "1GiB", "metrics_port": 1, "data": ["/a"]}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in NodeConfig.model_fields:
        monkeypatch.delenv(f"SHOAL_{name.upper()}", raising=False)
    return tmp_path / "config.toml"


def test_flags_beat_environment_beats_file_beats_defaults(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('threads = 2\nlisten_port = 2\nrecompute = "never"\n')
    monkeypatch.setenv("SHOAL_THREADS", "3")
    monkeypatch.setenv("SHOAL_LISTEN_PORT", "3")
    loaded = load_config(file, {"threads": 4, "listen_port": None})
    config, origins = loaded.config, loaded.origins
    assert (config.threads, origins["threads"]) == (4, "--threads")
    assert (config.listen_port, origins["listen_port"]) == (3, "SHOAL_LISTEN_PORT")
    assert (config.recompute, origins["recompute"]) == ("never", str(file))
    assert (config.device, origins["device"]) == ("cpu", "default")


def test_every_setting_has_a_row_with_its_origin(file: Path) -> None:
    rows = load_config(file, {"metrics_port": 9100}).rows()
    assert [name for name, _, _ in rows] == list(NodeConfig.model_fields)
    assert ("metrics_port", 9100, "--metrics-port") in rows


def test_construction_ignores_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_THREADS", "3")
    assert NodeConfig().threads == 1


def test_memory_is_read_in_units(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_MEMORY_BYTES", "2GiB")
    assert load_config(file).config.memory_bytes == 2 * 2**30


def test_data_paths_from_the_environment_are_split_as_path_is(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_DATA", "/a:/b c")
    assert load_config(file, {"role": "data"}).config.data == (Path("/a"), Path("/b c"))


def test_written_settings_are_read_back(file: Path) -> None:
    config = NodeConfig(role="data", data=(Path("/a"), Path("/b")), threads=2, invite="shoal1:x")
    write_config(file, config)
    loaded = load_config(file)
    assert loaded.config == config
    assert loaded.origins["threads"] == str(file)
    assert loaded.origins["device"] == "default"


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        ({"threads": 0}, "threads"),
        ({"role": "boss"}, "role"),
        ({"stage": 0}, "stage"),
        ({"listen_port": 65536}, "listen_port"),
        ({"deadlines_scale": 0}, "deadlines_scale"),
        ({"memory_bytes": "much"}, "memory_bytes"),
        ({"data": ["/a"]}, "data belongs to"),
        ({"role": "data", "stage": 1}, "leave stage unset"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_setting_is_named(file: Path, flags: dict[str, object], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        load_config(file, flags)


def test_the_error_tells_where_the_value_was_set(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_THREADS", "many")
    with pytest.raises(ConfigError, match="from SHOAL_THREADS"):
        load_config(file)


@pytest.mark.parametrize(
    ("content", "cause"),
    [(b"threads = ", "not TOML"), (b"\xff", "read"), (b"thread = 1", "thread")],
)
def test_a_bad_file_is_named(file: Path, content: bytes, cause: str) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=cause) as caught:
        load_config(file)
    assert str(file) in caught.value.cause


def test_a_wrong_flag_is_called_as_it_was_typed(file: Path) -> None:
    with pytest.raises(ConfigError, match="from --memory\\)"):
        load_config(file, {"memory_bytes": "lots"})


@pytest.mark.parametrize("command", ["join", "swarm run"])
def test_every_flag_is_an_option_of_the_commands(command: str, file: Path) -> None:
    group = typer.main.get_command(app)
    for word in command.split():
        group = group.commands[word]
    options = {text for parameter in group.params for text in parameter.opts}
    flags = ("device", "threads", "memory_bytes", "metrics_port", "data")
    origins = load_config(file, {"role": "data", **VALUES}).origins
    assert {origins[name] for name in flags} <= options


def test_variables_that_mean_nothing_are_named_with_what_was_meant() -> None:
    environ = {
        "SHOAL_THREDS": "2",
        "SHOAL_STAT": "/x",
        "SHOAL_ZQXJV": "",
        "PATH": "",
        "SHOAL_DATA": "",
    }
    assert unknown_variables(environ) == {
        "SHOAL_STAT": "SHOAL_STATE", "SHOAL_THREDS": "SHOAL_THREADS", "SHOAL_ZQXJV": None,
    }  # fmt: skip
    known = {"SHOAL_STATE", "SHOAL_FAULT", *(f"SHOAL_{n.upper()}" for n in NodeConfig.model_fields)}
    assert unknown_variables(dict.fromkeys(known, "")) == {}


def test_deadlines_are_scaled() -> None:
    assert NodeConfig(deadlines_scale=2).deadlines.dial_s == 2 * NodeConfig().deadlines.dial_s


def test_an_announced_host_needs_ports_that_are_known_beforehand(file: Path) -> None:
    with pytest.raises(ConfigError, match="announce_host needs listen_port and dht_port"):
        load_config(file, {"announce_host": "192.0.2.7", "listen_port": 4001})
    config = load_config(
        file, {"announce_host": "192.0.2.7", "listen_port": 4001, "dht_port": 4002}
    ).config
    assert str(config.announce_host) == "192.0.2.7"


@pytest.mark.parametrize("name", ["announce_host", "metrics_host"])
def test_hosts_are_addresses(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(file, {name: "example.org"})


def test_hosts_and_files_survive_a_restart(file: Path) -> None:
    flags = {"metrics_host": "0.0.0.0", "invite_file": Path("/invite/invite")}
    write_config(file, load_config(file, flags).config)
    config = load_config(file).config
    assert (str(config.metrics_host), config.invite_file) == ("0.0.0.0", Path("/invite/invite"))
