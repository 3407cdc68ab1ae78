"""`odf validate` and `odf new`: what passes, what doesn't, and how that is reported."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.pipelines.project import ProjectError, find_project, read_project
from opendataflow_dagster.pipelines.transformation import load
from opendataflow_dagster.pipelines.validate import (
    ValidationResult,
    differences,
    equal,
    identical,
    validate,
)
from opendataflow_dagster.store import open_store, registry

EXPECTS = 'expected_inputs = [{"a": 1}]\nexpected_output = [{"a": 1, "b": 2}]\n'
GOOD = EXPECTS + "def run(df):\n    df['b'] = 2\n    return df\n"
YML = "pipelines:\n  - slug: p\n    destination: d\n    transformations: [t]\n"

Make = Callable[..., Path]


@pytest.fixture
def project(tmp_path: Path) -> Make:
    """Write a project with the pipeline `p`, whose files are given by name."""

    def make(folder: str = "here", yml: str = YML, files: str = "", **bodies: str) -> Path:
        root = tmp_path / folder
        (root / "pipelines" / "p").mkdir(parents=True, exist_ok=True)
        (root / "project.yml").write_text(yml)
        for name, body in bodies.items():
            (root / "pipelines" / "p" / f"{name}.py").write_text(body)
        return root

    return make


def odf(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], prog_name="odf")


def verdict(root: Path) -> ValidationResult:
    [only] = validate(read_project(root))
    return only


def run_on(body: str, root: Path) -> ValidationResult:
    (root / "pipelines" / "p" / "t.py").write_text(body)
    return verdict(root)


# The command


def test_each_passing_transformation_is_a_line(project: Make) -> None:
    done = odf("validate", "--project", project(t=GOOD))

    assert done.exit_code == 0, done.output
    assert done.stdout == "ok      p.t\n"
    assert done.stderr == "1 transformation in 1 pipeline: all pass.\n"


def test_a_difference_shows_column_row_expected_and_got(project: Make) -> None:
    root = project(t=GOOD.replace('"b": 2}]', '"b": 3}]'))
    done = odf("validate", "--project", root)

    assert done.exit_code == 1
    assert done.stdout == "FAILED  p.t: column 'b', row 0: expected 3, got 2\n"
    assert "1 failure" in done.stderr


def test_json_is_a_list_of_objects(project: Make) -> None:
    root = project(t=GOOD.replace('"b": 2}]', '"b": 3}]').replace("df['b']", "print('é'); df['b']"))
    done = odf("validate", "--project", root, "--json")

    [told] = json.loads(done.stdout)
    assert done.exit_code == 1
    assert (told["pipeline"], told["transformation"], told["status"]) == ("p", "t", "failed")
    assert told["differences"] == [
        {
            "column": "b",
            "row": 0,
            "expected": "3",
            "got": "2",
            "message": "column 'b', row 0: expected 3, got 2",
        }
    ]
    assert told["file"] == "pipelines/p/t.py"
    assert told["printed"] == "é\n"


def test_junit_has_each_as_a_case_whatever_is_printed(project: Make) -> None:
    yml = YML.replace("[t]", "[t, other]")
    root = project(yml=yml, t=GOOD, other="print('\\x00<&]]>')\nraise ValueError('\\x1b[31m')")
    done = odf("validate", "--project", root, "--junit", "report.xml")

    suites = xml.parse("report.xml").getroot()
    assert done.exit_code == 1
    assert (suites.get("tests"), suites.get("failures")) == ("2", "1")
    good, bad = suites.iter("testcase")
    assert (good.get("classname"), good.get("name"), len(good)) == ("p", "t", 0)
    failure = bad.find("failure")
    assert failure is not None
    assert "ValueError" in (failure.get("message") or "")
    assert bad.findtext("system-out") == "\ufffd<&]]>\n"
    assert "\x1b" not in done.stdout


def test_one_pipeline_of_several(project: Make) -> None:
    yml = YML + "  - slug: q\n    transformations: [gone]\n"
    root = project(yml=yml, t=GOOD)

    assert odf("validate", "p", "--project", root).exit_code == 0
    assert odf("validate", "--project", root).exit_code == 1
    wrong = odf("validate", "r", "--project", root)
    assert wrong.exit_code == 4
    assert "It has: p, q" in wrong.stderr


def test_the_project_is_the_nearest_folder_above(
    project: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = project(t=GOOD)
    monkeypatch.chdir(root / "pipelines" / "p")
    assert odf("validate").exit_code == 0
    monkeypatch.chdir(tmp_path)
    lost = odf("validate")
    assert lost.exit_code == 2
    assert "--project DIR" in lost.stderr
    assert odf("validate", "--project", root / "project.yml").exit_code == 0
    assert odf("validate", "--project", "nowhere").exit_code == 2


def test_a_new_project_validates_at_once(tmp_path: Path) -> None:
    name = 'it\'s: "new" é'
    made = odf("new", name)

    assert made.exit_code == 0, made.output
    assert read_project(Path(name).resolve()).name == name
    done = odf("validate", "--project", name)
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 3
    assert not list(Path(name).rglob("__pycache__"))
    again = odf("new", name)
    assert again.exit_code == 2
    assert "isn't empty" in again.stderr
    Path("file").touch()
    assert odf("new", "file").exit_code == 2


# The rules


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (EXPECTS, "has no function `run`"),
        (EXPECTS + "run = 3", "isn't a function"),
        (EXPECTS + "def run(df): pass", "returns nothing"),
        (EXPECTS + "def run(df): return [1]", "returns a list, not a DataFrame"),
        (EXPECTS + "def run(df): return df['a']", "returns a Series"),
        (EXPECTS + "def run(stream, df): return df", "`stream` isn't the last parameter"),
        (EXPECTS + "def run(df, stream): return df", "Write `stream=None`"),
        (EXPECTS + "def run(df, df2): return df", "takes 2 frames, but there is 1"),
        (EXPECTS + "stream = [{}]\ndef run(df): return df", "no parameter `stream`"),
        (EXPECTS + "stream = []\ndef run(df, stream): return df", "`stream` is empty"),
        (EXPECTS + "stream = 3\ndef run(df, stream): return df", "must be a list of dicts"),
        ("def run(df): return df", "`expected_inputs` is missing"),
        ("expected_inputs = [[]]\ndef run(df): return df", "`expected_output` is missing"),
        ("expected_inputs = []\nexpected_output = []\ndef run(df): pass", "is empty"),
        (EXPECTS.replace("}]", "}, 7]") + "def run(df): pass", "must hold lists of dicts"),
        (EXPECTS.replace("[{", "{7, ").replace("}]", ""), "SyntaxError"),
        ("expected_inputs = 'a'\nexpected_output = []\ndef run(df): pass", "is a str, not"),
        (
            "expected_inputs = expected_output = [{'a': 1}]\ndef run(df): return df",
            "The output equals the input",
        ),
        (
            "expected_inputs = [{'a': 1}]\nexpected_output = [[{'a': 2}], [{'a': 2}]]\n"
            "def run(df): pass",
            "has 2 frames",
        ),
        (EXPECTS + "def run(df):\n    raise ValueError('a\\nb')", "ValueError: a (pipelines/p/t"),
        (EXPECTS + "def run(df):\n    import sys; sys.exit('bye')", "SystemExit: bye"),
        ("import nonexistent", "ModuleNotFoundError: No module named 'nonexistent' (pipelines/p/t"),
        ("x = (\n", "SyntaxError: '(' was never closed (pipelines/p/t.py:1)"),
        ("x = '\xff'".encode("latin-1").decode("latin-1") + "\ndef", "SyntaxError"),
    ],
)
def test_invalid_transformations_are_refused(project: Make, body: str, told: str) -> None:
    found = run_on(body, project())
    assert not found.passed
    assert told in found.message
    assert "\n" not in found.message


def test_a_missing_file_that_the_yml_names_fails(project: Make) -> None:
    assert "pipelines/p/t.py doesn't exist" in verdict(project()).message


def test_a_destination_that_is_a_list_fails_and_the_rest_is_judged(project: Make) -> None:
    root = project(yml=YML.replace("destination: d", "destination: [d, e]"), t=GOOD)
    trouble, transformation = validate(read_project(root))
    assert trouble.message.startswith("project.yml:3: `destination` is a list")
    assert transformation.passed
    assert odf("validate", "--project", root).exit_code == 1


def test_a_source_that_is_nowhere_fails(project: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    yml = YML + "    sources: [a, made, kept, in/b]\n  - slug: made\n    transformations: [t]\n"
    root = project(yml=yml, t=GOOD)
    (root / "pipelines" / "made").mkdir()
    (root / "pipelines" / "made" / "t.py").write_text(GOOD)
    (root / "sources" / "in").mkdir(parents=True)
    (root / "sources" / "in" / "b.csv").touch()
    done = odf("validate", "--project", root)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == (
        "FAILED  p: project.yml:2: source 'a' is sources/a.csv, which doesn't exist. Put a file "
        "there, or run: odf dataset add a --hostname /path/FILE.csv; project.yml:2: source 'kept' "
        "is sources/kept.csv, which doesn't exist. Put a file there, or run: odf dataset add "
        "kept --hostname /path/FILE.csv"
    )
    assert done.stdout.splitlines()[1:] == ["ok      p.t", "ok      made.t"]

    (root / "sources" / "a.csv").touch()
    store = open_store(f"sqlite:///{root}/.dataflow/dataflow.db")
    (root / ".dataflow").mkdir()
    store.init()
    registry.add_dataset(store, "kept")
    assert odf("validate", "--project", root).exit_code == 1, "it is registered without a place"
    registry.add_dataset(store, "kept", hostname="db1", tablename="kept")
    store.close()
    assert odf("validate", "--project", root).exit_code == 0
    monkeypatch.setenv("DATAFLOW_URL", "sqlite:////nowhere/at/all.db")
    away = odf("validate", "--project", root)
    assert away.exit_code == 0
    assert "Sources that aren't files weren't checked." in away.stderr


def test_a_transformation_that_the_yml_does_not_name_fails(project: Make) -> None:
    root = project(
        t="from pipelines.p.shared import twice\n" + GOOD,
        extra=GOOD,
        shared="def run(df): pass\ntwice = 2\n",
        helper="x = 1\n",
        __init__="",
    )
    done = odf("validate", "--project", root)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "FAILED  p: project.yml:2: pipelines/p/extra.py isn't listed in `transformations`. "
        "List it, or remove the file.",
        "ok      p.t",
    ]
    (root / "pipelines" / "p" / "extra.py").unlink()
    (root / "pipelines" / "q").mkdir()
    (root / "pipelines" / "q" / "t.py").write_text(GOOD)
    [stray] = [each for each in validate(read_project(root)) if not each.passed]
    assert (stray.pipeline, stray.transformation) == ("q", None)
    assert "no pipeline is called 'q'" in stray.message
    assert odf("validate", "p", "--project", root).exit_code == 0


def test_changing_the_input_is_not_returning_it(project: Make) -> None:
    """`run` changes its inputs, even the lists in their cells: the file's own stay unchanged."""
    body = (
        "expected_inputs = [{'a': [1]}]\n"
        "expected_output = [{'a': [1, 2]}]\n"
        "def run(df):\n    df['a'][0].append(2)\n    return df\n"
    )
    assert run_on(body, project()).passed
    frames = body.replace(
        "expected_inputs = [{'a': [1]}]", "expected_inputs = pd.DataFrame({'a': [[1]]})"
    )
    assert run_on(frames, project()).passed


