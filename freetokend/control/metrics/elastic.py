"""The metrics of the elastic memory: what holds now, and resizes as they are answered."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from freetokend.control.elastic import ElasticStatus, ResizeResult
from freetokend.control.metrics.families import Families
from freetokend.control.metrics.meters import counter, histogram
from freetokend.link.messages import ResizeOutcome


def add_elastic(families: Families, status: ElasticStatus, now_s: float, model: str) -> None:
    """What is not known has no sample; nothing before the first tick."""
    if status.ticked_s is None:
        return
    families.add("elastic_enabled", status.enabled, model)
    families.add_known("elastic_budget_bytes", status.budget_bytes, model)
    families.add_known("elastic_required_free_bytes", status.required_free_bytes, model)
    if status.actual is not None:
        families.add("elastic_actual_bytes", status.actual.size_bytes, model)
    if status.target is not None:
        families.add("elastic_target_bytes", status.target.size_bytes, model)
    families.add("elastic_reason", 1, model, status.standing.code.value)
    families.add("elastic_holds", len(status.holds), model)
    families.add("elastic_held_bytes", sum(hold.size_bytes for hold in status.holds), model)
    families.add("elastic_tick_age_seconds", max(0.0, now_s - status.ticked_s), model)
    for kind, count in status.events_counts:
        families.add("elastic_events_total", count, model, kind)


class ResizeCounter:
    """Counts answered resizes of one model. Implements `ResizeMeter`."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        self._resizes = counter("resizes_total", registry)
        self._stall = histogram("resize_stall_seconds", registry).labels(model)
        self._wait = histogram("resize_safe_point_wait_seconds", registry).labels(model)
        self._answer = histogram("resize_answer_seconds", registry).labels(model)

    def resized(self, result: ResizeResult) -> None:
        """One was answered."""
        self._resizes.labels(self._model, result.trigger, result.outcome.value).inc()
        if result.outcome is ResizeOutcome.DONE:
            self._stall.observe(result.stall_s)
            self._wait.observe(result.wait_s)
            self._answer.observe(result.answer_s)
