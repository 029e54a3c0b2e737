"""TFRecord and FASTA against independent writers: a bitwise CRC, protobuf's own encoder, plain Python strings."""

import gzip
import struct
import sys

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rmd_plugin.benchmarks import DataFormatError
from rmd_plugin.benchmarks.readers import tfrecord
from rmd_plugin.benchmarks.readers.fasta import encode_bases, read_fasta
from rmd_plugin.benchmarks.readers.tfrecord import parse_example, read_examples, read_records

FUZZ = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read_or_refuse(reader, path):
    """What the reader gives, or None if it refuses the file by its name."""
    try:
        return reader(path)
    except DataFormatError as error:
        named = error.path
    assert named == path
    return None


def bitwise_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = bitwise_crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def example_class():
    """tf.train.Example declared from its published schema, so that protobuf itself writes the messages."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name, *fields, parent=file.message_type):
        declared = parent.add(name=name)
        for number, (field, kind, repeated, type_name, packed) in enumerate(fields, start=1):
            added = declared.field.add(name=field, number=number, type=kind, type_name=type_name or None)
            added.label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            if packed is not None:
                added.options.packed = packed
        return declared

    message("BytesList", ("value", kinds.TYPE_BYTES, True, "", None))
    message("FloatList", ("value", kinds.TYPE_FLOAT, True, "", True))
    message("Int64List", ("value", kinds.TYPE_INT64, True, "", True))
    message("LooseInts", ("value", kinds.TYPE_INT64, True, "", False))
    feature = message(
        "Feature",
        ("bytes_list", kinds.TYPE_MESSAGE, False, ".tf.BytesList", None),
        ("float_list", kinds.TYPE_MESSAGE, False, ".tf.FloatList", None),
        ("int64_list", kinds.TYPE_MESSAGE, False, ".tf.Int64List", None),
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message("Features", ("feature", kinds.TYPE_MESSAGE, True, ".tf.Features.FeatureEntry", None))
    entry = message(
        "FeatureEntry",
        ("key", kinds.TYPE_STRING, False, "", None),
        ("value", kinds.TYPE_MESSAGE, False, ".tf.Feature", None),
        parent=features.nested_type,
    )
    entry.options.map_entry = True
    message("Example", ("features", kinds.TYPE_MESSAGE, False, ".tf.Features", None))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tf.{n}")) for n in ("Example", "LooseInts")}
    return made["Example"], made["LooseInts"]


Example, LooseInts = example_class()


def encode(**features) -> bytes:
    message = Example()
    for name, values in features.items():
        slot = message.features.feature[name]
        if isinstance(values[0], bytes):
            slot.bytes_list.value.extend(values)
        elif isinstance(values[0], float):
            slot.float_list.value.extend(values)
        else:
            slot.int64_list.value.extend(values)
    return message.SerializeToString()


# CRC


def test_the_checksum_of_this_file_is_the_published_one():
    assert bitwise_crc32c(b"123456789") == 0xE3069283  # the usual check value
    assert bitwise_crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


@pytest.mark.parametrize("package", ["google_crc32c", "google.protobuf.descriptor_pb2"])
def test_without_its_packages_the_reader_names_the_extra(tmp_path, monkeypatch, package):
    (tmp_path / "a.tfrecord").write_bytes(record(encode(x=[1])))
    tfrecord.example_class.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ImportError, match=r'TFRecord.* pip install "rmd-plugin\[genomics\]".* pip install -e "\.\[genom'
    ):
        list(read_examples(tmp_path / "a.tfrecord", ["x"]))


# records


def test_records_come_back_with_their_offsets(tmp_path):
    path = tmp_path / "a.tfrecord"
    contents = [b"first", b"", b"x" * 700]
    path.write_bytes(b"".join(map(record, contents)))
    found = list(read_records(path))
    assert [data for _, data in found] == contents
    whole = path.read_bytes()
    assert all(whole[offset : offset + len(data)] == data for offset, data in found)
    path.write_bytes(b"")
    assert list(read_records(path)) == []


@FUZZ
@given(cut=st.integers(1, 89))
@example(cut=89)
def test_a_truncated_record_file_is_refused_at_the_record_that_was_cut(tmp_path, cut):
    path = tmp_path / "a.tfrecord"
    whole = b"".join(map(record, [b"a" * 10, b"b" * 20, b"c" * 12]))
    assert len(whole) == 90
    path.write_bytes(whole[:cut])
    boundaries = [0, 26, 62]
    if cut in boundaries:
        assert len(list(read_records(path))) == boundaries.index(cut)
        return
    with pytest.raises(DataFormatError, match="truncated") as caught:
        list(read_records(path))
    assert caught.value.offset == max(at for at in boundaries if at < cut)


@FUZZ
@given(at=st.integers(0, 89), change=st.integers(1, 255))
def test_any_changed_byte_of_a_record_file_is_noticed_at_its_record(tmp_path, at, change):
    path = tmp_path / "a.tfrecord"
    whole = bytearray(b"".join(map(record, [b"a" * 10, b"b" * 20, b"c" * 12])))
    whole[at] ^= change
    path.write_bytes(bytes(whole))
    with pytest.raises(DataFormatError, match=r"checksum of a record's (length|data) is wrong") as caught:
        list(read_records(path))
    start = max(s for s in (0, 26, 62) if s <= at)
    assert caught.value.offset in (start, start + 12)


def test_a_record_of_implausible_length_is_refused_even_with_good_checksums(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record(b"x" * 101))
    with pytest.raises(DataFormatError, match="a record of 101 bytes; at most 100"):
        list(read_records(path, max_record=100))
    length = struct.pack("<Q", 1 << 62)
    path.write_bytes(length + masked(length) + b"x" * 50)
    with pytest.raises(DataFormatError, match="a record of 4611686018427387904 bytes"):
        list(read_records(path))


@FUZZ
@given(garbage=st.binary(min_size=1, max_size=200))
def test_garbage_is_never_a_record_file(tmp_path, garbage):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(garbage)
    with pytest.raises(DataFormatError) as caught:
        list(read_records(path))
    assert caught.value.offset is not None


# messages


VALUES = st.one_of(
    st.lists(st.binary(max_size=20), min_size=1, max_size=4),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
)


@FUZZ
@given(features=st.dictionaries(st.text(max_size=8), VALUES, max_size=5))
def test_messages_that_protobuf_wrote_are_read_as_they_were_meant(features):
    assert parse_example(encode(**features)) == features


def test_numbers_that_are_not_packed_are_read_too():
    values = LooseInts(value=[3, -1, 2**40]).SerializeToString()
    feature = b"\x1a" + bytes([len(values)]) + values
    entry = b"\x0a\x01y\x12" + bytes([len(feature)]) + feature
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert parse_example(b"\x0a" + bytes([len(features)]) + features) == {"y": [3, -1, 2**40]}
    floats = b"\x12\x0a" + b"".join(b"\x0d" + struct.pack("<f", value) for value in (1.5, -2.0))
    entry = b"\x0a\x01f\x12" + bytes([len(floats)]) + floats
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert parse_example(b"\x0a" + bytes([len(features)]) + features) == {"f": [1.5, -2.0]}


@FUZZ
@given(data=st.data())
def test_fuzzed_messages_are_parsed_or_refused_as_examples(data):
    message = encode(x=[b"0 1 2 3"], y=[7], z=[1.5])
    at = data.draw(st.integers(0, len(message) - 1))
    piece = data.draw(st.binary(max_size=6))
    damaged = message[:at] + piece + message[at + data.draw(st.integers(0, 6)) :]
    try:
        found = parse_example(damaged)
    except ValueError:
        with pytest.raises(ValueError, match=r"^not a tf\.train\.Example"):
            parse_example(damaged)
        return
    # whatever is accepted is accepted by protobuf's own map, which only drops entries that have fields besides
    message = Example()
    message.ParseFromString(damaged)
    assert set(found) >= set(message.features.feature)


@pytest.mark.parametrize(
    "message",
    [b"\x0a", b"\x0a\x05\x0a", b"\x0b", b"\x0a" + b"\xff" * 10 + b"\x01", encode(a=[1]) + encode(a=[2])],
    ids=["cut", "too long", "open group", "long varint", "twice"],
)
def test_malformed_messages_are_refused_with_the_place_of_their_record(tmp_path, message):
    with pytest.raises(ValueError, match=r"not a tf\.train\.Example"):
        parse_example(message)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record(encode(x=[1])) + record(message))
    with pytest.raises(DataFormatError, match=r"not a tf\.train\.Example") as caught:
        list(read_examples(path, ["x"]))
    assert caught.value.offset == len(record(encode(x=[1]))) + 12


def test_examples_give_the_features_asked_for_in_that_order(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record(encode(x=[b"a"], y=[1], extra=[2.0])) + record(encode(y=[2], x=[b"b"])))
    assert [features for _, features in read_examples(path, ["y", "x"])] == [[[1], [b"a"]], [[2], [b"b"]]]
    with pytest.raises(DataFormatError, match=r"lacks feature 'extra'; it has \['x', 'y'\]"):
        list(read_examples(path, ["extra"]))


# FASTA


def fasta(sequences: dict[str, str], width: int = 60, end: str = "\n") -> bytes:
    lines = []
    for name, letters in sequences.items():
        lines.append(f">{name} description, complete genome")
        lines += [letters[at : at + width] for at in range(0, len(letters), width)]
    return (end.join(lines) + end).encode()


NAMES = st.from_regex(r"[A-Za-z0-9_.|]{1,9}", fullmatch=True)
SEQUENCES = st.dictionaries(NAMES, st.text("ACGTacgtN", min_size=1, max_size=90), min_size=1, max_size=4)


@FUZZ
@given(sequences=SEQUENCES, width=st.integers(1, 80), packed=st.booleans(), end=st.sampled_from(["\n", "\r\n"]))
def test_fasta_gives_the_letters_that_were_written(tmp_path, sequences, width, packed, end):
    path = tmp_path / "a.fna"
    content = fasta(sequences, width, end)
    path.write_bytes(gzip.compress(content) if packed else content)
    found = read_fasta(path)
    assert list(found) == list(sequences)
    for name, letters in sequences.items():
        assert "".join("ACGTN"[code] for code in found[name]) == letters.upper()


def test_every_iupac_letter_has_a_code_and_nothing_else_has():
    assert encode_bases(b"ACGTUacgtu").tolist() == [0, 1, 2, 3, 3] * 2
    assert set(encode_bases(b"NRYSWKMBDHVX-nryswkmbdhvx").tolist()) == {4}
    assert (encode_bases(bytes(set(range(256)) - set(b"ACGTUNRYSWKMBDHVX-acgtunryswkmbdhvx"))) > 4).all()


@pytest.mark.parametrize(
    ("content", "offset", "reason"),
    [
        (b"ACGT\n", 0, "starts with b'ACGT"),
        (b"", 0, "is not FASTA"),
        (b">a\nACGT\nAC!T\n", 10, "b'!' is no base letter"),
        (b">a\nACGT\n>b", 8, "header without a sequence"),
        (b">a\n>b\nAC\n", 0, "'a' is empty"),
        (b">a\nAC\n>a\nGT\n", 6, "'a' occurs twice"),
        (b">\nAC\n", 0, "has no name"),
        (b">a\nAC>b\nGT\n", 5, "b'>' is no base letter"),
        (b">a\nAC GT\n", 5, "b' ' is no base letter"),
    ],
)
def test_bad_fasta_is_refused_with_its_place(tmp_path, content, offset, reason):
    path = tmp_path / "a.fna"
    for packed in (content, gzip.compress(content)):
        path.write_bytes(packed)
        with pytest.raises(DataFormatError, match=reason) as caught:
            read_fasta(path)
        assert caught.value.offset == offset


@FUZZ
@given(data=st.data())
def test_a_truncated_or_damaged_gzip_genome_is_always_refused_or_intact(tmp_path, data):
    path = tmp_path / "a.fna.gz"
    rng = np.random.default_rng(0)
    letters = "".join("ACGT"[code] for code in rng.integers(0, 4, size=900))
    packed = gzip.compress(fasta({"a": letters}), mtime=0)
    if data.draw(st.booleans()):
        path.write_bytes(packed[: data.draw(st.integers(0, len(packed) - 1))])
        with pytest.raises(DataFormatError):
            read_fasta(path)
        return
    at = data.draw(st.integers(0, len(packed) - 1))
    path.write_bytes(packed[:at] + data.draw(st.binary(min_size=1, max_size=4)) + packed[at + 1 :])
    found = read_or_refuse(read_fasta, path)
    if found is not None:
        # gzip's header fields other than the magic are not covered by its checksum
        np.testing.assert_array_equal(found["a"], encode_bases(letters.encode()))


def test_a_genome_that_unpacks_to_too_much_is_refused(tmp_path):
    path = tmp_path / "bomb.fna.gz"
    path.write_bytes(gzip.compress(b">a\n" + b"A" * 3_000_000))
    assert path.stat().st_size < 10_000
    with pytest.raises(DataFormatError, match="more than the 1000000 bytes"):
        read_fasta(path, max_bytes=1_000_000)
