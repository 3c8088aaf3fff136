"""A built engine answers a chat with the demo model, its experts in each weight format."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetokend.demo.errors import DemoError
from freetokend.ftw.formats import parse_format
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import FinishReason
from freetokend.serving.model_text import load_model_text
from tests.enginehost.local_engine import ask, local_engine, serve
from tests.support.demo_model import demo_ftw

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France? Answer in one sentence."


def quantised(variant: str, name: str) -> Path:
    try:
        return demo_ftw(variant, name)
    except DemoError as error:
        pytest.fail(f"the {variant} model is needed: {error}", pytrace=False)


@pytest.mark.parametrize("name", ["fp8_block", "int4_g64_bf16_zp", "q4_0", "nvfp4", "mxfp4"])
def test_a_chat_is_answered(name: str) -> None:
    path = quantised("demo", name)
    directory = FtwDirectory(path)
    assert directory.index.expert_bank.format == str(parse_format(name))
    assert directory.index.quantisation.experts_from == "bf16"
    text = load_model_text(path)
    prompt = text.render_chat([{"role": "user", "content": QUESTION}])
    with local_engine(directory, max_running_count=2, max_context_tokens=512) as built:
        served = serve(built, [ask(one, prompt, 24, ignore_eos=False) for one in ("a", "b")])
    assert served.tokens["a"] == served.tokens["b"]
    assert served.ends["a"].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    answer = text.decode(served.tokens["a"])
    assert "Paris" in answer