def test_changing_only_a_type_is_a_change(project: Make) -> None:
    body = (
        "expected_inputs = [{'a': 1}]\nexpected_output = [{'a': 1.0}]\n"
        "def run(df):\n    return df.astype(float)\n"
    )
    assert run_on(body, project()).passed
    assert not run_on(body.replace(".astype(float)", ""), project()).passed


@pytest.mark.parametrize(
    ("inputs", "output"),
    [
        ("expected_inputs = [{'a': 1}]", "[{'a': 1, 'b': 2}]"),
        ("expected_inputs = [[{'a': 1}], []]", "[[{'a': 1, 'b': 2}]]"),
        ("expected_input = {'a': 1}", "{'a': 1, 'b': 2}"),
        ("expected_input = {'a': [1]}", "({'a': 1, 'b': 2},)"),
        ("expected_inputs = pd.DataFrame({'a': [1]})", "pd.DataFrame({'b': [2], 'a': [1]})"),
        ("expected_inputs = [pd.DataFrame({'a': [1]}), []]", "[pd.DataFrame({'b': 2, 'a': [1]})]"),
        ("expected_input = [pd.DataFrame({'a': [1]}, index=[9])]", "[{'b': 2.0, 'a': 1}]"),
    ],
)
def test_expectations_are_read_in_every_form(project: Make, inputs: str, output: str) -> None:
    """Also: the three names that the original's server provides exist."""
    body = f"{inputs}\nexpected_output = {output}\njson, inspect\n"
    assert run_on(body + "def run(df):\n    df['b'] = 2\n    return df\n", project()).passed


