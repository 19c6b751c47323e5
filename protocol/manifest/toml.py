"""Reading TOML with errors that a person can act on."""

from __future__ import annotations

import tomllib
from typing import Any

from pydantic import ValidationError

from protocol.errors import ConfigError, VersionMismatch
from protocol.messages import PROTOCOL_VERSION


def read_tables(text: str) -> dict[str, Any]:
    """Parse a manifest's TOML; raise ConfigError, or VersionMismatch for another protocol.

    The version is looked at first: fields of another protocol would be reported as wrong.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"the manifest is not TOML: {error}", "Correct the manifest file."
        ) from error
    version = tables.get("protocol_version", PROTOCOL_VERSION)
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(f"the manifest is of protocol {version}, not {PROTOCOL_VERSION}")
    return tables


def explain(error: ValidationError) -> str:
    """Name each wrong field and what is wrong with it, on one line."""
    return "; ".join(
        f"{_place(item['loc'])}{item['msg'].removeprefix('Value error, ')}"
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    )


def _place(location: tuple[int | str, ...]) -> str:
    return f"{'.'.join(map(str, location))}: " if location else ""
