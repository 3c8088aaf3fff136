"""What is reserved for a step holds what a native step really takes."""

from __future__ import annotations

import ctypes

from freetokend.core.model_config import model_facts
from freetokend.enginehost.build import step_shape
from freetokend.link.messages import EngineSettings
from freetokend.models.registry import build_program
from freetokend.native.program import KvPages, Program, StepInputs
from freetokend.policy.memory import step_workspace_bytes
from freetokend.tensor.native_program import native_buffers
from tests.models.test_model_config import QWEN3_30B

STEP_TOKENS = 64
OUTPUTS = 16


def prepared(program: Program, tokens: int, outputs: int) -> int:
    """Bytes of the program's memory once there is room for such a step."""
    somewhere = 64  # nothing of it is read by making room
    index = (ctypes.c_int64 * outputs)()
    program.prepare(
        StepInputs(
            token_ids=somewhere,
            tokens_count=tokens,
            outputs=ctypes.addressof(index),
            outputs_count=outputs,
            page_table=somewhere,
            sequence_index=somewhere,
            positions=somewhere,
            sequences_count=1,
            max_pages=1,
            rotations=(),
        ),
        KvPages([], pages_count=1, kv_heads_count=1, page_tokens=1, head_size=1),
    )
    return program.arena_bytes


def test_the_workspace_covers_the_buffers_of_a_step() -> None:
    facts, plan = model_facts(QWEN3_30B), build_program(QWEN3_30B)
    settings = EngineSettings(model="m", max_running_count=OUTPUTS)
    shape = step_shape(plan, facts, settings, STEP_TOKENS, 1)
    taken_bytes = prepared(Program(native_buffers(plan), None), STEP_TOKENS, OUTPUTS)
    buffers_bytes = STEP_TOKENS * shape.token_bytes + OUTPUTS * shape.output_bytes
    # all buffers, and the quarter that memory grows by
    assert buffers_bytes <= taken_bytes <= buffers_bytes + -(-buffers_bytes // 4)
    assert taken_bytes < step_workspace_bytes(shape)
    # what a program does not know of: results of experts
    experts_bytes = STEP_TOKENS * facts.experts_per_token_count * facts.hidden_size * 4
    assert step_workspace_bytes(shape) > taken_bytes + experts_bytes
