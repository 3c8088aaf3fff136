"""Protobuf messages as plain values for JSON: field names as they are, units and all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import Message

if TYPE_CHECKING:
    from google._upb._message import FieldDescriptor as UpbFieldDescriptor
    from google.protobuf.descriptor import FieldDescriptor as PlainFieldDescriptor

    FieldDescriptor = PlainFieldDescriptor | UpbFieldDescriptor

Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]


def plain(message: Message) -> dict[str, Plain]:
    """Every field, in the order of its number; what is unset is None, enums are lower-case names.

    The library's own converter writes 64-bit integers as strings and costs more to import.
    """
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: FieldDescriptor) -> Plain:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: object, field: FieldDescriptor) -> Plain:
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None and isinstance(value, int):
        return enum_name(field, value)
    assert isinstance(value, bool | int | float | str)
    return value


def enum_name(field: FieldDescriptor, number: int) -> str:
    """ "ready" for ENGINE_STATE_READY; "unknown_9" for a number of a newer daemon."""
    enum = field.enum_type
    assert enum is not None
    known = enum.values_by_number.get(number)
    if known is None:
        return f"unknown_{number}"
    # All values begin with the first one's name without its UNSPECIFIED.
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(known.name.removeprefix(prefix).lower())


def print_json(value: Plain) -> None:
    """Indented, for programs that read everything and people who look."""
    import json  # noqa: PLC0415 - only for this output

    print(json.dumps(value, indent=2))
