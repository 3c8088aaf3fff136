"""Renders a model's own chat template, in jinja2's sandbox, from data the template cannot change.

Templates come from model files, so they are untrusted code: no attribute access beyond the
sandbox's rules, no file system, bounded output.
"""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import SandboxedEnvironment

from freetokend.core.errors import InvalidInputError, ModelDataError, Reason

MAX_RENDERED_CHARS: Final = 16_000_000  # a template that loops must not take the machine's memory


def _to_json(value: object, indent: int | None = None, **_ignored: object) -> str:
    # transformers' tojson: no HTML escaping (jinja2's own escapes <, >, & and breaks tool schemas)
    return json.dumps(value, ensure_ascii=False, indent=indent)


class _TemplateRefusalError(TemplateError):
    """The template itself refused the messages (raise_exception)."""


def _raise_exception(message: str) -> None:
    raise _TemplateRefusalError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().astimezone().strftime(layout)


class ChatTemplate:
    """A compiled template with the special-token texts it may print. Safe to share."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Raises ModelDataError when the template does not compile."""
        environment = SandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelDataError(
                f"the model's chat template does not compile: {error.message} (line "
                f"{error.lineno}). Fix chat_template in tokenizer_config.json and convert again.",
                reason=Reason.MODEL_INVALID,
            ) from error
        self._bos_token = bos_token
        self._eos_token = eos_token

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises InvalidInputError when the template refuses the messages."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=copy.deepcopy(list(messages)),
                tools=copy.deepcopy(list(tools)) if tools else None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_token,
                eos_token=self._eos_token,
                **dict(variables or {}),
            ):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise InvalidInputError(
                        f"the rendered prompt is longer than {MAX_RENDERED_CHARS} characters. "
                        "Send fewer or shorter messages.",
                        reason=Reason.PAYLOAD_TOO_LARGE,
                        param="messages",
                    )
                pieces.append(piece)
        except _TemplateRefusalError as error:
            raise InvalidInputError(
                f"the model's chat template refuses these messages: {error.message}",
                param="messages",
            ) from error
        except InvalidInputError:
            raise
        except Exception as error:  # template code is foreign: anything can come out of it
            raise InvalidInputError(
                "the model's chat template cannot render these messages "
                f"({type(error).__name__}: {error}). Check the order and roles of the messages.",
                param="messages",
            ) from error
        return "".join(pieces)
