"""The invite in files: the organiser writes it while it can be reached, a volunteer reads it."""

from __future__ import annotations

from pathlib import Path

from node.config import NodeConfig
from node.files import replace_text
from node.paths import StatePaths
from protocol.errors import ResourceError
from protocol.invite import Invite

_HINT = "Let SHOAL_INVITE_FILE name a file that this user may write."


def publish_invite(paths: StatePaths, config: NodeConfig, invite: Invite) -> None:
    """Write the invite where others look for it; raise ResourceError."""
    for file in _files(paths, config):
        try:
            replace_text(file, invite.encode() + "\n")
        except OSError as error:
            cause = f"cannot write the invite to {file}: {error.strerror}"
            raise ResourceError(cause, _HINT if file == config.invite_file else None) from error


def withdraw_invite(paths: StatePaths, config: NodeConfig) -> None:
    """Remove what a run left: nobody can come in by it."""
    for file in _files(paths, config):
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            hint = _HINT if file == config.invite_file else None
            raise ResourceError(f"cannot remove {file}: {error.strerror}", hint) from error


def read_invite(config: NodeConfig) -> str | None:
    """Return what stands in the invite file; None if there is no such file (yet)."""
    if config.invite_file is None or not config.invite_file.exists():
        return None
    try:
        return config.invite_file.read_text(errors="replace").strip() or None
    except OSError as error:
        cause = f"cannot read the invite in {config.invite_file}: {error.strerror}"
        raise ResourceError(cause, "Let SHOAL_INVITE_FILE name a file that can be read.") from error


def _files(paths: StatePaths, config: NodeConfig) -> tuple[Path, ...]:
    """Only the organiser writes; for anybody else invite_file is another's."""
    if config.role != "organiser" or config.invite_file is None:
        return (paths.invite,)
    return (paths.invite, config.invite_file)
