import errno
import json
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import xxhash

from rmd_plugin.compare import cache as feature_cache
from rmd_plugin.compare.cache import CacheError, FeatureCache

# torch starts threads, and Python 3.12 warns about every fork after that
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

KEY = "ab" + "0" * 62
OTHER = "cd" + "1" * 62
FEATURES = np.arange(35, dtype=np.float32).reshape(7, 5)
LABELS = np.array([0, 1, 2, -1, 0, 1, 2])


def batches(features=FEATURES, labels=LABELS, size=3):
    for start in range(0, len(features), size):
        yield features[start : start + size], labels[start : start + size]


def never():
    raise AssertionError("the cache should have had it")


def leftovers(root):
    return [path.name for path in (root / "tmp").glob("*")]


def test_what_was_computed_once_is_read_from_then_on(tmp_path):
    cache = FeatureCache(tmp_path / "cache")
    first = cache.fetch(KEY, batches, 7, about={"benchmark": "digits"})
    again = FeatureCache(tmp_path / "cache").fetch(KEY, never, 7)
    assert (first.hit, again.hit) == (False, True)
    assert np.array_equal(again.features, FEATURES)
    assert np.array_equal(again.labels, LABELS)
    assert leftovers(cache.root) == []


def test_files_are_plain_numpy_and_say_what_they_are(tmp_path):
    folder = FeatureCache(tmp_path).fetch(KEY, batches, 7, about={"benchmark": "digits"}).folder
    assert np.array_equal(np.load(folder / "features.npy", allow_pickle=False), FEATURES)
    assert np.array_equal(np.load(folder / "labels.npy", allow_pickle=False), LABELS)
    entry = json.loads((folder / "entry.json").read_text())
    content = {name: (folder / name).read_bytes() for name in ("features.npy", "labels.npy")}
    checksums = {name: xxhash.xxh3_128(value).hexdigest() for name, value in content.items()}
    assert (entry["benchmark"], entry["format"], entry["checksums"]) == ("digits", 2, checksums)


def test_features_are_mapped_and_writing_to_them_does_not_reach_the_file(tmp_path):
    cache = FeatureCache(tmp_path)
    found = cache.fetch(KEY, batches, 7)
    assert isinstance(found.features, np.memmap)
    tensor = torch.from_numpy(found.features)
    tensor.zero_()
    assert np.array_equal(cache.fetch(KEY, never, 7).features, FEATURES)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_precision_is_kept(dtype, tmp_path):
    found = FeatureCache(tmp_path).fetch(KEY, lambda: batches(FEATURES.astype(dtype)), 7)
    assert found.features.dtype == dtype


def test_keys_do_not_meet(tmp_path):
    cache = FeatureCache(tmp_path)
    cache.fetch(KEY, batches, 7)
    assert not cache.fetch(OTHER, lambda: batches(FEATURES + 1), 7).hit
    assert np.array_equal(cache.fetch(KEY, never, 7).features, FEATURES)


@pytest.mark.parametrize("key", ["", "../../etc", "AB", "a/b"])
def test_a_key_cannot_leave_the_folder(key, tmp_path):
    with pytest.raises(ValueError, match="hexadecimal"):
        FeatureCache(tmp_path).fetch(key, batches, 7)


