"""Where a node keeps what it must not lose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from protocol.errors import ResourceError

STATE_VARIABLE = "SHOAL_STATE"


@dataclass(frozen=True, slots=True)
class StatePaths:
    """The files of one node's state directory; only its owner may enter it."""

    root: Path

    @property
    def key(self) -> Path:
        """The private key: 68 bytes, mode 0600."""
        return self.root / "key"

    @property
    def config(self) -> Path:
        """The node's settings."""
        return self.root / "config.toml"

    @property
    def manifest(self) -> Path:
        """The swarm's signed manifest."""
        return self.root / "manifest.toml"

    @property
    def socket(self) -> Path:
        """The unix socket of the control API."""
        return self.root / "control.sock"

    @property
    def lock(self) -> Path:
        """Held while a daemon runs."""
        return self.root / "daemon.lock"

    @property
    def log(self) -> Path:
        """JSON lines; rotated."""
        return self.root / "log.jsonl"

    @property
    def steps(self) -> Path:
        """One JSON line per finished step; data nodes only; rotated."""
        return self.root / "steps.jsonl"

    @property
    def decisions(self) -> Path:
        """One JSON line per decision that the node obeyed; rotated."""
        return self.root / "decisions.jsonl"

    @property
    def ballot(self) -> Path:
        """What an authority promised and accepted; losing it may split the swarm."""
        return self.root / "ballot"

    @property
    def peers(self) -> Path:
        """Side-cars that were reachable, for the next start."""
        return self.root / "peers.json"

    @property
    def ports(self) -> Path:
        """The ports of the last run."""
        return self.root / "ports.json"

    @property
    def totals(self) -> Path:
        """What this node's work amounts to over all its runs."""
        return self.root / "totals.json"

    @property
    def invite(self) -> Path:
        """The organiser's invite, while its node can be reached."""
        return self.root / "invite"

    @property
    def snapshots(self) -> Path:
        """The directory of the stage's states, to go on from."""
        return self.root / "snapshots"

    @property
    def initial(self) -> Path:
        """The directory of imported weights, with which a swarm begins."""
        return self.root / "initial"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer that came with imported weights."""
        return self.root / "tokenizer.json"

    @property
    def weights(self) -> Path:
        """The directory of the stage's weights at the end."""
        return self.root / "weights"

    def create(self) -> None:
        """Make the directory with mode 0700 if it is missing; raise ResourceError."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"cannot make the state directory {self.root}: {error.strerror}",
                f"Give another one with --state or {STATE_VARIABLE}.",
            ) from error


def state_paths(flag: Path | None = None, environ: Mapping[str, str] | None = None) -> StatePaths:
    """Return the paths under ``--state``, else $SHOAL_STATE, else the platform's directory."""
    environ = os.environ if environ is None else environ
    root = flag or environ.get(STATE_VARIABLE) or platformdirs.user_state_path("shoal")
    return StatePaths(Path(root).expanduser().absolute())
