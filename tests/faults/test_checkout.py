"""The commit is read without running anything that a checkout names."""

import os
import shutil
import subprocess
import sys

import pytest

from rmd_plugin.report.provenance import git_commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


class Checkout:
    """A repository with one committed file."""

    def __init__(self, place):
        self.place = place
        place.mkdir()
        self.git("init", "-q", "-b", "main")
        (place / "code.py").write_text("1\n")
        self.git("add", ".")
        self.git("commit", "-q", "-m", "first")

    def git(self, *words):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "protocol.file.allow=always"]
        done = subprocess.run(["git", *identity, *words], cwd=self.place, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    @property
    def head(self):
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path / "checkout")


def commit_of(folder):
    return git_commit.__wrapped__(folder)


def trap(checkout, tmp_path):
    """Make the checkout run a program in every way that git offers, and return the file that the program makes."""
    touched, program = tmp_path / "touched", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {touched}\ncat\n")
    program.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
        shutil.copy(program, hooks / name)
    settings = {
        "core.fsmonitor": program, "core.hooksPath": hooks, "core.sshCommand": program, "core.pager": program,
        "core.attributesFile": tmp_path / "attributes", "filter.evil.clean": program, "filter.evil.smudge": program,
        "diff.evil.textconv": program, "diff.external": program, "alias.status": f"!{program}",
        "alias.ls-files": f"!{program}", "alias.rev-parse": f"!{program}", "core.editor": program,
    }  # fmt: skip
    (tmp_path / "attributes").write_text("* filter=evil diff=evil\n")
    (checkout.place / ".git/info").mkdir(exist_ok=True)
    (checkout.place / ".git/info/attributes").write_text("* filter=evil diff=evil\n")
    (checkout.place / ".gitattributes").write_text("* filter=evil diff=evil\n")
    head = checkout.head
    for name, value in settings.items():
        checkout.git("config", name, str(value))
    return touched, head


def test_nothing_that_a_checkout_names_is_run(checkout, tmp_path):
    touched, head = trap(checkout, tmp_path)
    file = checkout.place / "code.py"
    os.utime(file, (1, 1))  # of the same content: git has to look into it, through the filter
    subprocess.run(["git", "status"], cwd=checkout.place, capture_output=True, check=False)
    assert touched.exists(), "the trap does not work"
    touched.unlink()
    os.utime(file, (2, 2))
    before = (checkout.place / ".git/index").read_bytes()
    assert commit_of(checkout.place) == head
    file.write_text("2\n")
    assert commit_of(checkout.place) == f"{head}+changes"
    assert not touched.exists()
    assert (checkout.place / ".git/index").read_bytes() == before


def test_submodules_and_missing_objects_run_nothing_either(checkout, tmp_path):
    inner = Checkout(tmp_path / "inner")
    checkout.git("submodule", "add", "-q", str(inner.place), "part")
    checkout.git("commit", "-q", "-m", "with a part")
    touched = tmp_path / "touched"
    module = checkout.place / "part"
    subprocess.run(["git", "config", "core.fsmonitor", f"touch {touched}; false"], cwd=module, check=True)
    head = checkout.head
    # a partial clone fetches what it lacks by a program of its choice
    checkout.git("config", "remote.origin.url", f"ext::sh -c touch% {touched}")
    for name, value in (("promisor", "true"), ("partialclonefilter", "blob:none")):
        checkout.git("config", f"remote.origin.{name}", value)
    checkout.git("config", "protocol.ext.allow", "always")
    tree = checkout.git("rev-parse", "HEAD^{tree}")
    (checkout.place / ".git/objects" / tree[:2] / tree[2:]).unlink()
    touched.unlink(missing_ok=True)
    assert commit_of(checkout.place) == head
    assert not touched.exists()


def test_the_commit_is_found_in_every_layout(checkout, tmp_path):
    checkout.git("pack-refs", "--all")
    assert commit_of(checkout.place) == checkout.head
    checkout.git("checkout", "-q", "--detach")
    assert commit_of(checkout.place) == checkout.head
    checkout.git("worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    (tmp_path / "tree" / "code.py").write_text("3\n")
    assert commit_of(tmp_path / "tree") == f"{checkout.head}+changes"
    checkout.git("gc", "-q")
    assert commit_of(checkout.place) == checkout.head


@pytest.mark.parametrize("head", ["ref: refs/heads/none", "ref: ../../../../../../etc/passwd", "nonsense", "", "\0"])
def test_a_strange_head_is_no_commit(checkout, head):
    (checkout.place / ".git/HEAD").write_text(head)
    assert commit_of(checkout.place) is None


def test_a_fifo_or_a_loop_for_a_head_does_not_hang(checkout):
    head = checkout.place / ".git/HEAD"
    head.unlink()
    os.mkfifo(head)
    code = "import sys; from pathlib import Path; from rmd_plugin.report.provenance import git_commit;"
    code += "sys.exit(git_commit(Path(sys.argv[1])))"
    subprocess.run([sys.executable, "-c", code, str(checkout.place)], check=True, timeout=60)
    head.unlink()
    head.symlink_to("HEAD")
    assert commit_of(checkout.place) is None


def test_without_the_program_git_the_commit_is_still_known(checkout, monkeypatch):
    head = checkout.head
    monkeypatch.setenv("PATH", "")
    assert commit_of(checkout.place) == head
