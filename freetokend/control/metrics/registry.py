"""Everything that /metrics shows, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from freetokend.control.metrics.collector import StateCollector
from freetokend.control.metrics.elastic import ResizeCounter
from freetokend.control.metrics.meters import AsgiApp, HttpMeter, MeteredGateway, SequenceMeter
from freetokend.control.state import RequestTotals, ServiceState
from freetokend.core.config.resolved import ResolvedConfig
from freetokend.link.messages import EngineGateway


class Metrics:
    """Owner of the registry; `resizes` counts resizes. The state's metrics come once `follow` has
    been called."""

    def __init__(self, config: ResolvedConfig, model: str) -> None:
        self._config = config
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self._sequences = SequenceMeter(self._registry, model)
        self._http = HttpMeter(self._registry)
        self.resizes = ResizeCounter(self._registry, model)

    def follow(self, state: Callable[[], ServiceState]) -> None:
        """Show the state that `state` gives at each scrape. Call once."""
        self._registry.register(
            StateCollector(
                state,
                start_time_s=time.time(),
                max_running_count=self._config.engine.max_running_count,
                max_waiting_count=self._config.engine.max_waiting_count,
            )
        )

    def totals(self) -> RequestTotals:
        """Sequences that have ended so far."""
        return self._sequences.totals()

    def metered(self, gateway: EngineGateway) -> MeteredGateway:
        """`gateway`, with every sequence that passes it measured."""
        return MeteredGateway(gateway, self._sequences)

    def metered_app(self, app: AsgiApp) -> AsgiApp:
        """`app`, with every HTTP request measured."""
        return self._http.wrap(app)

    def render(self) -> tuple[bytes, str]:
        """The exposition text and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
