"""Joining updates, so that a slow reader costs one bounded entry per request, never a queue."""

from __future__ import annotations

from dataclasses import replace

from freetokend.link.messages import SequenceUpdate, StepReport


def merge_updates(older: SequenceUpdate, newer: SequenceUpdate) -> SequenceUpdate:
    """One update that says what `older` and then `newer` said; both are of one request."""
    return replace(newer, token_ids=older.token_ids + newer.token_ids)


def merge_reports(older: StepReport, newer: StepReport) -> StepReport:
    """One report in place of two consecutive ones: no token and no finish is lost.

    A request that finished in `older` and whose id returns in `newer` (a re-used id) keeps two
    entries, because the second belongs to another sequence.
    """
    merged: list[SequenceUpdate] = []
    open_index: dict[str, int] = {}
    for update in older.outputs + newer.outputs:
        index = open_index.get(update.request_id)
        if index is None:
            index = len(merged)
            merged.append(update)
        else:
            merged[index] = merge_updates(merged[index], update)
        if update.finish_reason is None:
            open_index[update.request_id] = index
        else:
            open_index.pop(update.request_id, None)
    return StepReport(step_index=newer.step_index, outputs=tuple(merged), stats=newer.stats)