def test_run_gets_as_many_frames_as_it_has_parameters(project: Make) -> None:
    head = "expected_inputs = [[{'a': 1}], [{'a': 2}], [{'a': 3}]]\nexpected_output = [{'a': %d}]\n"
    body = (
        "def run(%s):\n    frames = [f for f in [%s] if f is not None]\n"
        "    return pd.DataFrame({'a': [sum(f.a.sum() for f in frames)]})"
    )
    for parameters, used, total in [
        ("df, df2", "df, df2", 3),
        ("df, df2=None, df3=None, df4=None", "df, df2, df3, df4", 6),
        ("*dfs", "*dfs", 6),
        ("df, df2, *, stream=None", "df, df2", 3),
        ("df, df2, **more", "df, df2", 3),
    ]:
        found = run_on(head % total + body % (parameters, used), project())
        assert found.passed, f"{parameters}: {found.message}"


def test_items_are_replayed_one_by_one(project: Make) -> None:
    """What one item's run returns is the first frame of the next; the payload is data."""
    body = """
stream = [{"a": "it's \\"quoted\\"\\nimport os", "deep": [1]}, {"a": "2", "deep": []}]
expected_inputs = [[{"a": "0", "deep": None}], [{"x": 1}]]
expected_output = [{"a": "0", "deep": None}, *stream]
def run(df, df2, stream=None):
    assert len(df2) == 1
    df2.drop(df2.index)
    return pd.concat([df, pd.DataFrame([stream])], ignore_index=True)
"""
    assert run_on(body, project()).passed
    frame = body.replace("def run", "stream = pd.DataFrame(stream)\ndef run")
    assert run_on(frame, project()).passed


