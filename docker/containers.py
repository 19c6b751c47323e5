"""What a container is, in Linux's own words: namespaces, bind mounts, a veth on a bridge."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

SUBNET = "10.219.7"
# Runs as the first process of the container's namespaces and becomes its entry point by exec.
ENTER = """
set -e
mount --make-rprivate /
mount --bind {rootfs} {root}
{binds}
mount -o remount,bind,{mode} {root}
mount -t proc proc {root}/proc
mount -t tmpfs -o mode=1777 tmpfs {root}/tmp
mount -t tmpfs -o mode=755 tmpfs {root}/dev
mkdir -m 1777 {root}/dev/shm
mknod -m 666 {root}/dev/null c 1 3
mknod -m 666 {root}/dev/zero c 1 5
mknod -m 666 {root}/dev/random c 1 8
mknod -m 666 {root}/dev/urandom c 1 9
exec chroot {root} {command}
"""


class Image:
    """An image's files and what its configuration says about running it."""

    def __init__(self, folder: Path) -> None:
        self.rootfs = (folder / "rootfs").resolve()
        config = json.loads((folder / "config.json").read_text())["Docker"]["config"]
        self.entrypoint: list[str] = config.get("Entrypoint") or []
        self.command: list[str] = config.get("Cmd") or []
        self.environment = dict(item.split("=", 1) for item in config.get("Env") or [])
        self.folder: str = config.get("WorkingDir") or "/"
        self.health: list[str] = (config.get("Healthcheck") or {}).get("Test") or []
        self.user = _ids(self.rootfs, config.get("User") or "root")


