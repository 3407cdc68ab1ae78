"""What a flow.yml may say, and what is refused: by the parser and by the JSON schema."""

import json
import runpy
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator

import opendataflow_dagster
from opendataflow_dagster import Dataset, Flow, Job
from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import FlowError, WrongUse
from opendataflow_dagster.flow.file import (
    DATASET_KEYS,
    EXPECT_KEYS,
    FLOW_KEYS,
    JOB_KEYS,
    TARGET_KEYS,
    json_schema,
    schema_text,
)
from opendataflow_dagster.flow.flow import escape, expand
from opendataflow_dagster.model import DATASET_COLUMNS

WHOLE = """
flow: shop
targets:
  dev: {url: "sqlite:///.dataflow/dataflow.db"}
  prod: {properties: prod.properties}
defaults: {policy: {max_attempts: 3, retry_delay: 60}}
datasets:
  sales: &csv
    hostname: /data/sales
    format: csv
    options: {delimiter: ";", header: true, strings: [zip]}
    description: What the tills send
    owners: [ada@example.com]
    tags: {tier: gold}
  returns: {<<: *csv, hostname: /data/returns}
  orders: {hostname: db1, tablename: 0123, password: "${PW}", chunkcolumn: day}
  empty:
jobs:
  check:
    in: [sales, returns]
    out: checked
    run: ./check.sh --fast 'two words'
    policy: {retry_delay: 10m, concurrency: 4}
    environment: {MODE: 010, yes: no}
    runs_in: work
"""


def test_a_whole_flow_is_read_as_it_is_written() -> None:
    flow = Flow.parse(WHOLE, "some/flow.yml")
    assert (flow.name, flow.origin, flow.folder) == (
        "shop",
        "flow:shop",
        str(Path("some").absolute()),
    )
    sales, returns, orders, empty = flow.datasets
    assert sales.options == {"delimiter": ";", "header": True, "strings": ["zip"]}
    assert (returns.hostname, returns.format) == ("/data/returns", "csv")
    assert (orders.tablename, orders.where) == ("0123", "some/flow.yml:16")
    assert orders.columns({})["encryptedpass"] is None
    assert orders.secret({"PW": "geheim"}) == "geheim"
    assert empty == Dataset("empty")
    [check] = flow.jobs
    assert check == Job(
        "check",
        inputs=["sales", "returns"],
        outputs="checked",
        run="./check.sh --fast 'two words'",
        policy={"max_attempts": 3, "retry_delay": "10m", "concurrency": "4"},
        environment={"MODE": "010", "yes": "no"},
        runs_in="work",
    )
    assert check.words() == ["./check.sh", "--fast", "two words"]
    assert flow.targets["prod"] == {"properties": "prod.properties"}


def test_a_flow_is_a_public_name_and_loads_its_file() -> None:
    Path("flow.yml").write_text("flow: shop\n")
    assert opendataflow_dagster.Flow.load() == Flow("shop", file="flow.yml")
    with pytest.raises(FlowError, match=r"There is no other\.yml.*odf export"):
        Flow.load("other.yml")
    Path("folder.yml").mkdir()
    with pytest.raises(FlowError, match="can't be read"):
        Flow.load("folder.yml")