def test_what_is_printed_is_kept_and_a_warning_is_no_error(project: Make) -> None:
    body = GOOD.replace(
        "    df['b'] = 2",
        "    import sys, warnings\n    print('out'); print('err', file=sys.stderr)\n"
        "    sys.stdout.buffer.write(b'raw\\n')\n    warnings.warn('old', FutureWarning)\n"
        "    df['b'] = 2",
    )
    found = run_on("print('loading')\n" + body, project())
    assert found.passed, found.message
    assert found.printed.startswith("loading\nout\nerr\nraw\n")
    assert "FutureWarning: old" in found.printed


def test_a_traceback_begins_in_the_users_file(project: Make) -> None:
    found = run_on(EXPECTS + "def run(df):\n    print('hi')\n    return df['nope']\n", project())
    assert found.message == "KeyError: 'nope' (pipelines/p/t.py:5)"
    first, place, *_, last = found.traceback.splitlines()
    assert first.startswith("Traceback")
    assert place.endswith('t.py", line 5, in run')
    assert last == "KeyError: 'nope'"
    assert found.printed == "hi\n"
    assert "opendataflow_dagster" not in found.traceback


def test_causes_in_the_users_code_are_shown(project: Make) -> None:
    body = (
        "def run(df):\n    try:\n        1 / 0\n"
        "    except ZeroDivisionError:\n        raise ValueError('b')\n"
    )
    trace = run_on(EXPECTS + body, project()).traceback
    assert (
        trace.index("ZeroDivisionError: division")
        < trace.index("Then:")
        < trace.index("ValueError")
    )


