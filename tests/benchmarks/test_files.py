"""Other people's files: read strictly, never unpickled, refused with file, place and reason; downloads and archives."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rmd_plugin.benchmarks import ChecksumError, DataFormatError, DataNotFoundError, DownloadError
from rmd_plugin.benchmarks.readers.arrays import read_npy, read_pt
from rmd_plugin.benchmarks.readers.downloads import fetch, resolve_data_dir, unzip
from rmd_plugin.benchmarks.readers.text import read_json
from rmd_plugin.npz import read_npz

FUZZ = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Bomb:
    """Pickled, it would create a file when it is loaded."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return os.mkdir, (self.target,)


def damage(data, content: bytes) -> bytes:
    """The content truncated, with bytes overwritten, or replaced by garbage."""
    kind = data.draw(st.sampled_from(["truncate", "overwrite", "garbage", "insert"]))
    if kind == "truncate":
        return content[: data.draw(st.integers(0, len(content) - 1))]
    if kind == "garbage":
        return data.draw(st.binary(max_size=200))
    at = data.draw(st.integers(0, len(content) - 1))
    piece = data.draw(st.binary(min_size=1, max_size=8))
    return content[:at] + piece + content[at + (len(piece) if kind == "overwrite" else 0) :]


def read_or_refuse(reader, path):
    """What the reader gives, or None if it refuses the file by its name."""
    try:
        return reader(path)
    except DataFormatError as error:
        named = error.path
    assert named == path
    return None


def test_the_data_folder_comes_from_the_argument_or_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RMD_DATA_DIR", str(tmp_path))
    assert resolve_data_dir(None, "x") == tmp_path
    assert resolve_data_dir("elsewhere", "x").name == "elsewhere"
    monkeypatch.delenv("RMD_DATA_DIR")
    with pytest.raises(DataNotFoundError, match=r"cats\.npz is looked for .* RMD_DATA_DIR=FOLDER"):
        resolve_data_dir(None, "cats.npz")


# JSON


@pytest.mark.parametrize(
    ("content", "offset", "reason"),
    [
        (b'{"a": [1, 2', 11, "delimiter"),
        ('{"é": ?}'.encode(), 7, "Expecting value"),
        (b'{"a": "\xff"}', 7, "UTF-8"),
        (b'{"a": NaN}', None, "NaN is not JSON"),
        (b'{"a": 1, "a": 2}', None, "same key twice"),
        (b"[" * 100_000, None, "nested too deeply"),
        (b"1" * 10_000, None, "is not JSON"),
        (b"", 0, "Expecting value"),
    ],
)
def test_bad_json_is_refused_with_its_place(tmp_path, content, offset, reason):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match=reason) as caught:
        read_json(path)
    assert caught.value.offset == offset
    assert str(path) in str(caught.value)


def test_a_file_beyond_its_bound_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps("x" * 100))
    with pytest.raises(DataFormatError, match="larger than the 50 bytes"):
        read_json(path, max_bytes=50)


@FUZZ
@given(data=st.data())
def test_fuzzed_json_is_read_as_the_standard_library_reads_it_or_refused(data, tmp_path):
    path = tmp_path / "a.json"
    value = {"train": [["é query", "intent"]], "n": [1, -2.5, None, True]}
    content = damage(data, json.dumps(value, ensure_ascii=False).encode())
    path.write_bytes(content)
    found = read_or_refuse(read_json, path)
    if found is not None:
        assert found == json.loads(content.decode("utf-8-sig"))


# npy, npz, pt


def test_arrays_come_back_as_they_were_saved(tmp_path):
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([1, 2], np.uint8), "c": np.empty((0, 4))}
    for save, name in ((np.savez, "plain.npz"), (np.savez_compressed, "packed.npz")):
        save(tmp_path / name, **arrays)
        found = read_npz(tmp_path / name)
        assert set(found) == set(arrays)
        for key, value in arrays.items():
            np.testing.assert_array_equal(found[key], value)
            assert found[key].dtype == value.dtype
    np.save(tmp_path / "a.npy", np.asfortranarray(arrays["a"]))
    found = read_npy(tmp_path / "a.npy")
    np.testing.assert_array_equal(found, arrays["a"])
    assert isinstance(found, np.memmap)
    np.save(tmp_path / "c.npy", arrays["c"])
    assert read_npy(tmp_path / "c.npy").shape == (0, 4)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_truncated_npz_is_refused_with_the_place_where_it_ends(tmp_path, save):
    save(tmp_path / "whole.npz", first=np.arange(50), second=np.arange(100))
    whole, path = (tmp_path / "whole.npz").read_bytes(), tmp_path / "cut.npz"
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataFormatError, match=f"not a readable npz.*it ends at byte {size}") as caught:
            read_npz(path)
        assert caught.value.offset == size


