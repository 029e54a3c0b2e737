"""Run folders, data files and names that somebody else made: bounded, refused in one line, shown without tricks."""

import csv
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from rich.console import Console

from rmd_plugin.backbones.checkpoint import CheckpointError, read_state_dict
from rmd_plugin.benchmarks.readers.arrays import read_pt
from rmd_plugin.benchmarks.readers.downloads import unzip
from rmd_plugin.benchmarks.readers.fasta import read_fasta
from rmd_plugin.benchmarks.readers.text import read_table
from rmd_plugin.compare.rows import Row, read_rows, write_rows
from rmd_plugin.npz import read_npz
from rmd_plugin.report.gather import gather_runs
from rmd_plugin.report.page import render_report
from rmd_plugin.report.run_folder import RunFolder
from rmd_plugin.report.table import Cell, Column, Table, to_html, to_latex, to_markdown, to_terminal
from rmd_plugin.untrusted import DataFormatError, from_csv_cell, one_line, to_csv_cell

MIB = 1 << 20
HOST = os.uname().nodename
HEAD = "benchmark,ood,backbone,detector,seed,metric,value\n"


def add_run(place, seed=0, **config):
    folder = RunFolder(place)
    about = {"benchmark": "digits", "backbone": "mlp", "seed": seed}
    with folder.running(config={"seed": seed, **config}, about=about, command="rmd-train"):
        folder.write_rows([Row("digits", "noise", "mlp", name, seed, "AUROC", 0.9) for name in ("rmd", "msp")])
    return folder


def report(place):
    """``rmd-report`` in a process of its own, which must end by itself and may take 2 GiB of addresses."""
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30,) * 2);"
    code += "from rmd_plugin.app.report import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", code, str(place)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=False)


def nested_aliases():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines)


STRANGE = {
    "nested aliases": ("config.yaml", nested_aliases()),
    "a reference to itself": ("config.yaml", "a: &a [*a]\n"),
    "deep YAML": ("config.yaml", "a: " + "[" * 100_000),
    "a number in base 60": ("config.yaml", "a: 1" + ":59" * 300_000),
    "a number without end": ("config.yaml", "a: 0x" + "f" * 500_000),
    "a wrong tag": ("config.yaml", "a: !!bool perhaps"),
    "deep JSON": ("status.json", "[" * 1_000_000),
    "deep and closed JSON": ("status.json", '{"state": "done", "about": ' + "[" * 900 + "]" * 900 + "}"),
    "a list for a name": ("status.json", '{"state": "failed", "about": {"benchmark": ["a"], "backbone": {"b": 1}}}'),
    "no such process": ("status.json", json.dumps({"state": "running", "pid": 10**30, "host": HOST})),
    "a long time ago": ("status.json", '{"state": "done", "ended": "0001-01-01T00:00:00"}'),
    "a seed beyond all numbers": ("rows.csv", f"{HEAD}d,n,m,rmd,{10**400},AUROC,1\n"),
    "another time zone": ("status.json", '{"state": "done", "ended": "9999-12-31T23:59:59-23:59"}'),
}  # fmt: skip