# project.yml

BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(6))
BOMB += "pipelines: [{slug: p, sources: *a5}]"
"""Half a million values in a few lines."""


def test_aliases_of_a_project_are_read(project: Make) -> None:
    root = project(yml="pipelines: [{slug: p, transformations: &t [t]}, {slug: q, sources: *t}]")
    assert read_project(root).pipeline("q").sources == ("t",)


@pytest.mark.parametrize(
    ("yml", "told"),
    [
        ("", "project.yml:1 must have the key `pipelines`"),
        ("a: [", "project.yml:1 isn't YAML"),
        ("name: x\npipelines: {}", "project.yml:2 must have `pipelines`"),
        ("pipelines: []", "project.yml:1 must have `pipelines`"),
        ("pipelines:\n  - x", "project.yml:2: a pipeline needs a `slug`"),
        ("pipelines:\n  - slug: ../x", "project.yml:2: a pipeline needs a `slug`"),
        ("pipelines:\n  - slug: yes", "a plain name"),
        (YML + YML.partition("\n")[2], "project.yml:5: two pipelines are called 'p'"),
        ("x: !!python/object/apply:os.system ['true']", "isn't YAML"),
        ("x: \x01", "isn't YAML"),
        ("x: 2026-99-99", "isn't YAML"),
        (BOMB, "project.yml has more than 100,000 values once its aliases"),
        ("x: &x [*x]\npipelines: []", "project.yml has more than 100,000 values"),
    ],
)
def test_an_unreadable_project_is_refused_with_its_line(project: Make, yml: str, told: str) -> None:
    root = project(yml=yml)
    with pytest.raises(ProjectError) as error:
        read_project(root)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert odf("validate", "--project", root).exit_code == 1


@pytest.mark.parametrize(
    ("yml", "told"),
    [
        ("pipelines:\n  - slug: p\n", "project.yml:2: pipeline 'p' has no `transformations`"),
        (YML + "    sources: a\n", "project.yml:5: `sources` must be a list"),
        (YML + "    sources: [../a]\n", "project.yml:5: '../a' isn't a valid name"),
        (YML.replace("[t]", "[a/b]"), "project.yml:4: 'a/b' isn't a valid name"),
        (YML.replace("destination: d", "destination: {a: 1}"), "project.yml:3: `destination` must"),
    ],
)
def test_what_one_pipeline_has_wrong_is_its_own_trouble(project: Make, yml: str, told: str) -> None:
    [pipeline] = read_project(project(yml=yml)).pipelines
    assert pipeline.trouble is not None
    assert told in pipeline.trouble


def test_names_with_suffixes_and_unknown_keys_are_accepted(project: Make) -> None:
    root = project(
        yml="name: N\nversion: 3\npipelines:\n- slug: 2026\n  sources: [a.csv, b, in/c.csv]\n"
        "  transformations: [one.py, two]\n  schedule: {every: 5}\n"
    )
    found = read_project(root)
    [pipeline] = found.pipelines
    assert (found.name, dict(found.extra)) == ("N", {"version": 3})
    assert pipeline.slug == "2026"
    assert pipeline.sources == ("a", "b", "in/c")
    assert pipeline.transformations == ("one", "two")
    assert dict(pipeline.extra) == {"schedule": {"every": 5}}
    assert found.source_file("in/c") == root / "sources" / "in" / "c.csv"
    assert find_project(root) == root


# Isolation