def test_pickled_objects_in_npz_npy_and_pt_are_refused_and_never_run(tmp_path):
    target = tmp_path / "boom"
    objects = np.array([Bomb(target)], dtype=object)
    np.savez(tmp_path / "a.npz", x=objects)
    np.save(tmp_path / "a.npy", objects)
    torch.save({"x": Bomb(target)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps({"x": Bomb(target)}))
    for reader, name in ((read_npz, "a.npz"), (read_npy, "a.npy")):
        with pytest.raises(DataFormatError, match="would have to be unpickled"):
            reader(tmp_path / name)
    for name in ("a.pt", "b.pt"):
        with pytest.raises(DataFormatError, match="weights_only=True"):
            read_pt(tmp_path / name)
    assert not target.exists()
    # the same bytes do run where they are trusted, so the test can fail
    pickle.loads((tmp_path / "b.pt").read_bytes())
    assert target.exists()


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)], {"x": "text"}, {1: torch.ones(2)}])
def test_a_pt_file_must_be_a_dict_of_tensors(tmp_path, value):
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(DataFormatError, match="tensor"):
        read_pt(tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError):
        read_pt(tmp_path / "gone.pt")


def npy(header: str, data: bytes = b"") -> bytes:
    body = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }"), "needs"),
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }"), "negative size"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"x" * 8), "Python objects"),
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", b"x" * 8), "needs"),
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }", b"x" * 9), "needs"),
        (npy("{'descr': 'nonsense', 'fortran_order': False, 'shape': (1,), }"), "no valid npy header"),
        (npy("{" * 300), "no valid npy header"),
        (b"\x93NUMPY\x09\x00", "no valid npy header"),
        (b"", "no valid npy header"),
    ],
)
def test_lying_npy_headers_are_refused_before_memory_is_taken(tmp_path, content, reason):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataFormatError, match=reason):
        read_npy(tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(DataFormatError, match=reason) as caught:
        read_npz(tmp_path / "a.npz")
    assert caught.value.offset == 0


def test_an_npz_that_unpacks_to_too_much_or_lacks_a_key_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, zeros=np.zeros(100_000))
    assert path.stat().st_size < 2000
    with pytest.raises(DataFormatError, match="unpacks to more than the 1000 bytes"):
        read_npz(path, max_bytes=1000)
    with pytest.raises(DataFormatError, match="has no array 'ones'; it has zeros"):
        read_npz(path, ["ones"])
    with pytest.raises(FileNotFoundError):
        read_npz(tmp_path / "gone.npz")


@FUZZ
@given(data=st.data())
def test_fuzzed_npz_is_refused_or_gives_the_saved_values(data, tmp_path):
    values = np.arange(40, dtype=np.int32).reshape(8, 5)
    buffer = io.BytesIO()
    (np.savez_compressed if data.draw(st.booleans()) else np.savez)(buffer, x=values)
    path = tmp_path / "a.npz"
    path.write_bytes(damage(data, buffer.getvalue()))
    found = read_or_refuse(read_npz, path)
    # the archive's CRC covers the content; names, dates and comments are not covered
    for array in (found or {}).values():
        np.testing.assert_array_equal(array, values)


@FUZZ
@given(data=st.data())
def test_fuzzed_npy_and_pt_are_refused_or_read_without_any_other_error(data, tmp_path):
    buffer = io.BytesIO()
    if data.draw(st.booleans()):
        np.save(buffer, np.arange(12.0))
        path, reader = tmp_path / "a.npy", read_npy
    else:
        torch.save({"x": torch.arange(12.0)}, buffer)
        path, reader = tmp_path / "a.pt", read_pt
    path.write_bytes(damage(data, buffer.getvalue()))
    found = read_or_refuse(reader, path)
    assert found is None or isinstance(found, np.ndarray | dict)


# downloads, archives


