"""The families of the metrics that are read off the state, for one scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from freetokend.control.metrics.catalogue import STATE_METRICS, Kind, metric


class Families:
    """The families of one scrape, made from the catalogue."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
            entry.name: (
                CounterMetricFamily(entry.name, entry.help, labels=entry.labels)
                if entry.kind is Kind.COUNTER
                else GaugeMetricFamily(entry.name, entry.help, labels=entry.labels)
            )
            for entry in STATE_METRICS
        }

    def add(self, short_name: str, value: float, *labels: str) -> None:
        """A sample of the family of this name, which goes without its prefix."""
        self._families[metric(short_name).name].add_metric(labels, value)

    def add_known(self, short_name: str, value: float | None, *labels: str) -> None:
        """The same, or no sample for what is not known."""
        if value is not None:
            self.add(short_name, value, *labels)

    def all(self) -> Iterable[Family]:
        """Every family, with or without samples."""
        return self._families.values()