@pytest.mark.parametrize(
    ("make", "count", "complaint"),
    [
        (batches, 8, "7 samples came, 8 were promised"),
        (batches, 6, "7 samples came, 6 were promised"),
        (
            lambda: [(FEATURES, LABELS), (FEATURES[:, :2], LABELS)],
            14,
            r"shape \(7, 5\) and type float32.* got \(7, 2\)",
        ),
        (lambda: [(FEATURES, LABELS), (FEATURES.astype(np.float64), LABELS)], 14, r"got \(7, 5\) and float64"),
        (lambda: [(FEATURES, LABELS[:3])], 7, r"shape \(3, 5\).* got \(7, 5\)"),
        (lambda: [(FEATURES[None], LABELS)], 7, r"got \(1, 7, 5\)"),
    ],
)
def test_a_pass_that_does_not_keep_its_promise_leaves_nothing(make, count, complaint, tmp_path):
    cache = FeatureCache(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        cache.fetch(KEY, make, count)
    assert leftovers(tmp_path) == []
    assert not cache.folder(KEY).exists()


# -- staleness ----------------------------------------------------------------------------------------------------


def test_features_that_are_no_longer_true_are_computed_again_with_a_warning(tmp_path, caplog):
    cache = FeatureCache(tmp_path)
    cache.fetch(KEY, batches, 7)
    fresh = cache.fetch(KEY, lambda: batches(FEATURES + 1), 7, still_true=lambda z: bool(z[0, 0] == 1))
    assert not fresh.hit
    assert np.array_equal(fresh.features, FEATURES + 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "not what the network gives today" in caplog.text
    assert cache.fetch(KEY, never, 7, still_true=lambda z: bool(z[0, 0] == 1)).hit


def damage_truncate(folder):
    with open(folder / "features.npy", "r+b") as file:
        file.truncate(150)


DAMAGES = {
    "truncated": damage_truncate,
    "garbage": lambda folder: (folder / "features.npy").write_bytes(b"garbage" * 50),
    "pickled": lambda folder: np.save(folder / "features.npy", np.array([print], dtype=object), allow_pickle=True),
    "no labels": lambda folder: (folder / "labels.npy").unlink(),
    "no entry": lambda folder: (folder / "entry.json").unlink(),
    "no json": lambda folder: (folder / "entry.json").write_text("{"),
    "empty json": lambda folder: (folder / "entry.json").write_text("{}"),
    "other shape": lambda folder: np.save(folder / "features.npy", FEATURES[:, :4]),
    "other count": lambda folder: np.save(folder / "labels.npy", LABELS[:4]),
    "other format": lambda folder: (folder / "entry.json").write_text('{"format": 99}'),
    "without checksums": lambda folder: (folder / "entry.json").write_text('{"format": 1, "shape": [7, 5]}'),
    "a list": lambda folder: (folder / "entry.json").write_text("[]"),
    "deep json": lambda folder: (folder / "entry.json").write_text("[" * 100_000),
    "other key": lambda folder: (folder / "entry.json").write_text(
        (folder / "entry.json").read_text().replace(KEY, OTHER)
    ),
    "a pipe": lambda folder: ((folder / "labels.npy").unlink(), os.mkfifo(folder / "labels.npy")),
    "a folder": lambda folder: ((folder / "labels.npy").unlink(), (folder / "labels.npy").mkdir()),
    "empty": lambda folder: (folder / "labels.npy").write_bytes(b""),
    "other labels": lambda folder: np.save(folder / "labels.npy", LABELS * 0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_computed_again_with_a_warning(damage, tmp_path, caplog):
    cache = FeatureCache(tmp_path)
    damage(cache.fetch(KEY, batches, 7).folder)
    found = cache.fetch(KEY, batches, 7)
    assert not found.hit
    assert np.array_equal(found.features, FEATURES)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be used: " in caplog.text
    assert cache.fetch(KEY, never, 7).hit
    assert leftovers(tmp_path) == []


# -- trouble ------------------------------------------------------------------------------------------------------


def one_clear_error(caught):
    message = str(caught.value)
    assert "\n" not in message
    assert "cache_dir" in message
    return message


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(feature_cache.os, "fsync", full)
    with pytest.raises(CacheError) as caught:
        FeatureCache(tmp_path).fetch(KEY, batches, 7)
    assert "full" in one_clear_error(caught)
    assert leftovers(tmp_path) == []
    monkeypatch.undo()
    assert not FeatureCache(tmp_path).fetch(KEY, batches, 7).hit


def test_a_real_limit_of_the_operating_system_is_one_clear_error(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    code = (
        "import sys, numpy as np; from rmd_plugin.compare.cache import *\n"
        "make = lambda: ((np.ones((1000, 64), np.float32), np.zeros(1000, int)) for _ in range(9))\n"
        f"try: FeatureCache(sys.argv[1]).fetch({KEY!r}, make, 9000)\n"
        "except CacheError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], preexec_fn=limit, capture_output=True, text=True, check=True
    )
    assert "is full" in done.stdout
    assert done.stderr == ""
    assert leftovers(tmp_path) == []


def test_an_unreadable_file_is_one_clear_error(tmp_path, monkeypatch):
    def broken(path, **_options):
        raise OSError(errno.EIO, "Input/output error", str(path))

    cache = FeatureCache(tmp_path)
    folder = cache.fetch(KEY, batches, 7).folder
    monkeypatch.setattr(feature_cache.np, "memmap", broken)
    with pytest.raises(CacheError) as caught:
        cache.fetch(KEY, batches, 7)
    assert str(folder / "features.npy") in one_clear_error(caught)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_one_clear_error(tmp_path):
    cache = FeatureCache(tmp_path)
    (cache.fetch(KEY, batches, 7).folder / "features.npy").chmod(0)
    with pytest.raises(CacheError) as caught:
        cache.fetch(KEY, batches, 7)
    assert "Permission denied" in one_clear_error(caught)


def test_a_stale_entry_that_cannot_be_removed_is_one_clear_error(tmp_path, monkeypatch):
    def refuse(path, **_options):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    cache = FeatureCache(tmp_path)
    cache.fetch(KEY, batches, 7)
    monkeypatch.setattr(feature_cache.shutil, "rmtree", refuse)
    with pytest.raises(CacheError) as caught:
        cache.fetch(KEY, batches, 7, still_true=lambda _: False)
    assert "Permission denied" in one_clear_error(caught)


def test_a_cache_that_is_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "cache").write_text("x")
    with pytest.raises(CacheError) as caught:
        FeatureCache(tmp_path / "cache").fetch(KEY, batches, 7)
    assert str(tmp_path / "cache") in one_clear_error(caught)
    assert "Fix the permissions" in one_clear_error(caught)


def test_errors_of_the_computation_stay_what_they_are(tmp_path):
    def missing():
        yield FEATURES[:3], LABELS[:3]
        raise FileNotFoundError(errno.ENOENT, "No such file", "images.npz")

    with pytest.raises(FileNotFoundError, match=r"images\.npz") as caught:
        FeatureCache(tmp_path).fetch(KEY, missing, 7)
    assert not isinstance(caught.value, CacheError)
    assert leftovers(tmp_path) == []


def test_an_interrupted_pass_leaves_nothing(tmp_path):
    def interrupted():
        yield FEATURES[:3], LABELS[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FeatureCache(tmp_path).fetch(KEY, interrupted, 7)
    assert leftovers(tmp_path) == []


def no_locks(*_args, **_kwargs):
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_folder_without_locks_still_works(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(feature_cache.FileLock, "acquire", no_locks)
    cache = FeatureCache(tmp_path)
    assert not cache.fetch(KEY, batches, 7).hit
    assert cache.fetch(KEY, never, 7).hit
    assert "no file locks" in caplog.text


def test_without_locks_the_faster_of_two_jobs_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache.FileLock, "acquire", no_locks)
    cache = FeatureCache(tmp_path)

    def slow():
        FeatureCache(tmp_path).fetch(KEY, batches, 7)  # the other job, in between
        return batches()

    assert np.array_equal(cache.fetch(KEY, slow, 7).features, FEATURES)
    assert leftovers(tmp_path) == []


# -- several processes ----------------------------------------------------------------------------------------------


def job(root, log, barrier, results):
    def compute():
        with open(log, "a") as file:
            file.write("computed\n")
        for part in batches():
            time.sleep(0.05)
            yield part

    barrier.wait()
    found = FeatureCache(root).fetch(KEY, compute, 7)
    results.put((float(found.features.sum()), found.labels.tolist()))


@pytest.mark.slow
def test_jobs_that_start_together_compute_once_and_all_read_the_whole(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    jobs = [context.Process(target=job, args=(tmp_path, tmp_path / "log", barrier, results)) for _ in range(4)]
    for process in jobs:
        process.start()
    found = [results.get(timeout=60) for _ in jobs]
    for process in jobs:
        process.join()
    assert found == [(float(FEATURES.sum()), LABELS.tolist())] * 4
    assert (tmp_path / "log").read_text() == "computed\n"


def endless(root, started):
    def compute():
        yield FEATURES[:3], LABELS[:3]
        started.set()
        time.sleep(600)

    FeatureCache(root).fetch(KEY, compute, 7)


def test_a_killed_job_leaves_nothing_that_breaks_the_next(tmp_path, caplog):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    victim = context.Process(target=endless, args=(tmp_path, started))
    victim.start()
    assert started.wait(60)
    assert len(leftovers(tmp_path)) == 1
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    found = FeatureCache(tmp_path).fetch(KEY, batches, 7)
    assert np.array_equal(found.features, FEATURES)
    assert leftovers(tmp_path) == []
    assert caplog.text == ""


@pytest.mark.slow
def test_a_waiting_job_takes_over_when_the_first_is_killed(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    context = multiprocessing.get_context("fork")
    started = context.Event()
    victim = context.Process(target=endless, args=(tmp_path, started))
    victim.start()
    assert started.wait(60)
    # fires while this process waits for the lock
    signal.signal(signal.SIGALRM, lambda *_: os.kill(victim.pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    found = FeatureCache(tmp_path).fetch(KEY, batches, 7)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    victim.join()
    assert not found.hit
    assert np.array_equal(found.features, FEATURES)
    assert "Another job is computing" in caplog.text
