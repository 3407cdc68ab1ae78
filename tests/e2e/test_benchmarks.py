"""Every benchmark runs, in its tiny form, and the document has their results."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
DOCUMENT = ROOT / "docs" / "benchmarks.md"

pytestmark = pytest.mark.timeout(600)


def run(*words: object, code: int = 0) -> str:
    """Run Python and return what it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def loaded(program: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of a program without running it."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return runpy.run_path(str(FOLDER / f"{program}.py"))


def test_benchmarks_without_spark_run_one_after_the_other() -> None:
    printed = run(
        FOLDER / "all.py",
        "--tiny",
        "claims",
        "online",
        "runjob",
        "reconcile",
        "listings",
        "outage",
        "wake",
    )

    assert printed.count("Ran through") == 7
    assert [(program, verdict) for program, *_, verdict in map(str.split, ending(printed))] == [
        ("claims.py", "ok"),
        ("online.py", "ok"),
        ("runjob.py", "ok"),
        ("reconcile.py", "ok"),
        ("listings.py", "ok"),
        ("outage.py", "ok"),
        ("wake.py", "ok"),
    ]


def ending(printed: str) -> list[str]:
    return printed.partition("=== all\n")[2].splitlines()


def test_catching_up_in_dagster_is_measured() -> None:
    assert "Ran through" in run(FOLDER / "catchup.py", "--tiny")


def test_the_local_engine_is_measured_beside_spark() -> None:
    assert "Ran through" in run(FOLDER / "local_engine.py", "--tiny")


def test_loading_a_code_location_is_measured() -> None:
    assert "Ran through" in run(FOLDER / "load.py", "--tiny")


def test_items_over_http_are_measured() -> None:
    assert "Ran through" in run(FOLDER / "stream.py", "--tiny")


def test_spark_is_measured() -> None:
    # In one process, so that Java starts once: with the jar of a rival, if there is one.
    printed = run(
        "-c",
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
        "import evidence, spark, spark_postgres\n"
        "for program in (spark_postgres, spark, evidence):\n"
        "    assert program.main(['--tiny']) == 0\n",
    )

    assert printed.count("Ran through") == 3


def test_two_commits_are_compared() -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("the commits aren't here: this is no clone")
    printed = run(FOLDER / "compare.py", "--tiny", "HEAD", "HEAD", "runjob", "--only", "cold")

    assert re.search(r"PostgreSQL: cold `odf run` / .* not judged", printed)
    assert re.search(r"SQLite: cold `odf run` / .* not judged", printed)


@pytest.mark.parametrize(
    ("new", "again", "verdict"),
    [
        (1.04, 1.0, "within 5%"),
        (0.97, 1.0, "within 5%"),
        (0.9, 1.0, "SLOWER"),
        (0.9, 1.3, "within the spread"),
        (1.2, 1.01, "faster"),
    ],
)
@pytest.mark.parametrize("better", ["more", "less"])
def test_a_change_is_judged_beside_what_the_old_commit_differs_from_itself_by(
    monkeypatch: pytest.MonkeyPatch, new: float, again: float, verdict: str, better: str
) -> None:
    compare = loaded("compare", monkeypatch)
    sides = {compare["OLD"]: 1.0, compare["NEW"]: new * again**0.5, compare["AGAIN"]: again}
    measured = [
        {
            side: [
                {"what": "x", "better": better, "ratios": [2 * (n if better == "more" else 1 / n)]}
            ]
            for side, n in sides.items()
        }
    ] * 9

    [change] = compare["changes"](measured)

    assert change.change == pytest.approx(new)
    assert change.verdict == verdict


def test_a_benchmark_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    for name in ("all", "measure"):
        shutil.copy(FOLDER / f"{name}.py", tmp_path)
    for name, code in (("claims", 2), ("runjob", 1), ("stream", 0)):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit({code})\n")

    printed = run(tmp_path / "all.py", "claims", "runjob", "stream", code=2)

    assert [line.split()[-1] for line in ending(printed)] == ["FAILED", "MISSED", "ok"]


def test_a_program_writes_its_own_section_of_the_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = loaded("report", monkeypatch)
    page = tmp_path / "benchmarks.md"
    shutil.copy(DOCUMENT, page)
    report["record"].__globals__["DOCUMENT"] = page
    given = report["options"](None, ["--record"])
    runjob = report["Report"]("runjob", given, ["psycopg"])
    runjob.table("Cold", ["ms"], [["odf run", "95"]])
    runjob.require("cold | warm", [2.0, 3.0, 4.0], most=1.6)

    assert runjob.verdict() == 1

    others, section = parted(page.read_text())
    assert others == parted(DOCUMENT.read_text())[0]
    assert "1 of 1 missed. Commit `" in section["runjob"]
    assert "| cold \\| warm | 3.00 (2.00–4.00) | ≤ 1.6 | MISSED |" in section["runjob"]
    assert "odf run  95" in section["runjob"]


def parted(page: str) -> tuple[str, dict[str, str]]:
    """A page without the sections that programs write, and those, by program."""
    section = re.compile(r"<!-- (\w+)\.py: begin -->\n(.*?)<!-- \1\.py: end -->", re.DOTALL)
    return section.sub("", page), dict(section.findall(page))


def test_the_figures_of_the_document_are_written_by_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others, sections = parted(DOCUMENT.read_text())

    assert set(sections) == set(loaded("all", monkeypatch)["PROGRAMS"])
    rows = [line for line in others.splitlines() if line.startswith("|")]
    plain = [re.sub(r"`[^`]*`", "", row) for row in rows]
    figures = r"\d+[.,]\d|\d ?(ms|s|min|µs|MB|%|times)\b"
    assert rows
    assert [row for row in plain if re.search(figures, row)] == []
    for program in sections:
        assert f"`{program}.py" in others, f"the document doesn't say what {program}.py measures"


def test_the_package_is_imported_in_one_file_only() -> None:
    imports = re.compile(r"^ *(from|import) opendataflow_dagster", re.MULTILINE)

    assert [file.name for file in FOLDER.glob("*.py") if imports.search(file.read_text())] == []
