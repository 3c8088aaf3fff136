"""The text side of a served model: tokenizer, chat template, special tokens; read once at start."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from freetokend.core.errors import InvalidInputError, ModelDataError, Reason
from freetokend.serving.chat_template import ChatTemplate
from freetokend.serving.special_text import SpecialTextGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """Everything that turns messages into ids and ids into text. Immutable, safe to share.

    `eos_token_ids` end a sequence; `template` is None when the model brings none (then only
    /v1/completions can serve it). `plain_tokenizer` reads special-token texts as characters.
    """

    tokenizer: Tokenizer
    plain_tokenizer: Tokenizer
    special_texts: tuple[str, ...]
    template: ChatTemplate | None
    bos_token: str
    eos_token_ids: tuple[int, ...]

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> tuple[int, ...]:
        """Ids of a rendered template, given as (text, is_users) pieces.

        Special tokens count in the template's pieces only, and none are added: the template
        writes the begin-of-sequence token itself where the model wants one.
        """
        ids: list[int] = []
        for text, is_users in pieces:
            tokenizer = self.plain_tokenizer if is_users else self.tokenizer
            ids += tokenizer.encode(text, add_special_tokens=False).ids
        return tuple(ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of a raw prompt, with the tokenizer's own begin-of-sequence, exactly once.

        Special-token texts count here: whoever writes a raw prompt writes the markers too.
        """
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=True).ids)
        bos_id = self.tokenizer.token_to_id(self.bos_token) if self.bos_token else None
        if bos_id is not None and len(ids) > 1 and ids[0] == bos_id and ids[1] == bos_id:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids without special tokens, spaces as the model wrote them."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Prompt ids of a conversation. Raises InvalidInputError without a template."""
        if self.template is None:
            raise InvalidInputError(
                "this model has no chat template, so it cannot take messages. Use "
                "/v1/completions with a prompt of your own.",
                param="messages",
            )
        guard = SpecialTextGuard(self.special_texts)
        rendered = self.template.render(guard.protect(messages), variables=variables)
        return self.encode_pieces(guard.pieces(rendered))


def _read_json(path: Path, *, required: bool) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise ModelDataError(
            f"{path} is missing. Convert the model again from a checkpoint that has it."
        ) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ModelDataError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ModelDataError(f"{path} does not hold a JSON object.")
    return data


def _token_text(value: object) -> str:
    # tokenizer_config.json writes a token as text or as {"content": text, ...}
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        return str(value["content"])
    return ""


def _template_source(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = tokenizer_config.get("chat_template")
    if isinstance(source, str):
        return source
    if isinstance(source, list):  # several named templates: "default" is the one for chat
        for entry in source:
            if isinstance(entry, dict) and entry.get("name") == "default":
                return str(entry.get("template", ""))
    return None


def _eos_ids(
    tokenizer: Tokenizer,
    model_config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    eos_token: str,
) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (generation_config, model_config):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and token_id not in ids:
                ids.append(token_id)
    token_id = tokenizer.token_to_id(eos_token) if eos_token else None
    if token_id is not None and token_id not in ids:
        ids.append(token_id)
    return tuple(ids)


def load_model_text(directory: Path) -> ModelText:
    """Read tokenizer.json, tokenizer_config.json, config.json, generation_config.json.

    Raises ModelDataError naming the file that is missing or wrong.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelDataError(
            f"{path} is missing. Convert the model again from a checkpoint that has it."
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
        plain_tokenizer = Tokenizer.from_file(str(path))
        plain_tokenizer.encode_special_tokens = True
    except Exception as error:  # tokenizers raises plain Exception for every kind of bad file
        raise ModelDataError(
            f"{path} is not a tokenizer this version can read: {error}.",
            reason=Reason.MODEL_INVALID,
        ) from error
    config = _read_json(directory / "config.json", required=True)
    generation_config = _read_json(directory / "generation_config.json", required=False)
    tokenizer_config = _read_json(directory / "tokenizer_config.json", required=False)
    bos_token = _token_text(tokenizer_config.get("bos_token"))
    eos_token = _token_text(tokenizer_config.get("eos_token"))
    source = _template_source(directory, tokenizer_config)
    return ModelText(
        tokenizer=tokenizer,
        plain_tokenizer=plain_tokenizer,
        special_texts=tuple(
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special
        ),
        template=ChatTemplate(source, bos_token=bos_token, eos_token=eos_token) if source else None,
        bos_token=bos_token,
        eos_token_ids=_eos_ids(tokenizer, config, generation_config, eos_token),
    )