class Network:
    """A bridge in a namespace of its own and one namespace per service; nothing of the host's."""

    def __init__(self, names: Sequence[str], work: Path) -> None:
        self._prefix = f"shoal{os.getpid()}"
        self._names = list(names)
        self.hosts = work / "hosts"
        self.addresses = {name: f"{SUBNET}.{k}" for k, name in enumerate(names, start=2)}

    def __enter__(self) -> Self:
        lines = [f"{address} {name}" for name, address in self.addresses.items()]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        bridge = self.namespace("bridge")
        _run("ip", "netns", "add", bridge)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for name in self._names:
            self._attach(name, bridge)
        return self

    def _attach(self, name: str, bridge: str) -> None:
        own, port = self.namespace(name), f"p{self._names.index(name)}"
        _run("ip", "netns", "add", own)
        _run("ip", "-n", bridge, "link", "add", port, "type", "veth",
             "peer", "name", "eth0", "netns", own)  # fmt: skip
        _run("ip", "-n", bridge, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", own, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _run("ip", "-n", own, "link", "set", link, "up")

    def namespace(self, name: str) -> str:
        """The network namespace of a service."""
        return f"{self._prefix}-{name}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in (*self._names, "bridge"):
            subprocess.run(["ip", "netns", "delete", self.namespace(name)], check=False)


class Container:
    """One service: started, asked, ended. Leaving the context kills what still runs."""

    def __init__(
        self, name: str, service: dict[str, Any], image: Image, network: Network, work: Path
    ) -> None:
        self.name = name
        self._service, self._image, self._network = service, image, network
        self._volumes = work / "volumes"
        self._root = work / "roots" / name
        self._log = work / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> Path:
        """The node's state directory, seen from outside."""
        return self._volumes / self.name

    def volume(self, name: str) -> list[Path]:
        """What lies in a named volume."""
        return list((self._volumes / name).iterdir())

    def start(self) -> None:
        """Run the service's command as process 1 of new namespaces, without a terminal."""
        self._root.mkdir(parents=True, exist_ok=True)
        script = ENTER.format(
            rootfs=shlex.quote(str(self._image.rootfs)),
            root=shlex.quote(str(self._root)),
            binds="\n".join(self._binds()),
            mode="ro" if self._service.get("read_only") else "rw",
            command=shlex.join(self._as_user(self._command())),
        )
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", self._network.namespace(self.name), "unshare", "--mount",
                 "--pid", "--ipc", "--uts", "--fork", "--kill-child", "sh", "-c", script],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _binds(self) -> list[str]:
        commands = []
        for volume in (*self._service.get("volumes", []), f"{self._network.hosts}:/etc/hosts:ro"):
            source, target, *mode = volume.split(":")
            place = Path(f"{self._image.rootfs}{target}")
            here = self._source(source, place)
            if not place.exists():  # an engine makes it, too
                place.mkdir(parents=True) if here.is_dir() else place.touch()
            inside = shlex.quote(f"{self._root}{target}")
            commands.append(f"mount --bind {shlex.quote(str(here))} {inside}")
            commands.append(f"mount -o remount,bind,{(mode or ['rw'])[0]} {inside}")
        return commands

    def _source(self, source: str, place: Path) -> Path:
        """A path, or a named volume, which begins as the image's folder."""
        if "/" in source:
            return (Path(__file__).parent / source).resolve()
        volume = self._volumes / source
        if not volume.exists():
            volume.mkdir(parents=True)
            shutil.copystat(place, volume)
            owner = place.stat()
            os.chown(volume, owner.st_uid, owner.st_gid)
        return volume

    def _command(self) -> list[str]:
        entrypoint = self._service.get("entrypoint")
        command = self._service.get("command")
        if entrypoint is not None:
            return [*entrypoint, *(command or [])]
        return [*self._image.entrypoint, *(command or self._image.command)]

    def _as_user(self, command: Sequence[str]) -> list[str]:
        user, group = self._image.user
        environment = {**self._image.environment, **self._service.get("environment", {})}
        drop = ["--bounding-set=-all", "--inh-caps=-all"] if self._service.get("cap_drop") else []
        return [
            "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs",
            *drop, "env", "-i", "-C", self._image.folder,
            *(f"{name}={value}" for name, value in environment.items()), *command,
        ]  # fmt: skip

    # --- asking ----------------------------------------------------------------------------

    def status(self) -> int | None:
        """The exit status, None while it runs or before it started."""
        return None if self._process is None else self._process.poll()

    def is_healthy(self) -> bool:
        """Run the health check inside, as an engine does."""
        test = self._service.get("healthcheck", {}).get("test") or self._image.health
        command = ["sh", "-c", test[1]] if test[0] == "CMD-SHELL" else test[1:]
        first = self._first()
        if first is None:
            return False
        enter = ["nsenter", "-t", str(first.pid), "-m", "-p", "-n", "-i", "-u", "--root", "--wd=/"]
        done = subprocess.run(
            [*enter, *self._as_user(command)], check=False, capture_output=True, timeout=60
        )
        return done.returncode == 0

    def in_network(self, command: Sequence[str]) -> str:
        """Run a program of the host in the container's network; empty if it failed."""
        namespace = self._network.namespace(self.name)
        done = subprocess.run(
            ["ip", "netns", "exec", namespace, *command],
            check=False,
            capture_output=True,
            text=True,
        )
        return done.stdout if done.returncode == 0 else ""

    def processes(self, name: str | None = None) -> list[psutil.Process]:
        """What runs inside, or what of it has this name."""
        first = self._first()
        found = [first, *first.children(recursive=True)] if first else []
        return [process for process in found if name in (None, _told(process.name))]

    def zombies(self) -> list[psutil.Process]:
        """Processes that ended and that nobody reaped."""
        return [p for p in self.processes() if _told(p.status) == psutil.STATUS_ZOMBIE]

    def last_words(self) -> str:
        """The end of the output and of the node's log."""
        files = [self._log, self.state / "log.jsonl"]
        texts = [f"{f}:\n{f.read_text(errors='replace')[-3000:]}" for f in files if f.exists()]
        return "\n".join(texts)

    # --- ending ----------------------------------------------------------------------------

    def terminate(self) -> None:
        """Send SIGTERM to process 1, as `docker stop` does."""
        first = self._first()
        if first is not None:
            first.send_signal(signal.SIGTERM)

    def _first(self) -> psutil.Process | None:
        """Process 1 of the container: the child of `unshare`."""
        if self._process is None or self._process.poll() is not None:
            return None
        try:
            children = psutil.Process(self._process.pid).children()
        except psutil.NoSuchProcess:
            return None
        return children[0] if children else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            first = self._first()
            if first is not None:
                first.kill()  # the kernel ends all others of its namespace
            self._process.wait()


def _told(ask: Callable[[], str]) -> str:
    """Ask a process something; nothing if it is gone by now."""
    try:
        return ask()
    except psutil.NoSuchProcess:
        return ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _ids(rootfs: Path, user: str) -> tuple[int, int]:
    """Look a user of the image up in its own /etc/passwd."""
    for line in (rootfs / "etc/passwd").read_text().splitlines():
        fields = line.split(":")
        if user in (fields[0], fields[2]):
            return int(fields[2]), int(fields[3])
    raise ValueError(f"the image has no user {user}")
