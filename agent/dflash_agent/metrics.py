"""Figures of GPUs and runs for Prometheus, named after the habits of dcgm-exporter.

Nothing of prometheus_client is loaded before somebody asks: on most nodes nobody does.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_agent import __version__
from dflash_agent.gpus import Gpu
from dflash_agent.manager import unit_of
from dflash_agent.status import RunStatus
from dflash_agent.verdict import Snapshot, dirt, judge_in_use
from dflash_agent.xids import short_bus_id

CLIENT_SECONDS = 10  # for a client to send its request
GPU_LABELS = ("gpu", "UUID", "device", "modelName", "pci_bus_id")


def run_of(unit: str) -> str:
    """The run of a unit; empty for other units.

    >>> run_of("dflash-train@run1.service")
    'run1'
    """
    run = unit.removeprefix("dflash-train@").removesuffix(".service")
    return run if unit_of(run) == unit else ""


@dataclass(frozen=True, slots=True)
class Scrape:
    """What the figures are taken from."""

    snapshot: Snapshot
    runs: tuple[RunStatus, ...] = ()
    xids: Mapping[tuple[str, int], int] = field(default_factory=dict)  # how often, by short bus id and code


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: its samples are the values of its labels, and a figure. It counts if its name ends in _total."""

    name: str
    help: str
    labels: tuple[str, ...]
    samples: tuple[tuple[tuple[str, ...], float], ...]


def families(scrape: Scrape) -> Iterator[Family]:
    """All metrics that have a sample."""
    made = (_agent(scrape), *_gpu_families(scrape), *_run_families(scrape))
    yield from (family for family in made if family.samples)


def _agent(scrape: Scrape) -> Family:
    labels = (__version__, scrape.snapshot.reading.driver)
    return Family(
        "dflash_agent_info", "Version of the agent and of the driver", ("version", "driver"), ((labels, 1),)
    )


def _gpu_families(scrape: Scrape) -> Iterator[Family]:
    snapshot = scrape.snapshot

    def each(name: str, text: str, value: Callable[[Gpu], float | None]) -> Family:
        figures = [(_labels(gpu), value(gpu)) for gpu in snapshot.reading.gpus]
        samples = tuple((labels, figure) for labels, figure in figures if figure is not None)
        return Family(f"dflash_gpu_{name}", text, GPU_LABELS, samples)

    yield each("memory_total_bytes", "Memory of the GPU", lambda gpu: gpu.total)
    yield each("memory_used_bytes", "Memory in use, the driver's included", lambda gpu: gpu.used)
    yield each("memory_reserved_bytes", "Memory that the driver keeps for itself", lambda gpu: gpu.reserved)
    yield each("memory_held_bytes", "Memory that processes hold: used less reserved", lambda gpu: gpu.held)
    yield each("utilization_percent", "Time in which a kernel ran", lambda gpu: gpu.utilization)
    yield each("temperature_celsius", "Temperature", lambda gpu: gpu.temperature)
    yield each("power_watts", "Power", lambda gpu: gpu.power)
    yield each(
        "ecc_uncorrected_errors",
        "Uncorrected memory errors since the driver was loaded",
        lambda gpu: gpu.ecc_uncorrected,
    )
    yield each(
        "clean",
        "1 if nothing stands in the way but the run that has leased the GPU",
        lambda gpu: float(all(finding.severity != "refuse" for finding in judge_in_use(snapshot, gpu))),
    )
    yield each(
        "holders",
        "Processes that hold the GPU, house-keepers aside",
        lambda gpu: len({holder.pid for pairs in dirt(snapshot, gpu)[:2] for holder, _ in pairs}),
    )
    leased = [(gpu, snapshot.leases[gpu.uuid]) for gpu in snapshot.reading.gpus if gpu.uuid in snapshot.leases]
    yield Family(
        "dflash_gpu_leased",
        "The run that has the GPU",
        (*GPU_LABELS, "run"),
        tuple(((*_labels(gpu), run_of(lease.unit)), 1) for gpu, lease in leased),
    )
    by_bus_id = {short_bus_id(gpu.bus_id): gpu for gpu in snapshot.reading.gpus if gpu.bus_id}
    seen = [(by_bus_id[xid.bus_id], xid) for xid in snapshot.xids if xid.bus_id in by_bus_id]
    yield Family(
        "dflash_gpu_xid_errors_total",
        "Xid errors that were seen",
        (*GPU_LABELS, "xid"),
        tuple(
            ((*_labels(gpu), str(xid.code)), max(1, scrape.xids.get((xid.bus_id, xid.code), 0)))
            for gpu, xid in seen
        ),
    )


def _labels(gpu: Gpu) -> tuple[str, ...]:
    device = "" if gpu.minor is None else f"nvidia{gpu.minor}"
    return str(gpu.index), gpu.uuid, device, gpu.name, gpu.bus_id


def _run_families(scrape: Scrape) -> Iterator[Family]:
    def each(name: str, text: str, value: Callable[[RunStatus], float | None]) -> Family:
        figures = [((row.run,), value(row)) for row in scrape.runs]
        samples = tuple((labels, figure) for labels, figure in figures if figure is not None)
        return Family(f"dflash_run_{name}", text, ("run",), samples)

    yield Family(
        "dflash_run_state",
        "State of the run: training, starting, restarting, stopping, stopped, failed, …",
        ("run", "state"),
        tuple(((row.run, row.state.partition(" ")[0]), 1) for row in scrape.runs),
    )
    yield each(
        "restarts", "Automatic restarts since it was last started", lambda r: r.attempts - 1 if r.attempts else None
    )
    yield each("step", "Optimizer steps done", lambda row: row.step)
    yield each("loss", "Loss of the last logged step", lambda row: row.loss)
    yield each("tokens_per_second", "Tokens trained on per second", lambda row: row.tokens_per_s)
    yield each(
        "checkpoint_age_seconds",
        "Age of the newest whole checkpoint",
        lambda row: time.time() - row.checkpoint_time if row.checkpoint_time else None,
    )


class Collector:
    """What prometheus_client asks at each scrape."""

    def __init__(self, take: Callable[[], Scrape]) -> None:
        self._take = take

    def collect(self) -> Iterator[Any]:
        """The metrics of this moment."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in families(self._take()):
            kind = CounterMetricFamily if family.name.endswith("_total") else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=family.labels)
            for labels, value in family.samples:
                metric.add_metric(labels, value)
            yield metric


def listen(address: str) -> socket.socket:
    """A socket at "ADDRESS:PORT"; an IPv6 address may be in brackets. Raises OSError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(port)), family=family, backlog=16)


def serve(listener: socket.socket, take: Callable[[], Scrape]) -> None:
    """Answers scrapes at /metrics, each in a thread of its own. Does not return."""
    from socketserver import ThreadingMixIn
    from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

    from prometheus_client import CollectorRegistry, make_wsgi_app

    class Handler(WSGIRequestHandler):
        timeout = CLIENT_SECONDS

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True

    registry = CollectorRegistry()
    registry.register(Collector(take))  # type: ignore[arg-type,unused-ignore]
    server = Server(listener.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = "localhost", listener.getsockname()[1]
    server.setup_environ()
    server.set_app(make_wsgi_app(registry))
    server.serve_forever(poll_interval=3600)  # it is not shut down, so it need not wake up


def serve_in_thread(listener: socket.socket, take: Callable[[], Scrape]) -> None:
    """The same beside the caller."""
    threading.Thread(target=serve, args=(listener, take), daemon=True, name="metrics").start()
