"""Coalescing loses no token and no end, keeps order, and stays bounded."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.errors import Reason
from freetokend.link.messages import (
    EngineMessage,
    EngineStats,
    Failure,
    FinishReason,
    Heartbeat,
    LoadProgress,
    LoadStage,
    SequenceUpdate,
    StepReport,
)
from freetokend.link.outbox import Outbox
from freetokend.link.trace_messages import RoutedRows, TracedStep
from tests.link.strategies import request_ids, tokens

Event = tuple[int | FinishReason, ...]

# Ids return after their end, as a client that re-uses ids would do.
reports = st.lists(
    st.lists(
        st.builds(
            SequenceUpdate,
            request_id=request_ids,
            token_ids=tokens,
            finish_reason=st.none() | st.sampled_from(FinishReason),
        ),
        max_size=4,
    ).map(tuple),
    max_size=12,
)


def story(messages: Iterable[EngineMessage]) -> dict[str, list[int | FinishReason]]:
    """What each request saw, one token or end at a time."""
    seen: dict[str, list[int | FinishReason]] = defaultdict(list)
    for message in messages:
        if isinstance(message, StepReport):
            for update in message.outputs:
                seen[update.request_id].extend(update.token_ids)
                if update.finish_reason is not None:
                    seen[update.request_id].append(update.finish_reason)
    return {key: events for key, events in seen.items() if events}


@given(reports, st.sets(st.integers(0, 11)))
def test_merging_tells_the_same_story(
    outputs: list[tuple[SequenceUpdate, ...]], taken_after: set[int]
) -> None:
    outbox = Outbox()
    received: list[EngineMessage] = []
    sent = [
        StepReport(step_index=index, outputs=entry, stats=EngineStats(steps_count=index))
        for index, entry in enumerate(outputs)
    ]
    for index, report in enumerate(sent):
        outbox.put(report)
        assert outbox.waiting_count() == 1
        if index in taken_after:
            message = outbox.take()
            assert message is not None
            received.append(message)
    outbox.close()
    while (message := outbox.take()) is not None:
        received.append(message)
    assert story(received) == story(sent)
    if sent:
        last = received[-1]
        assert isinstance(last, StepReport)
        assert (last.step_index, last.stats) == (sent[-1].step_index, sent[-1].stats)


def test_waiting_messages_are_bounded_and_in_order() -> None:
    outbox = Outbox()
    for index in range(1000):
        progress = LoadProgress(stage=LoadStage.READ, done_bytes=index, total_bytes=1000)
        outbox.put(progress)
        outbox.put(Heartbeat(progress_count=index, busy=True))
        outbox.put(StepReport(step_index=index))
    outbox.put(Failure(reason=Reason.INTERNAL, message="last"))
    assert outbox.waiting_count() == 4
    outbox.close()
    outbox.put(Heartbeat(progress_count=0, busy=False))
    taken = [outbox.take() for _ in range(5)]
    assert taken == [
        LoadProgress(stage=LoadStage.READ, done_bytes=999, total_bytes=1000),
        Heartbeat(progress_count=999, busy=True),
        StepReport(step_index=999),
        Failure(reason=Reason.INTERNAL, message="last"),
        None,
    ]


def test_take_waits_for_a_message() -> None:
    outbox = Outbox()
    taken: list[EngineMessage | None] = []
    reader = threading.Thread(target=lambda: taken.append(outbox.take()))
    reader.start()
    outbox.put(StepReport(step_index=7))
    reader.join(timeout=10)
    assert taken == [StepReport(step_index=7)]


def test_recorded_steps_are_counted_until_they_are_taken() -> None:
    outbox = Outbox()
    rows = RoutedRows(is_prefill=False, rows_count=1, expert_ids=bytes(12))
    for count in (1, 2):
        outbox.put(TracedStep(trace_id="t", parts=(rows,) * count))
        outbox.put(StepReport(step_index=count))
    assert outbox.traced_bytes() == 36
    outbox.take()
    assert outbox.traced_bytes() == 24
    outbox.close()
    outbox.put(TracedStep(trace_id="t", parts=(rows,)))
    assert outbox.traced_bytes() == 24, "nobody will take it"
