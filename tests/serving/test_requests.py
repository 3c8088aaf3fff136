"""What bodies are accepted, what is refused, and that the refusal names the field."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.errors import InvalidInputError, ModelDataError
from freetokend.serving.chat_template import ChatTemplate
from freetokend.serving.model_text import load_model_text
from freetokend.serving.openai_requests import (
    parse_chat_request,
    parse_completion_request,
    template_messages,
)
from tests.support.tiny_tokenizer import MIN_VOCAB, special_token_ids, write_tiny_text

HELLO = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 1000),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_completion_tokens", -1),
        ("stream", "yes"),
        ("stream_options", []),
        ("stop", 3),
        ("messages", []),
        ("messages", "hello"),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 1),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("reasoning_effort", "high"),
        ("functions", [{}]),
        ("modalities", ["audio"]),
    ],
)
def test_a_bad_or_unserved_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_chat_request(chat(**{field: value}))
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(text: str) -> None:
    body = f'{{"messages": {json.dumps(HELLO)}, "temperature": {text}}}'.encode()
    with pytest.raises(InvalidInputError):
        parse_chat_request(body)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b"[" * 100_000])
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidInputError):
        parse_chat_request(body)


@pytest.mark.parametrize("half", ["\\ud800", "\\uDC00 x", "\\ud83d\\ud83d\\ude00"])
@pytest.mark.parametrize("field", ["messages", "stop", "user"])
def test_half_a_surrogate_pair_is_refused_by_name(field: str, half: str) -> None:
    fields = {"messages": json.dumps(HELLO), field: f'[{{"role": "user", "content": "{half}"}}]'}
    body = "{" + ", ".join(f'"{key}": {value}' for key, value in fields.items()) + "}"
    with pytest.raises(InvalidInputError, match="lone surrogate") as caught:
        parse_chat_request(body.encode())
    assert caught.value.param == field
    with pytest.raises(InvalidInputError, match="lone surrogate"):
        parse_chat_request(f'{{"messages": [], "{half}": 1}}'.encode())


def test_surrogates_in_pairs_and_raw_bytes() -> None:
    paired = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert parse_chat_request(paired).messages[0].content == "\U0001f600"
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        parse_chat_request(paired.replace(rb"\ud83d\ude00", b"\xed\xa0\x80"))


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_value_in_any_field_is_accepted_or_a_typed_error(value: object) -> None:
    for field in ("messages", "stop", "seed", "n", "stream_options", "temperature", "prompt"):
        body = json.dumps({"messages": HELLO, "prompt": "x", field: value}).encode()
        for parse in (parse_chat_request, parse_completion_request):
            # any other exception fails the test
            with contextlib.suppress(InvalidInputError):
                parse(body).stop_strings()  # type: ignore[operator]


def test_neutral_values_of_unserved_fields_pass() -> None:
    parse_chat_request(
        chat(
            logprobs=False,
            presence_penalty=0,
            frequency_penalty=0.0,
            logit_bias=None,
            tools=None,
            tool_choice="auto",
            response_format={"type": "text"},
            user="someone",
            a_private_field={"x": 1},
        )
    )


def test_the_newer_cap_wins() -> None:
    parsed = parse_chat_request(chat(max_tokens=5, max_completion_tokens=7))
    assert parsed.output_limit_tokens() == 7


def test_roles_and_parts_become_template_messages() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "one"},
            {"role": "system", "content": [{"type": "text", "text": "two"}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None},
            {"role": "system", "content": "later"},
        ]
    )
    assert template_messages(parse_chat_request(body).messages) == [
        {"role": "system", "content": "one\n\ntwo"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "later"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0]"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_messages_that_cannot_be_served_are_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        template_messages(parse_chat_request(chat(messages=[message])).messages)
    assert caught.value.param == param


def test_template_cannot_reach_python_or_loop_for_ever() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
        "{{ undefined_thing.x }}",
        "{{ raise_exception('roles must alternate') }}",
    ):
        with pytest.raises(InvalidInputError):
            ChatTemplate(source).render(HELLO)


def test_template_gets_a_copy_and_no_html_escaping() -> None:
    messages = [{"role": "user", "content": "<a & b>"}]
    template = ChatTemplate("{{ messages | tojson }}{% set _ = messages.append(1) %}")
    assert "<a & b>" in template.render(messages)
    assert len(messages) == 1


def test_a_template_that_does_not_compile_is_a_model_error() -> None:
    with pytest.raises(ModelDataError, match="line 1"):
        ChatTemplate("{% for %}")


def test_no_template_refuses_chat_but_text_works(tmp_path: Path) -> None:
    text = load_model_text(write_tiny_text(tmp_path, template=None))
    with pytest.raises(InvalidInputError, match="/v1/completions"):
        text.render_chat(HELLO)
    assert text.decode(text.encode_plain("still works")) == "still works"
    specials = special_token_ids(MIN_VOCAB)
    assert text.eos_token_ids == (specials["<|im_end|>"], specials["<|endoftext|>"])


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "tokenizer_config.json"])
def test_broken_text_files_are_named(tmp_path: Path, name: str) -> None:
    write_tiny_text(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelDataError, match=name):
        load_model_text(tmp_path)