REFUSED = {
    "": "flow.yml:1: must be an object with the keys",
    "flow:\n": "flow.yml:1: flow has no value",
    "datasets: {}\n": "flow.yml:1: needs a name",
    "flow: shop\ndatasets:\n  a: {hostnam: /x}\n": "flow.yml:3: dataset 'a' has an unknown key "
    "'hostnam'. Did you mean 'hostname'?",
    "flow: shop\ndatasets:\n  a:\n  b:\n  a:\n": "flow.yml:5: 'a' is given here and in line 3.",
    "flow: s\nflow: t\n": "flow.yml:2: 'flow' is given here and in line 1.",
    "flow: s\ndatasets: [a]\n": "flow.yml:2: datasets must have names",
    "flow: s\ndatasets: {a: x}\n": "flow.yml:2: dataset 'a' must be an object with keys",
    "flow: s\ndatasets:\n  a:\n    hostname: [x]\n": "flow.yml:4: hostname of dataset 'a' must be "
    "one value, not a list.",
    "flow: s\ndatasets: {a: {hostname: }}\n": "flow.yml:2: hostname of dataset 'a' has no value",
    "flow: s\ndatasets: {today: {}}\n": "flow.yml:2: 'today' is reserved",
    "flow: s\ndatasets:\n  a:\n    options: {delimeter: x}\n": "flow.yml:4: options of dataset "
    "'a' has an unknown key 'delimeter'. Did you mean 'delimiter'?",
    "flow: s\ndatasets: {a: {writemode: apend}}\n": "writemode of dataset 'a' must be append or "
    "replace, not 'apend'. Did you mean 'append'?",
    "flow: s\ndatasets: {a: {encryptedpass: geheim}}\n": "isn't an encrypted value",
    "flow: s\ndatasets: {'a=b': {}}\n": "has a control character or '='",
    'flow: s\ndatasets: {"a\\tb": {}}\n': "has a control character or '='",
    "flow: s\njobs: {j: {in: a}}\n": "flow.yml:2: Job 'j' has no output",
    "flow: s\njobs: {j: {in: a, out: a}}\n": "Job 'j' would read and write 'a'",
    "flow: s\njobs: {j: {out: today}}\n": "'today' can't be an output",
    "flow: s\njobs: {external: {out: a}}\n": "is reserved for chunks that no job produced",
    "flow: s\njobs:\n  j:\n    out: a\n    run: x\n    spark: y:z\n": "flow.yml:6: Job 'j' has "
    "both run and spark",
    "flow: s\njobs: {j: {out: a, spark: jobs.py}}\n": "Write FILE.py:FUNCTION",
    'flow: s\njobs: {j: {out: a, run: "\'x"}}\n': "a quote isn't closed",
    "flow: s\njobs: {j: {out: a, policy: {concurency: 3}}}\n": "Did you mean 'concurrency'?",
    "flow: s\njobs: {j: {out: a, policy: {concurrency: -3}}}\n": "use a whole number, at least 0",
    "flow: s\ndefaults:\n  policy: {concurrency: x}\n": "flow.yml:3: concurrency='x' isn't valid",
    "flow: s\njobs: {j: {out: a, policy: {paused_until: +2h}}}\n": "each `odf apply` would move",
    "flow: s\njobs: {j: {out: a, environment: {LD_PRELOAD: x}}}\n": "can't set LD_PRELOAD",
    "flow: s\njobs: {j: {out: a, runs_in: dagstr}}\n": "Did you mean 'dagster'?",
    "flow: s\njobs:\n  j: {in: a, out: b}\n  k: {in: b, out: a}\n": "wait for each other for ever",
    "flow: s\ntargets: {p: {}}\n": "needs either properties: FILE or url: ADDRESS",
    "flow: s\ntargets: {p: {urll: x}}\n": "Did you mean 'url'?",
    "flow: s\ndatasets: {a: {hostname: !!python/name:os.system x}}\n": "isn't used here",
    "flow: s\ndatasets: {a: !!python/object:os.system {}}\n": "isn't used here",
    "flow: s\ndatasets: {[a]: {}}\n": "a name must be one value",
    "flow: s\n---\nflow: t\n": "isn't YAML: but found another document",
    "flow: s\n\tx: y\n": "flow.yml:2 isn't YAML: found a tab",
    "flow: s\nx: &a [*a]\n": "more than 100,000 values",
    "[" * 100_000: "flow.yml:1 is nested more than 50 levels deep",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:60])
def test_errors_are_one_line_with_file_and_line(text: str) -> None:
    with pytest.raises(FlowError) as error:
        Flow.parse(text)
    assert REFUSED[text] in str(error.value)
    assert str(error.value).startswith("flow.yml")
    assert "\n" not in str(error.value)


def test_a_yaml_bomb_is_refused_before_it_expands() -> None:
    lines = ["a: &a0 [" + "x," * 10 + "]"]
    lines += [f"b{n}: &a{n} [{f'*a{n - 1},' * 10}]" for n in range(1, 12)]
    began = time.monotonic()
    with pytest.raises(FlowError, match="more than 100,000 values"):
        Flow.parse("\n".join(lines))
    assert time.monotonic() - began < 5


SECRETS = [
    "{password: Geheim-1}",
    "{password: 'x${PW}Geheim-1'}",
    "{hostname: 'postgresql://u:Geheim-1@h/db', password: '${PW}'}",
    "{database: 'jdbc:mysql://h/db?password=Geheim-1'}",
    "{encryptedpass: Geheim-1}",
]


@pytest.mark.parametrize("written", SECRETS)
def test_a_password_that_is_written_out_is_refused_and_not_shown(written: str) -> None:
    with pytest.raises(FlowError, match=r"^flow\.yml:3: ") as error:
        Flow.parse(f"flow: shop\ndatasets:\n  a: {written}\n")
    assert "Geheim" not in str(error.value)
    with pytest.raises(FlowError) as error:
        Flow.parse("flow: s\ntargets: {p: {url: 'postgresql://u:Geheim-1@h/db'}}")
    assert "Geheim" not in str(error.value)