def test_projects_with_the_same_names_dont_mix(project: Make) -> None:
    """This includes late imports; and the process is as before."""
    import tests

    body = (
        "from utils.who import NAME\n"
        "def run(df):\n    from tests.late import LATE\n    import os, pipelines.p.other as o\n"
        "    return pd.DataFrame({'n': [NAME, LATE, o.X, os.path.basename(os.getcwd())]})\n"
    )
    loaded = []
    for name in ("one", "two"):
        root = project(name, t=body, other=f"X = '{name}'")
        for module, text in {"utils/who": "NAME", "tests/late": "LATE"}.items():
            (root / module).parent.mkdir()
            (root / f"{module}.py").write_text(f"{text} = '{name}'")
        loaded.append(load(read_project(root), "p", "t"))
    before, path, here = set(sys.modules), list(sys.path), Path.cwd()

    for transformation in [*loaded, *loaded]:
        made, _ = transformation([pd.DataFrame()])
        assert set(made["n"]) == {transformation.root.name}

    assert {name for name in sys.modules if name.split(".")[0] in ("utils", "pipelines")} == set()
    assert (set(sys.modules), sys.path, Path.cwd()) == (before, path, here)
    assert sys.modules["tests"] is tests


def test_a_changed_module_is_read_again(project: Make) -> None:
    root = project(t=GOOD.replace("= 2\n", "= utils.B\n").replace("def", "import utils\ndef"))
    for number, passes in ((2, True), (3, False)):
        (root / "utils.py").write_text(f"B = {number}")
        assert verdict(root).passed is passes
    assert not list(root.rglob("__pycache__"))


# Comparison


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, np.nan),
        (pd.NaT, None),
        (pd.NA, float("nan")),
        (Decimal("NaN"), pd.NaT),
        (np.datetime64("NaT"), None),
        (1, 1.0),
        (np.int64(1), 1),
        (Decimal("1.5"), 1.5),
        (0.1 + 0.2, 0.3),
        (0.3 - 0.1 * 3, 0),
        (float("inf"), float("inf")),
        (True, np.bool_(True)),
        (datetime(2026, 1, 1), pd.Timestamp("2026-01-01")),
        ([1, None], (1.0, np.nan)),
        (np.datetime64("2026-01-01"), datetime(2026, 1, 1)),
        (np.array([1, 2]), [1, 2]),
        ({"a": [float("nan")]}, {"a": [None]}),
        (np.str_("a"), "a"),
        ({1, 2}, {2, 1}),
    ],
)
def test_equal_values_pass(one: Any, other: Any) -> None:
    assert equal(one, other)
    assert equal(other, one)


class Odd:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, 0),
        (None, ""),
        (np.nan, "nan"),
        (1, "1"),
        (True, 1),
        (1.0, True),
        (1, 2),
        ("2026-01-01", datetime(2026, 1, 1)),
        (date(2026, 1, 1), "2026-01-01"),
        (date(2026, 1, 1), datetime(2026, 1, 1)),
        (1234567890123456, 1234567890123457.0),
        (Decimal("12345678901234567890.1"), Decimal("12345678901234567890.2")),
        (12345678.01, 12345678.02),
        (pd.Timestamp("2026-01-01", tz="UTC"), datetime(2026, 1, 1)),
        ([1], [1, 2]),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"b": 1}),
        (b"a", "a"),
        (Odd(), Odd()),
        (float("inf"), float("-inf")),
        (float("inf"), 1),
    ],
)
def test_different_values_fail(one: Any, other: Any) -> None:
    assert not equal(one, other)
    assert not equal(other, one)


def told(expected: Any, got: Any) -> list[str]:
    return [str(each) for each in differences(pd.DataFrame(expected), pd.DataFrame(got))]


def test_neither_index_nor_the_order_of_columns_counts_but_that_of_rows_does() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None]})
    assert told(frame, frame[["b", "a"]].set_index(pd.Index([7, 7]))) == []
    assert told(frame, frame.astype({"a": "Int64", "b": "category"})) == []
    assert told(frame, frame[::-1])[0] == "column 'a', row 0: expected 1, got 2"
    assert told({"a": [0.1]}, {"a": np.array([0.1], "float32")}) == []


def test_missing_and_extra_columns_and_rows_are_reported() -> None:
    assert told({"a": [1], "b": [1]}, {"a": [1], 3: [1]}) == [
        "column 'b' is missing; the output has: 'a', 3",
        "column 3 isn't expected",
    ]
    assert told({"a": [1, 2]}, {"a": [1]}) == ["expected 2 rows, got 1"]
    assert told([], pd.DataFrame(columns=["a"])) == []
    assert told([], {"a": [1]}) == ["column 'a' isn't expected", "expected 0 rows, got 1"]


