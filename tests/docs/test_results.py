"""Results are kept by kind of CPU: a run adds its machine and changes no other's figures, and every kind is shown."""

from __future__ import annotations

import json

import pytest

from benchmarks import cases, figures, harness, results_files, tables
from benchmarks.harness import Row, read_rows, write_results
from benchmarks.results_files import HOME_KIND

ROW = Row("512×512×512", 1, {"tilewise": 1.0, "numpy": 0.9, "pytorch": 3.0}, 0.9)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder of results."""
    for module in (cases, harness, results_files, tables):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def machine(monkeypatch):
    """Be another kind of CPU."""
    return lambda kind: monkeypatch.setattr(harness, "cpu_kind", lambda: kind)


def test_a_run_adds_its_machine_and_leaves_the_others(results, machine):
    for kind in (HOME_KIND, "Zen 3, AVX2", "Sapphire Rapids, AVX-512"):
        machine(kind)
        write_results(results / "gemm.json", [ROW])
    machine("Zen 3, AVX2")
    write_results(results / "gemm.json", [Row("1×1×1", 1, {"tilewise": 1.0, "numpy": 2.0}, 2.0)])
    files = {str(path.relative_to(results)) for path in results.rglob("*.json")}
    assert files == {"gemm.json", "zen-3-avx2/gemm.json", "sapphire-rapids-avx-512/gemm.json"}
    assert results_files.kinds() == [HOME_KIND, "Sapphire Rapids, AVX-512", "Zen 3, AVX2"]
    assert [row["name"] for row in results_files.rows("gemm")] == [ROW.name]
    assert [row["name"] for row in results_files.rows("gemm", kind="Zen 3, AVX2")] == ["1×1×1"]


def test_every_kind_is_shown_with_its_date_the_slow_ones_included(results, machine):
    for kind, ratio in ((HOME_KIND, 1.1), ("Zen 3, AVX2", 0.61)):
        machine(kind)
        write_results(
            results / "gemm.json",
            [Row(ROW.name, 1, {"tilewise": 1.0, "numpy": ratio, "pytorch": 3.0}, ratio, "2026-01-02")],
        )
    page = tables.cases_page()
    assert "Zen 3, AVX2" in page and "0.61" in page
    assert HOME_KIND in page and "1.10" in page
    assert "2026-01-02" in tables.cases_page()


def test_rows_that_were_not_measured_anew_keep_their_date(results, machine):
    machine("Zen 3, AVX2")
    path = results / "gemm.json"
    other = Row("2×2×2", 2, {"tilewise": 1.0, "numpy": 1.0}, 1.0)
    write_results(
        path, [Row(ROW.name, 1, ROW.seconds, 0.5, "2026-01-02"), Row("2×2×2", 2, ROW.seconds, 0.7, "2026-01-02")]
    )
    write_results(path, [other], keep=True)
    assert {row.name: (row.ratio, row.date) for row in read_rows(path)} == {
        ROW.name: (0.5, "2026-01-02"),
        "2×2×2": (1.0, harness.today()),
    }
    assert results_files.dates(results_files.rows("gemm", kind="Zen 3, AVX2")) == f"2026-01-02 to {harness.today()}"


def test_a_file_of_ones_own_choice_stays_where_it_was_put(results, machine, tmp_path):
    machine("Zen 3, AVX2")
    mine = tmp_path / "elsewhere" / "mine.json"
    mine.parent.mkdir()
    write_results(mine, [ROW])
    assert json.loads(mine.read_text())["machine"]["kind"] == "Zen 3, AVX2"


def test_a_machine_says_its_name_cores_instructions_and_caches():
    machine_class = harness.machine_class()
    assert machine_class.keys() >= {"kind", "cpu", "cpus", "kernels"}
    assert machine_class["kind"] and machine_class["cpu"] and machine_class["cpus"] >= 1


def test_what_was_measured_before_kinds_were_written_is_of_the_home_kind():
    assert results_files.read("gemm")["rows"]
    assert results_files.kinds()[0] == HOME_KIND


def test_every_measured_case_and_peer_is_on_the_page():
    """Reads the results files on its own: no row of a CPU and no peer of a row may be left out of the page of cases."""
    page = (results_files.ROOT / "docs" / "results-cases.md").read_text(encoding="utf-8")
    outputs: dict[tuple[str, str], str] = {}
    for section in page.split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        kind = next(kind for kind in results_files.kinds() if heading.endswith(f", {kind}"))
        for name, _, rest in (line.removeprefix("| ").partition(" | ") for line in lines):
            outputs[kind, name] = outputs.get((kind, name), "") + rest
    for path in results_files.RESULTS.rglob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = HOME_KIND if path.parent == results_files.RESULTS else content["machine"]["kind"]
        for row in content.get("rows", []) if isinstance(content, dict) else []:
            output = outputs.get((kind, cases.same_work(row["name"])))
            assert output is not None, f"{row['name']} of {path.name} on {kind}"
            peers = [who for who in row["seconds"] if who != "tilewise" and "tilewise" in row["seconds"]]
            assert [who for who in peers if f"{who} " not in output] == [], f"{row['name']} of {path.name} on {kind}"


def test_a_ratio_is_against_the_fastest_peer_of_all_files(results, machine):
    machine(HOME_KIND)
    seconds = {"tilewise": 1.0, "pytorch": 9.0}
    write_results(results / "decode.json", [Row("gpt 12x768 int8, a token at position 64", 1, seconds, 9.0)])
    (case,) = cases.all_cases()
    assert case.missing_peers == ["llama.cpp"] and cases.counted_cases([case]) == []
    seconds = {"tilewise": 2.0, "llama.cpp": 2.6}
    write_results(results / "llama_cpp.json", [Row("gpt 12x768 int8, a token at position 64", 1, seconds, 1.3)])
    (case,) = cases.counted_cases(cases.all_cases())
    assert (case.ratio, case.fastest_peer) == (1.3, "llama.cpp")
    assert "pytorch 9.00×" in tables.cases_page()


def test_a_case_that_no_row_takes_is_an_error(results, machine):
    machine(HOME_KIND)
    write_results(results / "surprise.json", [ROW])
    with pytest.raises(LookupError, match="belongs to no line"):
        cases.all_cases()


def test_results_older_than_the_kernels_they_time_are_marked(results, machine, monkeypatch):
    machine(HOME_KIND)
    write_results(results / "gemm.json", [ROW])
    (case,) = cases.all_cases()
    assert not case.is_stale and "†" not in tables.ratio_cell([case])
    monkeypatch.setattr(cases, "source_hash", lambda file: "other kernels")
    (case,) = cases.all_cases()
    assert case.is_stale and tables.ratio_cell([case]) == "0.90×†"


def test_every_kernel_pattern_matches_a_source_file():
    """A pattern that names a renamed file would let results look current after its kernels changed."""
    sources = [str(path.relative_to(cases.ROOT / "native")) for path in (cases.ROOT / "native").rglob("*.[ch]*")]
    for _, pattern in cases.SOURCES:
        assert [part for part in pattern.split("|") if not any(part in source for source in sources)] == []


def test_a_row_shows_a_cpu_with_current_kernels_whole_or_not_at_all():
    def case(kind, ratio, is_stale):
        return cases.Case(cases.LINES[-1], kind, str(ratio), 1, {"pytorch": ratio}, is_stale=is_stale)

    old, partly = case("old CPU", 1.5, True), [case("new CPU", 2.0, False), case("new CPU", 0.5, True)]
    assert tables.current_cases([old, *partly]) == [old, *partly]
    partly[1].is_stale = False
    assert tables.current_cases([old, *partly]) == partly


def test_every_table_of_timings_is_marked_when_the_kernels_have_changed(monkeypatch):
    """Whatever section or figure reads a file of timings says so, if another hash than the recorded one is current."""
    timing_files = {file for file, _, _ in cases.timings()} | {"memory", "plan_speed", "tuning_unseen"}
    files_read, find = set[str](), results_files._file
    monkeypatch.setattr(results_files, "_file", lambda name, kind: files_read.add(name) or find(name, kind))
    for module in (cases, tables):
        monkeypatch.setattr(module, "source_hash", lambda file: "other kernels")
    parts = {**tables.SECTIONS, **figures.FIGURES, "results page": tables.results_page, "cases": tables.cases_page}
    unmarked = []
    for name, write in parts.items():
        files_read.clear()
        text = write()
        if files_read & timing_files and not ("†" in text or "the kernels have changed since" in text):
            unmarked.append(name)
    assert set(unmarked) == {"llama cpp perplexities", "profiling"}  # no times, and times of the profiler itself


def test_a_results_file_says_commit_load_and_peers(results, machine):
    machine(HOME_KIND)
    write_results(results / "gemm.json", [ROW])
    content = json.loads((results / "gemm.json").read_text())
    assert content["commit"] and content["load"] >= 0 and content["peers"]["numpy"]
    assert content["rows"][0]["source"] == cases.source_hash("gemm")


def test_empty_cells_say_that_nothing_was_measured():
    assert tables.ratio_cell([]) == "not measured"
    for line in tables.results_page().splitlines():
        if line.startswith("|") and "×" in line:
            assert "|  |" not in line[1:], line
