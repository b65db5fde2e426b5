"""The check of commit messages accepts the agreed form and names each fault."""

from __future__ import annotations

import subprocess

import pytest

from tools import commit_message

BODY = "\n\nRanges were measured before the scales were applied."

GOOD = [
    "quantize: fold equalization into calibration",
    "tools, docs: describe the ratchet",
    "tune/search: pass the seed to the Gaussian process",
    "lint: ignore the clang-format commit in git blame",
    'Revert "quantize: fold equalization into calibration"',
    "Merge branch 'precision'",
]

BAD = {
    "Lint": "no area",
    "Comments; changelog: only what was measured": "no area",
    "quantize: folded equalization into calibration": "'folded'; use the imperative",
    "quantize: folding equalization": "'folding'; use the imperative",
    "quantize: folds equalization": "'folds'; use the imperative",
    "quantize: Fold equalization": "write it in lower case",
    "quantize: fold equalization.": "ends with a period",
    "quantize: equalize": "one word",
    "quantize: fold " + "equalization " * 6: "write at most 72",
}


@pytest.mark.parametrize("title", GOOD)
def test_the_agreed_form_passes(title):
    assert [*commit_message.problems(title + BODY, 500)] == []


@pytest.mark.parametrize("title", BAD)
def test_each_fault_is_named(title):
    assert any(BAD[title] in problem for problem in commit_message.problems(title + BODY, 500))


def test_only_larger_changes_need_a_body():
    title = "nn: add a missing shape comment"
    signed = title + "\n\nSigned-off-by: A. Person <a@example.org>\n"
    assert [*commit_message.problems(title, 50)] == []
    assert "no body" in next(commit_message.problems(title, 51))
    assert "no body" in next(commit_message.problems(signed, 51))
    assert "not empty" in next(commit_message.problems(title + "\nwithout a gap", 51))


def test_comments_of_git_do_not_count():
    assert [*commit_message.problems("nn: add a layer\n# Please enter the commit message\n", 1)] == []


def test_the_hook_and_the_range_agree(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first: start the history"], check=True)
    (tmp_path / "module.py").write_text("pass\n" * 60)
    subprocess.run([*git, "add", "module.py"], check=True)
    (tmp_path / "message").write_text("nn: add a module\n")
    assert commit_message.main(["message"]) == 1
    subprocess.run([*git, "commit", "-q", "--no-verify", "-F", "message"], check=True)
    assert commit_message.main(["--range", "HEAD~1..HEAD"]) == 1
    hook, history = capsys.readouterr().out.splitlines()
    assert hook == history.split(": ", 1)[1] == (
        "The change has 60 lines and no body; say why it is made and what was measured."
    )  # fmt: skip