def test_places_may_contain_environment_variables() -> None:
    dataset = Dataset("a", hostname="${ROOT}/in", tablename="$${x}", where="flow.yml:3")
    assert dataset.columns({"ROOT": "/data"})["hostname"] == "/data/in"
    assert dataset.columns({"ROOT": "/data"})["tablename"] == "${x}"
    with pytest.raises(FlowError, match=r"^flow.yml:3: The environment has no ROOT\. Set it"):
        dataset.columns({})
    with pytest.raises(FlowError, match="has a password in its URL") as error:
        Dataset("a", hostname="${URL}").columns({"URL": "postgresql://u:Geheim@h/db"})
    assert "Geheim" not in str(error.value)


@given(st.text())
def test_an_escaped_text_expands_to_itself(text: str) -> None:
    assert expand(escape(text), {}) == text


def test_a_flow_in_python_is_checked_as_one_in_a_file() -> None:
    with pytest.raises(WrongUse, match="Two jobs have the name 'j'"):
        Flow("s", jobs=[Job("j", outputs=["a"]), Job("j", outputs=["b"])])
    with pytest.raises(WrongUse, match="no dial 'concurency' for job 'j'"):
        Job("j", outputs=["a"], policy={"concurency": 3})
    with pytest.raises(WrongUse, match="Use one of work, dagster, cron"):
        Job("j", outputs=["a"], runs_in="airflow")
    with pytest.raises(WrongUse, match="has an unknown key 'adress'"):
        Flow("s", targets={"p": {"adress": "x"}})
    with pytest.raises(WrongUse, match="writemode"):
        Dataset("a", writemode="over")
    with pytest.raises(WrongUse, match="flow's name"):
        Flow("")


# --- the JSON schema ------------------------------------------------------------------------------


def test_the_schema_that_is_shipped_is_the_one_of_this_program() -> None:
    shipped = Path(opendataflow_dagster.__file__).parent / "flow" / "flow.schema.json"
    assert shipped.read_text() == schema_text(), "run `make docs`"
    assert CliRunner().invoke(app, ["schema"]).stdout == schema_text()
    Draft7Validator.check_schema(json_schema())