def test_columns_of_the_same_name_are_compared_in_turn() -> None:
    twice = pd.DataFrame([[1, 2]], columns=["a", "a"])
    assert told(twice, twice) == []
    assert told(twice, twice.iloc[:, ::-1])[0] == "column 'a', row 0: expected 1, got 2"
    assert told(twice, twice.iloc[:, :1]) == ["column 'a' is missing; the output has: 'a'"]


@pytest.mark.parametrize("name", [float("nan"), None, pd.NaT, (float("nan"), "n"), ("a", pd.NA)])
def test_a_column_without_a_name_is_one_as_any_other(name: Any) -> None:
    def frame(cell: int) -> pd.DataFrame:
        made = pd.DataFrame([[cell, 2]], columns=pd.Index([name, "b"], tupleize_cols=False))
        return pickle.loads(pickle.dumps(made))  # in which NaN is another one

    assert told(frame(1), frame(1)) == []
    assert identical(frame(1), frame(1))
    assert told(frame(1), frame(2)) == [f"column {name!r}, row 0: expected 1, got 2"]
    assert told(frame(1), frame(1)[["b"]]) == [f"column {name!r} is missing; the output has: 'b'"]


def test_identical_looks_at_types_too() -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None]})
    assert identical(frame, frame.set_index(pd.Index([5, 6])))
    assert not identical(frame, frame.astype({"a": float}))
    assert not identical(frame, frame.fillna(""))


NATIVE = """
from {package} import DataFrame

expected_inputs = [
    [{{"customer": c, "pieces": n}} for c, n in ((2, 1), (1, 5), (2, 3))],
    [{{"id": 1, "name": "Ann"}}, {{"id": 2, "name": "Bob"}}],
]
expected_output = [{{"name": "Bob", "pieces": {bob}}}, {{"name": "Ann", "pieces": 5}}]

def run(df: DataFrame, customers: DataFrame) -> DataFrame:
    print("summing")
    {body}
"""
SQL = """sums = df.groupBy("customer").sum("pieces").toDF("id", "pieces")
    return sums.join(customers, "id").select("name", "pieces")"""


def test_a_transformation_of_spark_frames_is_validated(spark: Any, project: Make) -> None:
    good = verdict(project(t=NATIVE.format(package="pyspark.sql", body=SQL, bob=4)))
    assert (good.message, good.printed) == ("", "summing\n")

    bad = verdict(project("bad", t=NATIVE.format(package="pyspark.sql", body=SQL, bob=3)))
    assert "column 'pieces'" in bad.message
    assert "expected 3, got 4" in bad.message


def test_pandas_on_spark_is_refused_and_the_engines_are_named(project: Make) -> None:
    refused = verdict(project(t=NATIVE.format(package="pyspark.pandas", body="return df", bob=4)))
    assert refused.message.startswith("pipelines/p/t.py: `run` takes pyspark.pandas.DataFrame")
    assert "pandas.DataFrame or as pyspark.sql.DataFrame" in refused.message


# What is printed, and what a transformation does to the process