@pytest.mark.slow
def test_strange_files_are_refused_in_one_line_and_the_other_runs_stand(tmp_path):
    for seed in range(2):
        add_run(tmp_path / f"good{seed}", seed, lr=0.1)
    for number, (name, text) in enumerate(STRANGE.values()):
        place = tmp_path / f"strange{number}"
        add_run(place, 5 + number)
        (place / name).write_text(text)
    special = {"fifo": os.mkfifo, "loop": lambda path: path.symlink_to(path.name)}
    special["zero"] = lambda path: path.symlink_to("/dev/zero")
    special["folder"] = lambda path: path.mkdir()
    special["huge"] = lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 40)
    for kind, make in special.items():
        for file in ("config.yaml", "status.json", "rows.csv", "timings.csv"):
            folder = add_run(tmp_path / f"{kind}-{file}", 50)
            folder.file(file).unlink()
            make(folder.file(file))
    done = report(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for kind in special:
        assert f"unreadable: {tmp_path / f'{kind}-rows.csv'}" in done.stdout
    with open(tmp_path / "runs.csv", newline="") as file:
        runs = {record["run"]: record for record in csv.DictReader(file)}
    for seed in range(2):
        assert runs[str(tmp_path / f"good{seed}")]["outcome"] == "done"
    # what is wrong with a config leaves the numbers
    assert "refers to another place" in runs[str(tmp_path / "strange0")]["reason"]
    assert runs[str(tmp_path / "strange0")]["outcome"] == "done"


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_the_page_of_a_run_opens_regular_files_only(tmp_path, kind):
    folder = add_run(tmp_path / "run")
    for name in ("versions.json", "history.csv", "config.yaml", "scores.npz"):
        folder.file(name).unlink(missing_ok=True)
        os.mkfifo(folder.file(name)) if kind == "fifo" else folder.file(name).symlink_to("/dev/zero")
    assert "is not a regular file" in render_report(folder)


# files that unpack to more than they should


def peak_mib(action):
    tracemalloc.start()
    try:
        with pytest.raises((DataFormatError, CheckpointError)) as caught:
            action()
        return tracemalloc.get_traced_memory()[1] / MIB, str(caught.value)
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    """Files of less than a megabyte that unpack to 200 MiB of zeros, as each reader takes them."""
    folder = tmp_path_factory.mktemp("bombs")
    zeros = bytes(MIB)
    archive = zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("x.npy", "w") as member:
        header = {"descr": "|u1", "fortran_order": False, "shape": (200 * MIB,)}
        np.lib.format.write_array_header_1_0(member, header)
        for _ in range(200):
            member.write(zeros)
    shutil.copy(folder / "a.npz", folder / "a.zip")
    with gzip.open(folder / "a.fna.gz", "wb", compresslevel=1) as file:
        file.write(b">a\n")
        for _ in range(200):
            file.write(b"A" * MIB)
    torch.save({"x": torch.zeros(50 * MIB)}, folder / "plain.pt")
    packed = zipfile.ZipFile(folder / "a.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with zipfile.ZipFile(folder / "plain.pt") as plain, packed:
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member))
    (folder / "plain.pt").unlink()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.npz", read_npz),
        ("a.fna.gz", read_fasta),
        ("a.pt", read_pt),
        ("a.pt", read_state_dict),
        ("a.zip", lambda path: unzip(path, path.parent / "into")),
    ],
)
def test_a_small_file_does_not_take_much_memory(bombs, name, read):
    assert (bombs / name).stat().st_size < 2 * MIB
    peak, message = peak_mib(lambda: read(bombs / name))
    assert peak < 150
    assert str(bombs / name) in message
    assert "RMD_MAX_GIB=1" in message


@pytest.mark.slow
def test_the_limit_can_be_raised_by_one_variable(bombs, monkeypatch):
    monkeypatch.setenv("RMD_MAX_GIB", "1")
    assert len(read_npz(bombs / "a.npz")["x"]) == 200 * MIB
    assert len(read_fasta(bombs / "a.fna.gz")["a"]) == 200 * MIB
    monkeypatch.setenv("RMD_MAX_GIB", "much")
    with pytest.raises(ValueError, match="RMD_MAX_GIB must be a number of GiB, got 'much'"):
        read_npz(bombs / "a.npz")


def test_members_that_overlap_count_each(tmp_path):
    """A bomb without a high ratio in any member: many entries of the index share one piece of data."""
    path = tmp_path / "a.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.random.default_rng(0).integers(0, 255, MIB // 2, dtype=np.uint8))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", buffer.getvalue())
        first = archive.infolist()[0]
        for number in range(200):
            copy = zipfile.ZipInfo(f"x{number}.npy")
            for name in ("compress_size", "file_size", "CRC", "header_offset", "compress_type"):
                setattr(copy, name, getattr(first, name))
            archive.filelist.append(copy)
            archive.NameToInfo[copy.filename] = copy
        archive._didModify = True
    with pytest.raises(DataFormatError, match=r"RMD_MAX_GIB|damaged"):
        read_npz(path)


