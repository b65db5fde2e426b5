"""`tilewise check`: the unfinished exercises fail, the solutions pass, and wrong answers get a useful sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from tilewise import learn
from tilewise.errors import ConfigurationError
from tilewise.learn.checking import AnswerFailed, Exercise, _check_in_process, _feedback_on, exercises, feedback
from tilewise.learn.exercises import acceleration, benchmarking
from tilewise.learn.notebook import verdict_lines

SOLUTIONS = Path(__file__).parent / "solutions"


@pytest.mark.parametrize("lesson", learn.LESSONS)
def test_unfinished_exercises_fail_and_solutions_pass(lesson, tmp_path):
    unfinished = learn.start(lesson, tmp_path / f"{lesson}.py")
    before = learn.check(lesson, unfinished)
    after = learn.check(lesson, SOLUTIONS / f"{lesson}.py")
    assert len(before) == 3
    assert not any(result.solved for result in before)
    assert [result.feedback for result in after] == ["", "", ""]


CHECKS = {"blocked_matmul": acceleration._check_product, "take_turns": benchmarking._check_turns}
MISTAKES = [
    (exercise, import_module(f"tilewise.learn.exercises.{lesson}").MISTAKES[exercise.name])
    for lesson in learn.LESSONS
    for exercise in exercises(lesson)
    if exercise.name not in ("store", "ratio_interval", "quantize_rows")
]


@pytest.mark.parametrize(("exercise", "mistakes"), MISTAKES, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_each_known_mistake_fails_and_is_named(exercise, mistakes):
    check = CHECKS.get(exercise.name, exercise.check)
    for hint, mistake in mistakes:
        verdict = _feedback_on(Exercise(exercise.name, "", check), partial(_as_answer, mistake))
        assert hint in verdict or "it stops with" in verdict or "accumulate in int32" in verdict, (hint, verdict)


def _as_answer(function, *args, **options):
    try:
        return function(*args, **options)
    except (ArithmeticError, ValueError, IndexError) as error:
        raise AnswerFailed(str(error)) from None


def read_answers(file: str) -> list[tuple[str, ...]]:
    """Read answers: the exercise, what they do, the expression of the hint if they are wrong, and the body."""
    text = Path(__file__).with_name(file).read_text()
    return re.findall(r"^@ (\w+) \| ([^|\n]+?)(?: \| (.+))?\n((?:[^@].*\n)+)", text, re.MULTILINE)


def check_answer(name: str, body: str, folder: Path) -> str:
    """Check one answer; return the feedback."""
    lesson = next(lesson for lesson in learn.LESSONS if name in [e.name for e in exercises(lesson)])
    start = folder / f"{lesson}.py"
    text = (start if start.exists() else learn.start(lesson, start)).read_text()
    signature = re.search(rf"^def {name}\(.*:", text, re.MULTILINE)[0]
    path = folder / "answer.py"
    path.write_text(f"import time\nimport numpy as np\n{signature}\n{textwrap.indent(body, '    ')}")
    return _check_in_process(next(e for e in exercises(lesson) if e.name == name), str(path))


STUDENT_ANSWERS = read_answers("student_answers.txt")


@pytest.mark.parametrize("lesson", learn.LESSONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_wrong_answer_of_a_student_passes_and_each_gets_the_right_hint(lesson, tmp_path):
    names = [exercise.name for exercise in exercises(lesson)]
    answers = [answer for answer in STUDENT_ANSWERS if answer[0] in names]
    assert min(Counter(answer[0] for answer in answers).values()) >= 10
    missed = []
    for name, mistake, hint, body in answers:
        call = r"^.*? (?=gave|answers|took|takes|must|is|keeps|reaches|used|did|called|left)"
        feedback = re.sub(call, "", check_answer(name, body, tmp_path), count=1)
        if not feedback or not re.search(hint, feedback, re.IGNORECASE):
            missed.append((name, mistake, feedback))
    assert missed == []


@pytest.mark.parametrize("lesson", learn.LESSONS)
def test_right_answers_in_any_style_pass(lesson, tmp_path):
    names = [exercise.name for exercise in exercises(lesson)]
    answers = [answer for answer in read_answers("right_answers.txt") if answer[0] in names]
    assert min(Counter(answer[0] for answer in answers).values()) >= 3
    verdicts = [(name, style, check_answer(name, body, tmp_path)) for name, style, _, body in answers]
    assert [entry for entry in verdicts if entry[2]] == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def percentile(samples, q):\n    while True: pass", "did not come to an end"),
        ("def percentile(samples, q:\n    pass", "cannot read"),
        ("import os\nos._exit(3)", "its process ended"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "no function percentile"),
        ("def percentile(samples, q):\n    return [][0]", "IndexError"),
        ("def percentile(samples, q):\n    return 'fast'", "not a number"),
    ],
)
def test_files_that_misbehave_get_a_sentence(text, sentence, tmp_path):
    path = tmp_path / "profiling.py"
    path.write_text(text)
    result = learn.check("profiling", path, time_limit=0.5)[0]
    assert not result.solved
    assert sentence in result.feedback


def test_an_existing_file_is_not_written_over(tmp_path):
    path = tmp_path / "pruning.py"
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match="already there"):
        learn.start("pruning", path)
    assert path.read_text() == "mine"


def test_the_command_exits_with_0_1_and_2(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tilewise.cli.app", "check", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )

    assert run("caching", "--start").returncode == 0
    unfinished = run("caching", "--json")
    assert unfinished.returncode == 1
    assert [row["feedback"] for row in json.loads(unfinished.stdout)] == ["not written yet"] * 3
    assert run("caching", "--file", str(SOLUTIONS / "caching.py")).returncode == 0
    assert (run("cooking").returncode, run("pruning").returncode) == (2, 2)
    one = run("caching", "--only", "store", "--json")
    assert [row["name"] for row in json.loads(one.stdout)] == ["store"]
    assert run("caching", "--only", "stoer").returncode == 2


def test_a_file_that_python_cannot_read_is_one_message(tmp_path):
    path = tmp_path / "caching.py"
    path.write_text("def store(:\n")
    lines = verdict_lines(learn.check("caching", path))
    assert len(lines) == 2 and "line 1" in lines[0] and lines[1] == "0 of 3 solved"


FORGED = {
    "a verdict on the pipe": "import os\nfor fd in range(1, 12):\n    try:\n"
    '        os.write(fd, b\'{"feedback": ""}\\n\')\n    except OSError:\n        pass\nos._exit(0)',
    "answers on the pipe": "import os\nfor fd in range(3, 12):\n    try:\n        os.write(fd, "
    'b\'{"loaded": true}\\n{"gives": ["j", 0], "written": {}}\\n\')\n    except OSError:\n        pass',
    "a patched check": "import tilewise.learn.exercises.profiling as p\np.percentile = lambda *args: 0.0\n"
    "def percentile(samples, q): return 0",
    "a number equal to all": "class Same(float):\n    def __eq__(self, other): return True\n"
    "def percentile(samples, q): return Same(0)",
}


@pytest.mark.parametrize("trick", sorted(FORGED))
def test_no_answer_writes_its_own_verdict(trick, tmp_path):
    path = tmp_path / "profiling.py"
    path.write_text(FORGED[trick])
    assert not any(result.solved for result in learn.check("profiling", path, time_limit=10.0))


def test_an_answer_may_give_views_change_lists_and_ask_back(tmp_path):
    """What some exercises look at: shared memory, lists changed in place, functions handed over."""
    path = tmp_path / "a.py"
    path.write_text("def f(x, y, ask):\n    x[0] = ask(3)\n    y.append(1)\n    return x[1:], y\n")
    names = []

    def check(answer):
        x, y = np.zeros(4), [0]
        view, output = answer(x, y, lambda n: n + 1)
        names.append((x[0], y, np.shares_memory(view, x), output))

    assert feedback(Exercise("f", "", check), path) == ""
    assert names == [(4.0, [0, 1], True, [0, 1])]


def test_a_missing_import_is_reported_once():
    failed = [
        learn.Result(name, "task", False, f"it stops with NameError: np (line {i}) in the call with {i}")
        for i, name in enumerate("abc")
    ]
    lines = verdict_lines(failed)
    assert sum("NameError" in line for line in lines) == 1 and lines.count("    as a above") == 2


def test_an_error_on_some_inputs_only_says_which(tmp_path):
    everywhere = check_answer("least_seconds", "return undefined", tmp_path)
    somewhere = check_answer(
        "least_seconds", "return flops / min(peak_flops, flops / bytes_moved * bandwidth)", tmp_path
    )
    assert "undefined" in everywhere and "it must work" not in everywhere
    assert "it must work where there are no FLOPs" in somewhere


def test_the_next_step_is_one_that_works(tmp_path, monkeypatch, capsys):
    from tilewise.cli.lessons import _show_progress

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    _show_progress(False)
    assert "--start" in capsys.readouterr().out
    learn.start("profiling", tmp_path / "profiling.py")
    _show_progress(False)
    assert "--start" not in capsys.readouterr().out