def run_odf(root: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `odf validate` in a separate process whose standard input stays open."""
    odf = Path(sys.executable).parent / "odf"
    ours, theirs = os.pipe()
    try:
        return subprocess.run(
            [str(odf), "validate", *words],
            cwd=root,
            stdin=ours,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)


def several(**bodies: str) -> dict[str, Any]:
    """A project's files: each body is what a `run` does before it returns the right frame."""
    files = {
        name: EXPECTS + f"def run(df):\n    {body}\n    df['b'] = 2\n    return df\n"
        for name, body in bodies.items()
    }
    return {"yml": YML.replace("[t]", f"[{', '.join(bodies)}]"), **files}


def printed_of(root: Path) -> list[str]:
    done = run_odf(root, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return [each["printed"] for each in json.loads(done.stdout)]


def test_logs_are_kept_by_each_that_writes_them(project: Make) -> None:
    log = "logging.info('of %s'); logging.warning('%s'); print('print')"
    root = project(**several(a=log % ("a", "!"), b=log % ("b", "!")))
    for name in "ab":
        file = root / "pipelines" / "p" / f"{name}.py"
        file.write_text(
            f"import logging\nlogging.basicConfig(level=logging.INFO)\n{file.read_text()}"
        )
    assert printed_of(root) == [f"INFO:root:of {name}\nWARNING:root:!\nprint\n" for name in "ab"]


def test_a_log_without_an_owner_goes_to_standard_error(project: Make) -> None:
    """A handler outlives what created it; so does a thread."""
    late = (
        "import threading, time, sys; out = sys.stdout; threading.Thread("
        "target=lambda: (time.sleep(1.5), out.write('late'))).start()"
    )
    done = run_odf(project(**several(a=late)), "--json")
    assert [each["status"] for each in json.loads(done.stdout)] == ["passed"]
    assert done.stderr.endswith("late")


def test_what_other_processes_write_is_kept_in_its_place(project: Make) -> None:
    child = "import os; print('before'); os.system('echo child; echo error >&2'); print('after')"
    forked = (
        "import sys; from multiprocessing import get_context; "
        "each = get_context('fork').Process(target=print, args=('forked',)); "
        "each.start(); each.join(); sys.__stdout__.write('real\\n')"
    )
    root = project(**several(a=child, b=forked))
    assert printed_of(root) == ["before\nchild\nafter\n", "forked\nreal\n"]
    assert "error" in run_odf(root, "--json").stderr


def test_whatever_is_done_to_the_streams_it_is_kept(project: Make) -> None:
    wrap = "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.{}, 'utf-8'); print('é')"
    root = project(
        **several(
            a=wrap.format("buffer"),
            b=wrap.format("detach()"),
            c=wrap.format("buffer"),
            d="import sys; print('é'); sys.stdout.close(); sys.stderr.close()",
            e="import sys; sys.stdout.reconfigure(encoding='latin-1'); print('é')",
            f="import sys; print('é'); sys.stdout = None",
            g="import os; print('é'); os.close(1)",
        )
    )
    assert printed_of(root) == ["é\n"] * 7


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise GeneratorExit('g')", "GeneratorExit: g (pipelines/p/a.py:4)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt (pipelines/p/a.py:4)"),
        ("raise StopIteration", "StopIteration (pipelines/p/a.py:4)"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError (pipelines/p/a.py:4)"),
        ("input('who? ')", "EOFError: EOF when reading a line (pipelines/p/a.py:4)"),
    ],
)
def test_whatever_is_raised_the_others_are_judged(project: Make, body: str, told: str) -> None:
    done = run_odf(project(**several(a=body, b="pass")), "--json")
    first, second = json.loads(done.stdout)
    assert (first["message"], second["status"]) == (told, "passed")
    assert first["printed"] == ("who? " if "who" in body else "")
    assert done.returncode == 1
    assert "opendataflow_dagster" not in done.stderr


def test_an_async_run_is_refused_in_a_line(project: Make) -> None:
    found = run_on(EXPECTS + "async def run(df):\n    return df\n", project())
    assert "`run` is `async`" in found.message
    assert found.printed == ""


def test_an_interruption_isnt_a_failure(project: Make) -> None:
    """Dagster's signal handler raises its own error in the middle of the code."""

    class Interrupted(BaseException):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupted

    root = project(**several(t="import time; time.sleep(20)"))
    loaded = load(read_project(root), "p", "t")
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(Interrupted):
            loaded([pd.DataFrame({"a": [1]})])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_ctrl_c_ends_validate(project: Make) -> None:
    root = project(**several(a="import time; open('begun', 'w').close(); time.sleep(60)", b="pass"))
    odf = Path(sys.executable).parent / "odf"
    with subprocess.Popen(
        [str(odf), "validate"], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        end = time.monotonic() + 30
        while not (root / "begun").exists() and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", 1)
    assert "Aborted!" in err
