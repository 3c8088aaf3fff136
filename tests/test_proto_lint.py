"""The .proto files keep the house's rules, and the wire keeps its numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

PROTO_ROOT = Path(__file__).parents[1] / "proto"
GOLDEN = Path(__file__).with_name("proto.golden")

NUMERIC = {
    FieldDescriptorProto.TYPE_DOUBLE,
    FieldDescriptorProto.TYPE_FLOAT,
    FieldDescriptorProto.TYPE_INT32,
    FieldDescriptorProto.TYPE_INT64,
    FieldDescriptorProto.TYPE_UINT32,
    FieldDescriptorProto.TYPE_UINT64,
}
UNITS = ("_bytes", "_bytes_per_s", "_s", "_ns", "_tokens", "_tokens_per_s")
UNITS += ("_ratio", "_count", "_index")
# Numbers that have no unit: names of things, versions, and sampling settings by their usual names.
UNITLESS = {"pid", "link_version", "generation", "seed", "token_ids"}
UNITLESS |= {"prompt_token_ids", "stop_token_ids", "temperature", "top_p", "top_k", "min_p"}
UNITLESS |= {"bytes_per_expert"}  # its unit leads
UNITLESS |= {"link_generation", "link_generation_max"}  # versions of PCIe
UNITLESS |= {"cpus", "pids"}  # numbers of CPUs and processes, as the kernel has them

# Paths of SourceCodeInfo: field numbers of descriptor.proto.
MESSAGE, ENUM, SERVICE = 4, 5, 6
METHOD_OF_SERVICE, VALUE_OF_ENUM = 2, 2


def compiled(root: Path, *names: str) -> list[FileDescriptorProto]:
    """Descriptors with comments; `names` relative to `root`."""
    output = subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", "--include_source_info"),
            *("--descriptor_set_out=/dev/stdout", *names),
        ],
        capture_output=True,
        check=True,
    ).stdout
    return list(FileDescriptorSet.FromString(output).file)


def sources(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.proto"))


@pytest.fixture(scope="module")
def files() -> list[FileDescriptorProto]:
    return compiled(PROTO_ROOT, *sources(PROTO_ROOT))


def problems(file: FileDescriptorProto) -> Iterator[str]:
    """Every rule that `file` breaks, one line each."""
    if file.package != os.path.dirname(file.name).replace("/", "."):
        yield f"{file.name}: package {file.package} does not match its directory"
    if not re.search(r"\.v\d+$", file.package):
        yield f"{file.name}: package {file.package} has no version"
    commented = {
        tuple(location.path)
        for location in file.source_code_info.location
        if (location.leading_comments + location.trailing_comments).strip()
    }
    for index, service in enumerate(file.service):
        if (SERVICE, index) not in commented:
            yield f"service {service.name} has no comment"
        for number, method in enumerate(service.method):
            if (SERVICE, index, METHOD_OF_SERVICE, number) not in commented:
                yield f"rpc {service.name}.{method.name} has no comment"
            yield from method_problems(service.name, method)
    for index, enum in enumerate(file.enum_type):
        if (ENUM, index) not in commented:
            yield f"enum {enum.name} has no comment"
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
        if (enum.value[0].name, enum.value[0].number) != (f"{prefix}_UNSPECIFIED", 0):
            yield f"enum {enum.name} does not begin with {prefix}_UNSPECIFIED = 0"
        for value in enum.value:
            if not value.name.startswith(f"{prefix}_"):
                yield f"{value.name} does not begin with {prefix}_"
    for index, message in enumerate(file.message_type):
        if (MESSAGE, index) not in commented:
            yield f"message {message.name} has no comment"
        yield from message_problems(message)


def method_problems(service: str, method) -> Iterator[str]:  # type: ignore[no-untyped-def]
    if method.client_streaming:
        return  # a conversation: its messages have names of their own
    for kind, name in (("Request", method.input_type), ("Response", method.output_type)):
        if name.rpartition(".")[2] != f"{method.name}{kind}":
            yield f"rpc {service}.{method.name} does not use {method.name}{kind}"


def message_problems(message: DescriptorProto) -> Iterator[str]:
    if not re.fullmatch(r"([A-Z][a-z0-9]*)+", message.name):
        yield f"message {message.name} is not in PascalCase"
    for field in message.field:
        where = f"{message.name}.{field.name}"
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name):
            yield f"{where} is not in snake_case"
        unit = field.name.endswith(UNITS) or field.name in UNITLESS
        if field.type in NUMERIC and not unit:
            yield f"{where} is a number without a unit in its name"
        if field.type not in NUMERIC and field.name.endswith(UNITS):
            yield f"{where} has a unit in its name and is no number"
        if re.search(r"_(ms|us|mb|gb|kb|pct|percent|secs?|seconds)$", field.name):
            yield f"{where} has a unit that is not used here"


def wire(files: list[FileDescriptorProto]) -> dict[str, str]:
    """ "message number" -> name and type: what other builds rely on."""
    lines = {}
    for file in files:
        for message in file.message_type:
            for field in message.field:
                kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
                kind = field.type_name.rpartition(".")[2] or kind
                many = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
                lines[f"{file.package}.{message.name} {field.number}"] = (
                    f"{many}{kind} {field.name}"
                )
        for enum in file.enum_type:
            for value in enum.value:
                lines[f"{file.package}.{enum.name} {value.number}"] = value.name
    return lines


def reserved(files: list[FileDescriptorProto]) -> set[str]:
    return {
        f"{file.package}.{message.name} {number}"
        for file in files
        for message in file.message_type
        for span in message.reserved_range
        for number in range(span.start, min(span.end, span.start + 1000))
    }


def test_the_rules_are_kept(files: list[FileDescriptorProto]) -> None:
    assert len(files) >= 2
    assert [problem for file in files for problem in problems(file)] == []


def test_numbers_keep_their_meaning(files: list[FileDescriptorProto]) -> None:
    now = wire(files)
    text = "".join(f"{key}: {value}\n" for key, value in now.items())
    before = dict(line.split(": ", 1) for line in GOLDEN.read_text().splitlines())
    gone = before.keys() - now.keys() - reserved(files)
    assert gone == set(), "a field that is taken out leaves its number reserved"
    if os.environ.get("FREETOKEN_UPDATE_GOLDENS") == "1":
        GOLDEN.write_text(text)
        before = now
    changed = {key: (old, now[key]) for key, old in before.items() if now.get(key, old) != old}
    assert changed == {}, "a number that has a meaning keeps it; take a new number"
    assert before == now, "if the change is meant, run this test with FREETOKEN_UPDATE_GOLDENS=1"


BROKEN = {
    "package other.v1;": "does not match its directory",
    "message M { uint32 size = 1; }": "M.size is a number without a unit",
    "message M { uint32 wait_ms = 1; }": "M.wait_ms is a number without a unit",
    "message M { string name_bytes = 1; }": "has a unit in its name and is no number",
    "message M { string camelCase = 1; }": "is not in snake_case",
    "message M {}": "message M has no comment",
    "message bad_name {}": "is not in PascalCase",
    "enum State { STATE_READY = 0; }": "does not begin with STATE_UNSPECIFIED = 0",
    "enum State { STATE_UNSPECIFIED = 0; READY = 1; }": "READY does not begin with STATE_",
    "message M {} service S { rpc Get(M) returns (M); }": "rpc S.Get has no comment",
    "message N {} service S { rpc Get(N) returns (N); }": "does not use GetRequest",
}


@pytest.mark.parametrize("text", BROKEN)
def test_each_rule_can_be_broken(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "area" / "v1"
    directory.mkdir(parents=True)
    package = "" if text.startswith("package") else "package area.v1;\n"
    (directory / "x.proto").write_text(f'syntax = "proto3";\n{package}{text}\n')
    (file,) = compiled(tmp_path, "area/v1/x.proto")
    assert any(BROKEN[text] in problem for problem in problems(file))


def test_a_taken_out_field_must_be_reserved(tmp_path: Path) -> None:
    (tmp_path / "x.proto").write_text(
        'syntax = "proto3"; message M { reserved 1, 5 to 7; string a = 2; }'
    )
    files = compiled(tmp_path, "x.proto")
    assert reserved(files) == {".M 1", ".M 5", ".M 6", ".M 7"}
    assert wire(files) == {".M 2": "string a"}