def test_a_download_arrives_whole_and_is_not_fetched_twice(server, tmp_path):
    folder, url = server
    (folder / "a.bin").write_bytes(b"content" * 1000)
    sha = hashlib.sha256(b"content" * 1000).hexdigest()
    target = tmp_path / "new" / "a.bin"
    assert fetch(f"{url}/a.bin", sha, target) == target
    assert target.read_bytes() == b"content" * 1000
    (folder / "a.bin").unlink()
    fetch(f"{url}/a.bin", sha, target)
    target.write_bytes(b"damaged since")
    with pytest.raises(ChecksumError, match="published one"):
        fetch(f"{url}/a.bin", sha, target)


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("a.bin", ChecksumError, "Not kept"),
        ("gone.bin", DownloadError, "404"),
        ("short", (ChecksumError, DownloadError), "Not kept|IncompleteRead"),
    ],
)
def test_a_failed_download_is_one_clear_error_and_leaves_nothing_behind(server, tmp_path, name, error, reason):
    folder, url = server
    (folder / "a.bin").write_bytes(b"other content")
    target = tmp_path / "new" / "a.bin"
    with pytest.raises(error, match=reason):
        fetch(f"{url}/{name}", "0" * 64, target)
    assert list(target.parent.iterdir()) == []


def test_an_unreachable_server_is_one_clear_error(tmp_path):
    with pytest.raises(DownloadError, match="Download it by hand"):
        fetch("http://127.0.0.1:9/a", "0" * 64, tmp_path / "a")


def zip_of(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def unpacked(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_good_archive_is_unpacked_and_what_a_faster_job_unpacked_is_kept(tmp_path):
    zip_of(tmp_path / "b.zip", **{"z.txt": b"zip", "top/x.txt": b"x", "top/sub/y.txt": b"", "folder/": b""})
    into = tmp_path / "into"
    unzip(tmp_path / "b.zip", into)
    assert unpacked(into) == {"z.txt": b"zip", "top/x.txt": b"x", "top/sub/y.txt": b""}
    (into / "top" / "x.txt").write_bytes(b"in use by another job")
    unzip(tmp_path / "b.zip", into)
    assert (into / "top" / "x.txt").read_bytes() == b"in use by another job"
    assert sorted(path.name for path in into.iterdir()) == ["folder", "top", "z.txt"]


def test_a_disk_that_cannot_be_written_is_one_clear_error(tmp_path, monkeypatch):
    zip_of(tmp_path / "b.zip", x=b"zip")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DownloadError, match=r"could not unpack .*b\.zip into .*file"):
        unzip(tmp_path / "b.zip", tmp_path / "file")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DownloadError, match=r"No space left on device.*free space"):
        unzip(tmp_path / "b.zip", tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []


@FUZZ
@given(data=st.data())
def test_fuzzed_archives_are_refused_or_unpacked_inside_the_folder(data, tmp_path):
    folder = tmp_path / "work"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "into").mkdir(parents=True)
    path = folder / "archive"
    zip_of(path, **{"top/x": b"content" * 30, "y": b"more"})
    path.write_bytes(damage(data, path.read_bytes()))
    with contextlib.suppress(DataFormatError, DownloadError):  # an offset outside the file is an OSError
        unzip(path, folder / "into")
    assert {item.name for item in folder.iterdir()} == {"archive", "into"}
    # contents carry checksums; names in a zip do not
    assert set(unpacked(folder / "into").values()) <= {b"content" * 30, b"more"}


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil", "link"])
def test_archive_members_never_leave_the_folder_and_are_never_links(tmp_path, name):
    info = zipfile.ZipInfo(name)
    if name == "link":
        info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    unzip(tmp_path / "a.zip", tmp_path / "into")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a.zip", "into"]
    (found,) = (path for path in (tmp_path / "into").rglob("*") if not path.is_dir())
    assert found.is_file()
    assert not found.is_symlink()


def test_a_truncated_archive_is_refused(tmp_path):
    zip_of(tmp_path / "a.zip", x=np.random.default_rng(0).bytes(5000))
    whole = (tmp_path / "a.zip").read_bytes()
    for cut in (0, 10, 1000, len(whole) - 10):
        (tmp_path / "a.zip").write_bytes(whole[:cut])
        with pytest.raises(DataFormatError, match="not a readable zip"):
            unzip(tmp_path / "a.zip", tmp_path / "into")
    assert list((tmp_path / "into").iterdir()) == []
