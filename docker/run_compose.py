"""Runs compose.yaml without Docker: every service in namespaces of its own, on one bridge.

    python docker/run_compose.py IMAGES WORK

IMAGES holds a folder per image with its files (rootfs/) and its configuration (config.json). The
services start in the order that the file asks for; then the checks of issue "image": all are
scraped, all work, a killed side-car heals and leaves no zombie, SIGTERM ends each cleanly.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.parse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import yaml
from containers import Container, Image, Network

COMPOSE = Path(__file__).with_name("compose.yaml")
NODES = ("organiser", *(f"volunteer-{k}" for k in range(1, 7)))
STEPS = 3
LIMIT_S = 300.0
POLL_S = 1.0
_must_run: list[Container] = []


def main() -> None:
    """Bring everything up, check it, take it down; the exit status tells whether all held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path)
    parser.add_argument("work", type=Path)
    options = parser.parse_args()
    compose = yaml.safe_load(COMPOSE.read_text())
    services = {n: s for n, s in compose["services"].items() if not s.get("profiles")}
    images = {s["image"]: Image(options.images / folder(s["image"])) for s in services.values()}
    with ExitStack() as stack:
        network = stack.enter_context(Network(sorted(services), options.work))
        containers = {
            name: stack.enter_context(
                Container(name, service, images[service["image"]], network, options.work)
            )
            for name, service in services.items()
        }
        ready: set[str] = set()
        for name in started_in_order(services):
            for other, wanted in services[name].get("depends_on", {}).items():
                if other not in ready:
                    await_service(containers[other], wanted["condition"])
                    ready.add(other)
            containers[name].start()
            if name != "create":
                _must_run.append(containers[name])
            said(f"{name} started")
        check_running(containers)
        check_healing(containers["volunteer-1"])
        check_ends(containers)
    said("all held")


def folder(image: str) -> str:
    """prom/prometheus:v1 -> prometheus."""
    return image.rsplit("/", 1)[-1].partition(":")[0]


def started_in_order(services: dict[str, dict[str, dict[str, object]]]) -> list[str]:
    """Return the services, each after those that it depends on."""
    order: list[str] = []

    def add(name: str) -> None:
        for other in services[name].get("depends_on", {}):
            add(other)
        if name not in order:
            order.append(name)

    for name in services:
        add(name)
    return order


def await_service(container: Container, condition: str) -> None:
    """Wait until a service is as those who depend on it ask."""
    if condition == "service_healthy":
        wait_for(container.is_healthy, f"{container.name} to be healthy")
        return
    wait_for(lambda: container.status() is not None, f"{container.name} to end")
    must(container.status() == 0, f"{container.name} ended with 0", container)


def check_running(containers: dict[str, Container]) -> None:
    """Prometheus sees all nodes, and the work of each counts."""
    prometheus = containers["prometheus"]

    def number(query: str) -> float:
        answer = ask(prometheus, f"/api/v1/query?query={urllib.parse.quote(query)}")
        return float(answer["data"]["result"][0]["value"][1]) if answer["data"]["result"] else 0.0

    total = "shoal_microbatches_committed_total"
    wait_for(lambda: number('sum(up{job="shoal"})') == len(NODES), "Prometheus to scrape all nodes")
    wait_for(lambda: number(f"sum({total})") > 0, "the first microbatch that counts")
    useful = f"count(sum by (instance) ({total}) > 0)"
    wait_for(lambda: number(useful) == len(NODES), "work of every node to count")
    wait_for(lambda: number("min(shoal_step)") >= STEPS, f"step {STEPS} everywhere")
    firing = ask(prometheus, "/api/v1/alerts")["data"]["alerts"]
    must([a for a in firing if a["state"] == "firing"] == [], "no alert fires")
    rules = ask(prometheus, "/api/v1/rules")["data"]["groups"]
    must(all(r["health"] == "ok" for g in rules for r in g["rules"]), "the alert rules evaluate")
    for name in NODES:
        must(containers[name].is_healthy(), f"{name} is healthy", containers[name])


def check_healing(container: Container) -> None:
    """Kill p2pd, then the side-car: both come back, and process 1 has reaped what was left."""

    for victim in ("p2pd", "the side-car"):
        before = container.processes("p2pd")
        must(len(before) == 1, f"{container.name} has one p2pd", container)
        (before[0] if victim == "p2pd" else before[0].parent()).kill()

        def is_healed(old: object = before) -> bool:
            now = container.processes("p2pd")
            return len(now) == 1 and now != old

        wait_for(is_healed, f"{victim} to be replaced")
        wait_for(lambda: container.zombies() == [], "no zombie to be left")


def check_ends(containers: dict[str, Container]) -> None:
    """One SIGTERM each: the volunteers drain while the organiser is there, then the rest."""
    last = ("organiser", "prometheus")
    _must_run.clear()
    for names in ([n for n in NODES if n not in last], [*last]):
        began = time.monotonic()
        for name in names:
            containers[name].terminate()
        for name in names:
            container = containers[name]
            wait_for(lambda c=container: c.status() is not None, f"{name} to end")
            must(container.status() == 0, f"{name} ended with 0 after SIGTERM", container)
        said(f"{len(names)} ended within {time.monotonic() - began:.1f} s")
    for name in NODES:
        left = {path.name for path in containers[name].state.iterdir()}
        must("weights" in left, f"{name} wrote its weights", containers[name])
        must(not {"control.sock", "invite"} & left, f"{name} left no socket and no invite")
    must(containers["organiser"].volume("invite") == [], "the invite is withdrawn")


def ask(container: Container, path: str) -> dict:
    """GET from Prometheus, from within its network."""
    code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    url = f"http://127.0.0.1:9090{path}"
    answer = container.in_network([sys.executable, "-c", code, url])
    return json.loads(answer) if answer else {"data": {"result": [], "alerts": [], "groups": []}}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until ``condition`` holds; end the program if it does not in time."""
    began = time.monotonic()
    while not condition():
        for container in _must_run:
            must(container.status() is None, f"{container.name} still runs", container)
        if time.monotonic() - began > LIMIT_S:
            sys.exit(f"FAILED: waited {LIMIT_S:.0f} s for {what}")
        time.sleep(POLL_S)
    said(f"{what}: {time.monotonic() - began:.1f} s")


def must(holds: bool, what: str, container: Container | None = None) -> None:
    """End the program unless ``holds``, with the container's last words."""
    if not holds:
        sys.exit(f"FAILED: {what}\n{container.last_words() if container else ''}")


def said(text: str) -> None:
    print(time.strftime("%H:%M:%S", time.gmtime()), "", text, flush=True)


if __name__ == "__main__":
    main()
