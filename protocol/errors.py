"""Every error that a person or a metric can see.

    ShoalError
    |- ConfigError            a setting, a manifest or an invite is wrong
    |  \\- VersionMismatch     the other side speaks another protocol version
    |- Unreachable            no seed, port or relay answered
    |- IdentityError          the key is unreadable, readable by others or used twice
    |- NotAllowed             the manifest does not let this node do it
    |- ResourceError          memory, disk or a port is missing
    |- ClockError             this computer's clock is too far from the swarm's
    |- SidecarError           the DHT side-car or its p2pd failed
    |- PeerError              a peer's fault; never leaves that peer's session
    |  |- ProtocolViolation   it sent what the protocol forbids
    |  |- PeerTimeout         it did not answer within the deadline
    |  |- PeerGone            its session ended
    |  |- AveragingFailed     holders of the stage did not deliver their part of a sum
    |  \\- Byzantine           its work is wrong, with evidence
    \\- NumericsError          a number is wrong
       |- NonFinite           NaN or infinity in a boundary tensor
       \\- StateMismatch       a state's digest is not the one the swarm decided

An error's ``code`` is the log field, the metric label and a heading of docs/troubleshooting.md.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class ShoalError(Exception):
    """An error with one line of cause, one line of remedy, a stable code and an exit status."""

    code: ClassVar[str] = "internal"
    exit_status: ClassVar[int] = 1
    default_hint: ClassVar[str] = "Run again with --debug and report what it prints."

    def __init__(self, cause: str, hint: str | None = None) -> None:
        super().__init__(cause)
        self.cause = cause
        self.hint = hint if hint is not None else self.default_hint


class ConfigError(ShoalError):
    """A setting, a manifest, an invite or a data path is wrong."""

    code = "config"
    exit_status = 2
    default_hint = "Correct the value; `shoal config show --origin` tells where each came from."


class VersionMismatch(ConfigError):
    """The other side speaks another protocol version."""

    code = "version_mismatch"
    exit_status = 3
    default_hint = "Install the version of shoal that the swarm's manifest names."


class Unreachable(ShoalError):
    """No seed, port or relay answered."""

    code = "unreachable"
    exit_status = 4
    default_hint = "Check the network and that the organiser's node is running."


class IdentityError(ShoalError):
    """The key file is unreadable, readable by others, or in use elsewhere."""

    code = "identity"
    exit_status = 5
    default_hint = "Give the key file mode 0600 and use it on one computer only."


class NotAllowed(ShoalError):
    """The manifest does not let this node do what its owner asks."""

    code = "not_allowed"
    exit_status = 10
    default_hint = "The manifest's organiser decides what each node may do."


class ResourceError(ShoalError):
    """Memory, disk, a port or a lock that the node needs is not to be had."""

    code = "resource"
    exit_status = 6
    default_hint = "Free the resource, or give the node another one."


class ClockError(ShoalError):
    """This computer's clock is so far from the swarm's that its records would be invalid."""

    code = "clock"
    exit_status = 9
    default_hint = "Set this computer's clock (NTP does it by itself), then start the node again."


class SidecarError(ShoalError):
    """The DHT side-car or its p2pd failed; the supervisor restarts it."""

    code = "sidecar"
    exit_status = 7
    default_hint = "It is restarted by itself; if it keeps failing, see the node's log."


class PeerError(ShoalError):
    """A peer's fault; it ends that peer's session and nothing else."""

    code = "peer"
    default_hint = "Nothing to do: the node goes on with other peers."


class ProtocolViolation(PeerError):
    """The peer sent what the protocol forbids."""

    code = "protocol_violation"


class PeerTimeout(PeerError):
    """The peer did not answer within the deadline."""

    code = "peer_timeout"


class PeerGone(PeerError):
    """The session with the peer ended, or none could be opened."""

    code = "peer_gone"


class AveragingFailed(PeerError):
    """Some holders of the stage did not deliver; nobody may use a partial sum."""

    code = "averaging_failed"

    def __init__(self, missing: frozenset[str], reason: str) -> None:
        super().__init__(f"averaging failed ({reason}); missing {len(missing)} members")
        self.missing = missing


class Byzantine(PeerError):
    """The peer's work is provably wrong."""

    code = "byzantine"

    def __init__(self, cause: str, evidence: str) -> None:
        super().__init__(cause)
        self.evidence = evidence


class NumericsError(ShoalError):
    """A number that training depends on is wrong."""

    code = "numerics"
    exit_status = 8
    default_hint = "The work is repeated elsewhere; if it persists, lower the learning rate."


class NonFinite(NumericsError):
    """NaN or infinity in a tensor that crossed a boundary between stages."""

    code = "non_finite"

    def __init__(self, stage: int, direction: str, peer: str) -> None:
        super().__init__(f"stage {stage} {direction} tensor from {peer} holds NaN or infinity")
        self.stage, self.direction, self.peer = stage, direction, peer


class StateMismatch(NumericsError):
    """A state's digest is not the one that the swarm decided for that step."""

    code = "state_mismatch"
    default_hint = "The node fetches the state again from another holder of its stage."


_DISK_HINTS = {
    errno.ENOSPC: "Free disk space, or name a directory on another disk with --state.",
    errno.EDQUOT: "Free some of your disk quota, or name another directory with --state.",
    errno.EROFS: "Name a directory that can be written with --state.",
    errno.EACCES: "Make it accessible to this user, or name another directory with --state.",
    errno.EPERM: "Make it accessible to this user, or name another directory with --state.",
}


def as_shoal_error(error: Exception) -> ShoalError:
    """Return the error in our words: what the system refused is a resource, the rest a bug."""
    if isinstance(error, ShoalError):
        return error
    if isinstance(error, OSError):
        return ResourceError(_cause_of(error), _DISK_HINTS.get(error.errno or 0))
    return ShoalError(f"{type(error).__name__}: {error}")


def _cause_of(error: OSError) -> str:
    """Return ``reason: file`` without the number, which helps nobody."""
    if error.strerror is None:
        return str(error) or type(error).__name__
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
