"""Prometheus metrics. What is a state is read from the machine at scrape time, so a stuck refit shows its
phase and a growing age; what is a history is counted as it happens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..proto.messages import NodeState, RefitReport
from .lateness import Phase
from .machine import Machine

_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """One broadcaster's registry. ``clock`` gives the machine's time."""

    def __init__(self, *, machine: Machine, clock: Callable[[], float]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StateCollector(machine=machine, clock=clock))
        self._seconds = Histogram(
            "weightcast_refit_seconds",
            "Seconds of each phase of a refit.",
            ["phase"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._refits = Counter(
            "weightcast_refits", "Refits by outcome: ok or failed.", ["outcome"], registry=self._registry
        )
        self._failures = Counter(
            "weightcast_failures", "Failed refits by cause code.", ["cause"], registry=self._registry
        )
        self._junk = Counter(
            "weightcast_junk_frames", "Frames that were no message.", ["socket"], registry=self._registry
        )

    def refit_ended(self, report: RefitReport) -> None:
        """Count one refit."""
        self._refits.labels("ok" if report.ok else "failed").inc()
        if report.cause is not None:
            self._failures.labels(report.cause.code).inc()
        for phase, seconds in msgspec.structs.asdict(report.seconds).items():
            self._seconds.labels(phase).observe(seconds)

    def junk_frame(self, socket: str) -> None:
        """Count one frame, on the socket of "node", "trainer" or "source", that was no message."""
        self._junk.labels(socket).inc()

    def page(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)


class _StateCollector(Collector):
    def __init__(self, *, machine: Machine, clock: Callable[[], float]) -> None:
        self._machine = machine
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        machine = self._machine
        nodes = machine.fleet.nodes
        states = GaugeMetricFamily(
            "weightcast_node_state", "1 for the state a node is in.", labels=["node", "state"]
        )
        steps = GaugeMetricFamily(
            "weightcast_node_version", "Step that a node verifiably holds.", labels=["node"]
        )
        for name, node in nodes.items():
            for state in NodeState:
                states.add_metric([name, str(state)], float(node.state is state))
            if node.version is not None:
                steps.add_metric([name], node.version.step)
        yield states
        yield steps
        refit = machine.refit
        phases = GaugeMetricFamily(
            "weightcast_refit_phase", "1 for the phase the running refit is in.", labels=["phase"]
        )
        for phase in Phase:
            if phase is not Phase.DONE:
                phases.add_metric([str(phase)], float(refit is not None and refit.phase is phase))
        yield phases
        age = 0.0 if refit is None else self._clock() - refit.started
        yield GaugeMetricFamily(
            "weightcast_refit_age_seconds", "Age of the running refit, 0 if none.", value=age
        )
        rate = 0.0 if machine.last_report is None else machine.last_report.wire_rate
        yield GaugeMetricFamily(
            "weightcast_wire_bytes_per_second", "Bytes per second of the last refit's broadcasts.", value=rate
        )
        yield GaugeMetricFamily(
            "weightcast_epoch", "Number of the weights update group.", value=machine.epochs.epoch
        )
        yield CounterMetricFamily("weightcast_bytes", "Payload bytes broadcast.", value=machine.bytes_sent)
        yield CounterMetricFamily(
            "weightcast_ignored_messages",
            "Messages late, repeated or out of turn.",
            value=machine.ignored_messages,
        )
