"""TFRecord files of ``tf.train.Example`` messages, read with protobuf and google-crc32c but without tensorflow.

A record is ``uint64 length | uint32 crc(length) | data | uint32 crc(data)``, all little-endian, with masked CRC-32C
checksums. Both checksums of every record are verified.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rmd_plugin.extras import require

from ..errors import DataFormatError

Feature = list[bytes] | list[int] | list[float]

_MASK_DELTA = 0xA282EAD8
_HEADER, _FOOTER = 12, 4
# tf.train.Example by its published schema: message -> fields in the order of their numbers, as (name, type, label)
_SCHEMA = {
    "BytesList": [("value", "TYPE_BYTES", "LABEL_REPEATED")],
    "FloatList": [("value", "TYPE_FLOAT", "LABEL_REPEATED")],
    "Int64List": [("value", "TYPE_INT64", "LABEL_REPEATED")],
    "Feature": [(f"{kind.lower()}_list", f".tf.{kind}List", "LABEL_OPTIONAL") for kind in ("Bytes", "Float", "Int64")],
    "Entry": [("key", "TYPE_STRING", "LABEL_OPTIONAL"), ("value", ".tf.Feature", "LABEL_OPTIONAL")],
    "Features": [("feature", ".tf.Entry", "LABEL_REPEATED")],
    "Example": [("features", ".tf.Features", "LABEL_OPTIONAL")],
}


def _import(module: str) -> Any:
    return require(module, "genomics", needed_by="reading TFRecord files")


@cache
def example_class() -> Any:
    """The message class of ``tf.train.Example``; a feature map is a list of entries ``key``, ``value``."""
    proto = _import("google.protobuf.descriptor_pb2")
    file = proto.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    for message, fields in _SCHEMA.items():
        declared = file.message_type.add(name=message)
        for number, (name, kind, label) in enumerate(fields, start=1):
            field = declared.field.add(name=name, number=number, label=label)
            if kind.startswith("."):
                field.type, field.type_name = proto.FieldDescriptorProto.TYPE_MESSAGE, kind
            else:
                field.type = proto.FieldDescriptorProto.Type.Value(kind)
    pool = _import("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(file)
    return _import("google.protobuf.message_factory").GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


def read_records(path: str | Path, *, max_record: int = 1 << 16) -> Iterator[tuple[int, bytes]]:
    """Records of an uncompressed TFRecord file as (offset of the data, data); none is longer than ``max_record``."""
    crc32c = _import("google_crc32c").value

    def check(piece: bytes, stored: bytes, what: str, offset: int) -> None:
        crc = crc32c(piece)
        masked = ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
        if struct.pack("<I", masked) != stored:
            raise DataFormatError(path, f"the checksum of a record's {what} is wrong: damaged data", offset)

    with open(path, "rb") as stream:
        at = 0
        while header := stream.read(_HEADER):
            if len(header) < _HEADER:
                raise DataFormatError(path, f"truncated: {len(header)} of {_HEADER} header bytes of a record", at)
            check(header[:8], header[8:], "length", at)
            (length,) = struct.unpack_from("<Q", header)
            if length > max_record:
                raise DataFormatError(path, f"a record of {length} bytes; at most {max_record} are expected here", at)
            data, footer = stream.read(length), stream.read(_FOOTER)
            if len(footer) < _FOOTER:
                left = len(data) + len(footer)
                raise DataFormatError(path, f"truncated: a record needs {length + _FOOTER} bytes, {left} are left", at)
            check(data, footer, "data", at + _HEADER)
            yield at + _HEADER, data
            at += _HEADER + length + _FOOTER


def parse_example(data: bytes) -> dict[str, Feature]:
    """Features of a serialised ``tf.train.Example``; a ValueError if it is none or has a feature twice."""
    example = example_class()()
    try:
        example.ParseFromString(data)
    except _import("google.protobuf.message").DecodeError as error:
        raise ValueError(f"not a tf.train.Example: {error}") from None
    found: dict[str, Feature] = {}
    for entry in example.features.feature:
        if entry.key in found:
            raise ValueError(f"not a tf.train.Example: feature {entry.key!r} occurs twice")
        found[entry.key] = [value for _, values in entry.value.ListFields() for value in values.value]
    return found


def read_examples(path: str | Path, names: Sequence[str]) -> Iterator[tuple[int, list[Feature]]]:
    """Chosen features of every example of a TFRecord file, as (offset of the record's data, values of each name)."""
    for offset, data in read_records(path):
        try:
            example = parse_example(data)
        except ValueError as error:
            raise DataFormatError(path, str(error), offset) from None
        missing = [name for name in names if name not in example]
        if missing:
            raise DataFormatError(path, f"an example lacks feature {missing[0]!r}; it has {sorted(example)}", offset)
        yield offset, [example[name] for name in names]