def as_json(value: Any) -> Any:
    """What an editor sees of a document: JSON, with dates as texts."""
    if isinstance(value, dict):
        return {str(name): as_json(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [as_json(inner) for inner in value]
    return value.isoformat() if isinstance(value, date) else value


def accepts(text: str) -> tuple[bool, bool]:
    """Whether the schema and the parser accept a text."""
    by_schema = Draft7Validator(json_schema()).is_valid(as_json(yaml.safe_load(text)))
    try:
        Flow.parse(text)
    except FlowError:
        return by_schema, False
    return by_schema, True


TEXTS = st.sampled_from(["x", "./a b", "2026-10-01", 7, 1.5, True, "yes"])
NAMES = st.sampled_from(["a", "b", "c", "mode", "in", "delimiter", "url", "2"])
ANYTHING = st.recursive(
    TEXTS | st.none() | st.just("${PW}"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)


def objects(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """An object with some of these keys, right or wrong; or something else."""
    wrong = st.fixed_dictionaries({}, optional=dict.fromkeys((*keys, "other"), ANYTHING))
    right = st.fixed_dictionaries({}, optional=keys)
    return st.one_of(right, right, right, wrong, ANYTHING)


def by_name(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.sampled_from(["d1", "d2"]), inner, max_size=2) | st.none()


POLICY = objects(
    concurrency=st.sampled_from([0, 4, -1, "none", "x"]),
    retry_delay=st.sampled_from([0, 60, "10m", "soon"]),
    paused_until=st.sampled_from(["forever", "none"]),
)
DATASETS = objects(
    hostname=TEXTS,
    password=st.sampled_from(["${PW}", "clear", 5]),
    writemode=st.sampled_from(["append", "replace", "over"]),
    options=st.just({"delimiter": ";"})
    | ANYTHING.filter(lambda found: not isinstance(found, dict)),
    owners=st.lists(TEXTS, max_size=2) | TEXTS,
    tags=st.dictionaries(NAMES, TEXTS, max_size=2),
)
JOBS = objects(
    **{"in": st.just(["x"]), "out": st.sampled_from(["y", ["y", "z"]])},
    run=TEXTS,
    spark=st.just("jobs.py:f"),
    policy=POLICY,
    environment=st.dictionaries(st.sampled_from(["MODE", "a"]), TEXTS, max_size=2),
    runs_in=st.sampled_from(["work", "cron", "airflow"]),
).filter(lambda job: not isinstance(job, dict) or job.get("out") not in ([], None))
FLOWS = st.fixed_dictionaries(
    {},
    optional={
        "flow": TEXTS | st.none(),
        "datasets": by_name(DATASETS) | ANYTHING,
        "jobs": by_name(JOBS) | ANYTHING,
        "targets": by_name(objects(url=st.just("sqlite:///x.db"), properties=TEXTS)),
        "defaults": objects(policy=POLICY),
    },
)


@settings(max_examples=400, deadline=None)
@given(FLOWS)
@example({"flow": "x", "datasets": {"a": None}})
def test_the_schema_accepts_and_refuses_what_the_parser_does(document: Any) -> None:
    by_schema, by_parser = accepts(yaml.safe_dump(document))
    assert by_schema == by_parser, json.dumps(document)


def test_the_example_of_the_documents_is_a_flow() -> None:
    examples = Path(__file__).parents[1] / "projects" / "flow_page"
    written = (examples / "flow.yml").read_text()
    flow = Flow.parse(written)
    assert Draft7Validator(json_schema()).is_valid(yaml.safe_load(written))
    assert [job.policy for job in flow.jobs] == [
        {"max_attempts": "3", "concurrency": "4", "retry_delay": "10m"}
    ]
    flow = runpy.run_path(str(examples / "flows.py"))["flow"]
    assert (flow.name, [job.run for job in flow.jobs]) == ("shop", ["./check.sh"])


def test_the_documents_name_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flow.md").read_text()
    ours = {"password", "expect", "description", "owners", "tags"}
    assert {key.name for key in DATASET_KEYS} - ours == set(DATASET_COLUMNS)
    for key in (*FLOW_KEYS, *JOB_KEYS, *TARGET_KEYS, *EXPECT_KEYS):
        assert f"`{key.name}`" in page or f"`{key.name}: " in page, key.name


@pytest.mark.parametrize(
    ("expect", "why"),
    [
        ("{exist: true}", "Did you mean 'exists'?"),
        ("{exists: false}", "must be true, or be left out"),
        ("{exists: [true]}", "must be one value"),
        ("{rows: 3}", "must be an object with keys of min, max"),
        ("{rows: {}}", "needs a min or a max"),
        ("{rows: {min: -1}}", "must be a number from 0, not '-1'"),
        ("{rows: {min: many}}", "must be a number from 0, not 'many'"),
        ("{rows: {min: 3, max: 2}}", "has a min of rows above the max"),
    ],
)
def test_invalid_expectations_are_refused_with_their_line(expect: str, why: str) -> None:
    text = f"flow: x\ndatasets:\n  a:\n    hostname: /a\n    expect: {expect}\n"
    with pytest.raises(FlowError) as caught:
        Flow.parse(text + "jobs: {make: {out: a, run: ./x}}\n")
    assert str(caught.value).startswith("flow.yml:5: ")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("jobs", "why"),
    [
        ("{make: {out: b, run: ./x}}", "no job of this flow writes it"),
        ("{make: {out: a}}", "job 'make', which writes it, has no run, python or spark"),
        ("{a: {out: a, pipeline: .}}", "job 'a', which writes it, has no run, python or spark"),
    ],
)
def test_absurd_expectations_are_refused(jobs: str, why: str) -> None:
    with pytest.raises(FlowError, match=r"flow\.yml:2: Dataset 'a' has expect, and ") as caught:
        Flow.parse(f"flow: x\ndatasets: {{a: {{expect: {{rows: {{min: 1}}}}}}}}\njobs: {jobs}\n")
    assert why in str(caught.value)


def test_expectations_in_python_are_checked_alike() -> None:
    flow = Flow(
        "x",
        datasets=[Dataset("a", hostname="/a", expect={"exists": True, "rows": {"max": 3}})],
        jobs=[Job("make", outputs=["a"], run="./x")],
    )
    assert flow.expected("make") == {"a": {"exists": True, "rows": {"max": 3}}}
    for expect in ({"exists": 1}, {"rows": {"min": True}}, {"rows": 3}, {"checks": []}, [], "x"):
        with pytest.raises(FlowError, match="expect of dataset 'a'"):
            Dataset("a", hostname="/a", expect=expect or ["x"])
    with pytest.raises(FlowError, match="has no location"):
        Dataset("a", expect={"exists": True})
