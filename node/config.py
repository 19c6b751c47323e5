"""A node's settings: defaults, then config.toml, then SHOAL_* variables, then flags."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import ByteSize, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from node.files import replace_text
from node.paths import STATE_VARIABLE
from protocol.deadlines import Deadlines
from protocol.errors import ConfigError
from protocol.manifest import explain

ENV_PREFIX = "SHOAL_"
FAULT_VARIABLE = "SHOAL_FAULT"  # for tests: ``node.faults``
RUN_VARIABLE = "SHOAL_RUN"  # marks what belongs to one swarm on this computer
# What is called otherwise on the command line than in the file.
_FLAGS = {"memory_bytes": "--memory"}
# A chunk of a state has to come over within a request's time limit.
LEAST_STATE_BYTES_PER_S = 256 * 2**10
Port = Annotated[int, Field(ge=0, le=65535)]
Role = Literal["volunteer", "organiser", "data"]


class NodeConfig(BaseSettings):
    """What the owner decides about this node. Port 0 takes that of the last run or a free one."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    role: Role = "volunteer"
    invite: str | None = None
    stage: Annotated[int, Field(ge=1, lt=4096)] | None = None  # None: wherever it is needed
    device: str = "cpu"
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    memory_bytes: ByteSize | None = None  # None: what is free at the start
    recompute: Literal["auto", "always", "never"] = "auto"
    data: Annotated[tuple[Path, ...], NoDecode] = ()
    tokenizer: Path | None = None
    listen_host: str = "0.0.0.0"  # noqa: S104 - volunteers are there to be reached
    listen_port: Port = 0
    dht_port: Port = 0
    announce_host: IPv4Address | None = None  # None: the addresses of the interfaces
    metrics_host: IPv4Address = IPv4Address("127.0.0.1")
    metrics_port: Port = 0
    invite_file: Path | None = None  # the organiser also writes the invite there, others read it
    snapshot_steps: Annotated[int, Field(ge=0)] = 10  # 0: none; 1: each before it is promised
    snapshots_kept: Annotated[int, Field(ge=1, le=1000)] = 2
    snapshot_quota_bytes: ByteSize | None = None  # None: what the disk has
    # for joiners; None: what the line has
    state_bytes_per_s: Annotated[ByteSize, Field(ge=LEAST_STATE_BYTES_PER_S)] | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    deadlines_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0

    @field_validator("data", mode="before")
    @classmethod
    def _split_paths(cls, value: Any) -> Any:
        """SHOAL_DATA lists paths as PATH does."""
        return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _role_fits(self) -> NodeConfig:
        if self.role == "volunteer" and self.data:
            raise ValueError("data belongs to the roles data and organiser")
        if self.role != "volunteer" and self.stage is not None:
            raise ValueError(f"role {self.role} serves stage 0; leave stage unset")
        if self.announce_host is not None and not (self.listen_port and self.dht_port):
            raise ValueError("announce_host needs listen_port and dht_port: others dial those")
        return self

    @property
    def deadlines(self) -> Deadlines:
        """The table of time limits, scaled as the owner asked."""
        return Deadlines().scaled(self.deadlines_scale)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Construct from arguments alone: ``load_config`` merges the sources and knows origins."""
        return (init_settings,)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The settings in force and, for each, where it came from."""

    config: NodeConfig
    origins: Mapping[str, str]

    def rows(self) -> list[tuple[str, object, str]]:
        """Return (name, value, origin) of every setting, in the order of their definition."""
        values = self.config.model_dump(mode="json")
        return [(name, values[name], self.origins[name]) for name in NodeConfig.model_fields]


def load_config(file: Path, flags: Mapping[str, object] | None = None) -> LoadedConfig:
    """Merge all sources; a flag of None was not given. Raises ConfigError."""
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    merged: dict[str, Any] = {}
    origins = dict.fromkeys(NodeConfig.model_fields, "default")
    for label, values in (
        (str(file), _read_file(file)),
        ("environment", _read_environment()),
        ("flag", given),
    ):
        merged.update(values)
        origins.update({name: _origin(label, name) for name in values})
    try:
        return LoadedConfig(NodeConfig(**merged), origins)
    except ValidationError as error:
        raise ConfigError(f"a setting is wrong: {explain_origin(error, origins)}") from error


def explain_origin(error: ValidationError, origins: Mapping[str, str]) -> str:
    """Name each wrong setting, what is wrong with it, and where it was set."""
    names = {str(item["loc"][0]) for item in error.errors() if item["loc"]}
    places = sorted({origins[name] for name in names if name in origins})
    return explain(error) + (f" (from {', '.join(places)})" if places else "")


def write_config(file: Path, config: NodeConfig) -> None:
    """Write the settings that differ from their defaults, so that later runs find them."""
    values = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    replace_text(file, tomli_w.dumps(values))


def _origin(label: str, name: str) -> str:
    if label == "flag":
        return _FLAGS.get(name, f"--{name.replace('_', '-')}")
    return f"{ENV_PREFIX}{name.upper()}" if label == "environment" else label


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return each SHOAL_* variable that means nothing, with the name that its owner may mean."""
    settings = sorted(
        {ENV_PREFIX + name.upper() for name in NodeConfig.model_fields} | {STATE_VARIABLE}
    )
    known = {*settings, FAULT_VARIABLE, RUN_VARIABLE}
    strange = sorted(n for n in environ if n.startswith(ENV_PREFIX) and n not in known)
    return {name: _nearest(name, settings) for name in strange}


def _nearest(name: str, settings: Iterable[str]) -> str | None:
    ends = [setting.removeprefix(ENV_PREFIX) for setting in settings]
    found = get_close_matches(name.removeprefix(ENV_PREFIX), ends, n=1, cutoff=0.7)
    return ENV_PREFIX + found[0] if found else None


def _read_environment() -> dict[str, Any]:
    return EnvSettingsSource(NodeConfig)()


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}", f"Correct {file}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", f"Correct {file}.") from error
