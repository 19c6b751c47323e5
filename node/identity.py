"""The node's key file, and the lock that keeps a state directory to one daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from node.paths import StatePaths
from protocol.errors import IdentityError, ResourceError
from protocol.keys import NodeKey, PeerId

_FORBIDDEN_MODE = 0o077
_MAX_KEY_FILE_BYTES = 4096
_KEY_LOCK = "\0shoal/key/"
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid of Linux


def load_or_create_key(paths: StatePaths) -> NodeKey:
    """Return the key of the state directory, made on first use; raise IdentityError."""
    paths.create()
    if not paths.key.exists():
        with suppress(FileExistsError):
            _write_key(paths.key, new_key())
    return load_key(paths.key)


def new_key() -> NodeKey:
    """Return a key that nobody has."""
    return NodeKey(secrets.token_bytes(32))


def keep_key(paths: StatePaths, key: NodeKey) -> None:
    """Make a new key that of the state directory; raise IdentityError if it has one by now."""
    paths.create()
    try:
        _write_key(paths.key, key)
    except FileExistsError:
        raise IdentityError(
            f"another command made the key {paths.key} at the same moment", "Repeat the command."
        ) from None


def load_key(path: Path) -> NodeKey:
    """Read a key file; raise IdentityError if it is missing, malformed or open to others."""
    try:
        with path.open("rb") as file:
            _refuse_if_open_to_others(path, os.fstat(file.fileno()))
            data = file.read(_MAX_KEY_FILE_BYTES)
    except FileNotFoundError:
        raise IdentityError(
            f"there is no key at {path}", "The first `shoal join` or `shoal swarm create` makes it."
        ) from None
    except OSError as error:
        raise IdentityError(f"cannot read the key {path}: {error.strerror}") from error
    try:
        return NodeKey.from_bytes(data)
    except ValueError as error:
        raise IdentityError(
            f"{path} is damaged: {error}",
            "Restore it from a copy, or remove it to begin with a new identity.",
        ) from error


def _refuse_if_open_to_others(path: Path, stat: os.stat_result) -> None:
    if stat.st_mode & _FORBIDDEN_MODE:
        raise IdentityError(
            f"others may read or write the key {path} (mode {stat.st_mode & 0o777:04o})",
            f"chmod 600 {path}",
        )
    if stat.st_uid != os.geteuid():
        raise IdentityError(
            f"the key {path} belongs to another user (uid {stat.st_uid})",
            "Run the node as its owner, or give this user a state directory of its own.",
        )


def _write_key(path: Path, key: NodeKey) -> None:
    """Write a new key whole or not at all; raise FileExistsError if there is one by now."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike rename, fails if another process was first
    finally:
        draft.unlink()


@contextmanager
def sole_use(paths: StatePaths) -> Iterator[None]:
    """Hold the state directory; raise IdentityError if another daemon has it.

    The kernel drops the lock with the process, so that a killed daemon leaves none behind.
    """
    paths.create()
    descriptor = _open_lock(paths.lock)
    try:
        _take_lock(descriptor, paths)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def refuse_in_use(paths: StatePaths) -> None:
    """Raise IdentityError if a daemon has the state directory, which then nobody else changes."""
    if paths.lock.exists():
        with sole_use(paths):
            return


@contextmanager
def sole_key(peer_id: PeerId) -> Iterator[None]:
    """Hold the key on this computer; raise IdentityError if a process of this user has it.

    An abstract socket is a lock that the kernel drops with the process. A stranger could bind the
    name, too, and is not believed: the kernel tells who listens.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
        try:
            lock.bind(_KEY_LOCK + peer_id)
            lock.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ResourceError(f"cannot lock the key: {error.strerror}") from error
            refuse_key_in_use(peer_id)
        yield


def refuse_key_in_use(peer_id: PeerId) -> None:
    """Raise IdentityError if a process of this user holds the key on this computer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(_KEY_LOCK + peer_id)
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return  # nobody listens, or no longer
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid == os.geteuid():
        raise IdentityError(
            f"another node on this computer (process {pid}{_state_of(pid)}) runs with this key",
            "Stop that node, or give this one a key of its own: another --state.",
        )


def _state_of(pid: int) -> str:
    """Return the state directory that a daemon's command line names."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    return f", {words[words.index('--state') + 1]}" if "--state" in words[:-1] else ""


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ResourceError(f"cannot open the lock {path}: {error.strerror}") from error


def _take_lock(descriptor: int, paths: StatePaths) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise ResourceError(f"cannot lock {paths.lock}: {error.strerror}") from error
        holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
        raise IdentityError(
            f"another shoal daemon (process {holder}) runs with {paths.root}",
            "Stop it with `shoal leave`, or give this one another directory with --state.",
        ) from error