def test_a_tensor_that_claims_more_than_its_file_holds_is_refused(tmp_path):
    torch.save({"features": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "a.pt")
    with pytest.raises(DataFormatError, match="larger than what the file holds"):
        read_pt(tmp_path / "a.pt")


def test_a_table_without_line_breaks_is_not_read_whole(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes(b"a\tb\n")
    os.truncate(path, 1 << 33)
    peak, _ = peak_mib(lambda: list(read_table(path, ["a", "b"])))
    assert peak < 10


# names


NAMES = ["=1+1", "+1", "-1", "@x", "\tx", "'=1", "''=1", "'a", "a=b", "", "a\x1b[2Jb",
         "a\r\nb", "a\u202eb", "a|b", "<b>", "\udcff", "\0", "\x9b31m"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown_without_steering_anything(name):
    shown = one_line(name)
    assert shown.isprintable()
    assert one_line(shown) == shown
    cell = to_csv_cell(shown)
    assert cell[:1] not in ("=", "+", "-", "@", "\t")
    assert from_csv_cell(cell) == shown


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_history_keep_a_name_and_write_no_formula(name, tmp_path):
    row = Row(name, name, name, name, -1, name, -0.5, low=0.0, high=1.0, reason=name)
    write_rows([row], tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == [row]
    folder = RunFolder(tmp_path)
    entry = {"stage": "fit", "epoch": 0, "step": 1, "detector": name, "ood": name, "metric": "AUROC", "value": -0.5}
    folder.write_history([entry])
    assert folder.read_history() == [{**entry, "detector": one_line(name), "ood": one_line(name)}]
    for file in ("rows.csv", "history.csv"):
        with open(tmp_path / file, newline="", encoding="utf-8") as stream:
            texts = [cell for record in csv.reader(stream) for cell in record if cell not in ("-1", "-0.5")]
        assert all(cell[:1] not in ("=", "+", "-", "@", "\t", "\r") and cell.isprintable() for cell in texts)


def test_tables_show_any_name_in_every_format():
    evil = "a\x1b[31m|b\n<script>x</script>\u202e ![x](http://example.org/x) \\input{x}"
    table = Table([Column(evil, "left", detail=evil)], [[Cell(evil, detail=evil)]], title=evil, notes=[evil])
    console = Console(file=io.StringIO(), width=1000)
    console.print(to_terminal(table, width=1000))
    terminal, markdown, html = console.file.getvalue(), to_markdown(table), to_html(table)
    for text in (terminal, markdown, html, to_latex(table)):
        assert all(line.isprintable() for line in text.splitlines())
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {2}
    assert "<script>" not in html + markdown.replace("\\<script\\>", "")
    assert "](" not in markdown.replace("\\](", "")
    assert r"\input" not in to_latex(table)


@pytest.mark.slow
def test_a_report_of_hostile_runs_is_plain_everywhere(tmp_path):
    evil = "=cmd|' /C calc'!A0\x1b]0;x\x07\u202e"
    add_run(tmp_path / "good")
    folder = RunFolder(tmp_path / "\x1b[2Jname")
    folder.start(config={}, about={"benchmark": evil, "backbone": evil, "seed": 0})
    folder._write_json("status.json", {"state": "failed", "reason": evil + "\nsecond", "about": {"benchmark": evil}})
    rows = "benchmark,ood,backbone,detector,seed,metric,value\n" + f'"{evil}",{evil},{evil},{evil},0,AUROC,0.5\n'
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rows.csv").write_text(rows)
    assert len(gather_runs([tmp_path])) == 3
    done = report(tmp_path)
    assert done.returncode == 0, done.stderr
    for text in (
        done.stdout,
        done.stderr,
        *((tmp_path / f"summary.{kind}").read_text() for kind in ("md", "tex", "csv")),
    ):
        assert all(line.isprintable() for line in text.splitlines())
    for name in ("runs.csv", "summary.csv"):
        with open(tmp_path / name, newline="") as file:
            cells = [cell for record in csv.reader(file) for cell in record]
        assert not any(cell[:1] in ("=", "@", "+") for cell in cells)
