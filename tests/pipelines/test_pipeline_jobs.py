"""Pipelines as jobs: what each waits for, which of them take items, and how they are registered."""

from pathlib import Path

import pytest

from opendataflow_dagster.errors import Refused, WrongUse
from opendataflow_dagster.model import MAX_ID_BYTES, Plan
from opendataflow_dagster.pipelines.jobs import (
    MARK,
    Known,
    is_read,
    plans_of,
    register,
    takes_items,
    why_no_items,
)
from opendataflow_dagster.pipelines.project import Project, ProjectError, read_project
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import everything, put, take
from tests.support.store_fixtures import register as register_job

PLAIN = "def run(df):\n    return df\n"
ITEMS = "def run(df, stream=None):\n    return df\n"


def project(root: Path, *pipelines: str, name: str = "Shop", **files: str) -> Project:
    """A project from lines such as `daily: orders products > sales`, of one transformation each."""
    lines = [f"name: {name}", "pipelines:"]
    for each in pipelines:
        slug, _, rest = each.partition(":")
        sources, _, destination = rest.partition(">")
        lines += [f"  - slug: {slug}", f"    sources: [{', '.join(sources.split())}]"]
        lines += [f"    destination: {destination.strip()}"] if destination else []
        lines += ["    transformations: [step]"]
        file = root / "pipelines" / slug / "step.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(files.get(slug, PLAIN))
    (root / "project.yml").write_text("\n".join(lines) + "\n")
    return read_project(root)


def made(*datasets: str) -> Known:
    """Let other jobs write some datasets."""
    return Known({each: Plan(each, ("seed",), (each,), (), (), False) for each in datasets})


def reads(plans: dict[str, Plan]) -> dict[str, list[str]]:
    return {slug: list(plan.inputs) for slug, plan in plans.items()}


def test_a_pipeline_writes_its_destination_or_a_dataset_of_its_name(
    tmp_path: Path,
) -> None:
    found = plans_of(project(tmp_path, "daily: orders > sales", "plain: orders"))

    assert found["daily"] == Plan("daily", (), ("sales",), ((MARK, "Shop"),), (), False)
    assert found["plain"].outputs == ("plain",)


def test_produced_sources_are_waited_for_and_others_read_as_they_are(
    tmp_path: Path,
) -> None:
    shop = project(
        tmp_path, "raw: orders > clean", "sums: clean products clean > sums", "mail: sums raw_id"
    )

    assert reads(plans_of(shop)) == {"raw": [], "sums": ["clean"], "mail": ["sums"]}
    assert reads(plans_of(shop, made("products")))["mail"] == ["sums"]
    assert is_read(shop, plans_of(shop), "raw")
    assert not is_read(shop, plans_of(shop), "mail")


def test_a_pipeline_without_a_destination_is_waited_for_unless_its_name_is_a_source(
    tmp_path: Path,
) -> None:
    shop = project(tmp_path, "orders: raw", "sums: orders")
    assert reads(plans_of(shop))["sums"] == ["orders"]

    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "orders.csv").write_text("a\n1\n")
    assert reads(plans_of(shop))["sums"] == []


def test_a_pipeline_doesnt_wait_for_a_source_made_from_its_own_output(tmp_path: Path) -> None:
    shop = project(
        tmp_path,
        "own: ledger > ledger",
        "a: c_out > a_out",
        "b: a_out > b_out",
        "c: b_out > c_out",
        "after: c_out ledger > after",
    )

    assert reads(plans_of(shop)) == {
        "own": [],
        "a": [],
        "b": [],
        "c": [],
        "after": [],  # of two kinds of runs
    }


def test_a_project_may_reverse_its_pipelines(store: Store, tmp_path: Path) -> None:
    register(store, project(tmp_path, "a: x > a_out", "b: a_out > b_out"))
    register(store, project(tmp_path, "a: b_out > a_out", "b: x > b_out"))
    assert store.read_plan("a").inputs == ("b_out",)


def test_two_pipelines_of_one_dataset_are_rivals(tmp_path: Path) -> None:
    found = plans_of(project(tmp_path, "a: x > out", "b: y > out", "c: out"))

    assert found["a"].rivals == found["b"].rivals == ("out",)
    assert found["c"].inputs == ("out",)
    assert found["c"].rivals == ()


def outputs(plans: dict[str, Plan]) -> dict[str, str]:
    return {slug: plan.outputs[0] for slug, plan in plans.items()}


def test_a_shared_unread_destination_is_a_dataset_for_each(tmp_path: Path) -> None:
    shop = project(tmp_path, "a: x > out", "b: y > out", "c: z > b")
    assert outputs(plans_of(shop)) == {"a": "a", "b": "out", "c": "b"}  # b is what c writes
    shop = project(tmp_path, "a: x > out", "b: y > out")
    assert outputs(found := plans_of(shop)) == {"a": "a", "b": "b"}
    assert found["a"].rivals == found["b"].rivals == ()
    for known in (made("out"), Known(placed=["out"]), Known(written={"a": ("out",)})):
        assert outputs(plans_of(shop, known))["a"] == "out"
    assert outputs(plans_of(shop, Known(written={"a": ("out",)}))) == {"a": "out", "b": "b"}


def test_a_pipeline_that_has_run_keeps_the_shared_dataset(store: Store, tmp_path: Path) -> None:
    shop = project(tmp_path, "a: x > out")
    assert outputs(register(store, shop)) == {"a": "out"}
    shop = project(tmp_path, "a: x > out", "b: y > out")
    for _ in range(2):
        assert outputs(register(store, shop)) == {"a": "out", "b": "b"}
    add_dataset(store, "out", hostname=str(tmp_path / "out.csv"))
    found = register(store, shop)
    assert outputs(found) == {"a": "out", "b": "out"}
    assert found["a"].rivals == ("out",)


def test_a_pipeline_of_items_waits_for_no_input(tmp_path: Path) -> None:
    shop = project(tmp_path, "raw: orders > clean", "items: clean > all", items=ITEMS)

    assert reads(plans_of(shop)) == {"raw": [], "items": []}


def test_no_pipeline_waits_for_single_items(tmp_path: Path) -> None:
    shop = project(
        tmp_path,
        "items: x > all",
        "end: all",
        "raw: orders > clean",
        "both: clean all > both",
        items=ITEMS,
    )

    found = plans_of(shop)
    assert reads(found) == {"items": [], "end": [], "raw": [], "both": ["clean"]}


def test_sources_named_by_different_runs_are_read_as_they_are(tmp_path: Path) -> None:
    shop = project(
        tmp_path,
        "a: x > a_out",
        "b: y > b_out",
        "a2: a_out > a2_out",
        "one: a_out a2_out > one",
        "join: a_out b_out > joined",
        "below: joined > below",
        "again: below a2_out > again",
    )

    assert reads(plans_of(shop)) == {
        "a": [],
        "b": [],
        "a2": ["a_out"],
        "one": ["a2_out", "a_out"],
        "join": [],
        "below": ["joined"],
        "again": [],
    }


def test_outputs_are_named_like_the_runs_that_they_read(tmp_path: Path) -> None:
    shop = project(tmp_path, "a: x > a_out", "end: a_out loaded other > end")
    other = Plan("of_another", (), ("other",), ((MARK, "Garden"),), (), False)
    loader = Plan("loader", ("a_out",), ("loaded",), (), (), False)

    assert reads(plans_of(shop, Known({"loader": loader})))["end"] == ["a_out", "loaded"]
    assert reads(plans_of(shop, Known({"of_another": other})))["end"] == []
    assert reads(plans_of(shop, made("loaded", "other")))["end"] == []
    dated = project(tmp_path, "end: loaded other > end")
    assert reads(plans_of(dated, made("loaded", "other")))["end"] == ["loaded", "other"]
    back = Plan("back", ("end",), ("loaded",), (), (), False)
    assert reads(plans_of(dated, Known({"back": back})))["end"] == []


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (PLAIN, False),
        (ITEMS, True),
        ("def run(df, *, stream):\n    return df\n", True),
        ("async def run(df, stream=None): ...\n", True),
        ("run = lambda df, stream=None: df\n", True),
        ("try:\n    import x\nexcept ImportError:\n    def run(df, stream=None): ...\n", True),
        ("if True:\n    def run(df, stream): ...\n", True),
        ("def run(df, stream): ...\ndef run(df): ...\n", False),
        ("class A:\n    def run(self, stream): ...\ndef run(df): ...\n", False),
        ("def other(df, stream):\n    def run(stream): ...\n", False),
        ("raise SystemExit('never run')\ndef run(df, stream): ...\n", True),
        ("def run(df, stream:\n", False),
        ("x = '\\d'\ndef run(df, stream): ...\n", True),
        ("def run(df, stream): ...\n\0", False),
        ("x = " + "(" * 10_000, False),
        ("", False),
    ],
)
def test_whether_items_are_taken_is_read_without_running_the_file(
    tmp_path: Path, text: str, items: bool
) -> None:
    shop = project(tmp_path, "one: x", one=text)
    assert takes_items(shop, shop.pipelines[0]) is items


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("def process(df, stream=None):\n    return df\nrun = process\n", True),
        ("run: object = lambda df, stream=None: df\n", True),
        ("from pipelines.one.shared import run\n", True),
        ("from .shared import run\n", True),
        ("from utils import run as go\nrun = go\n", True),
        ("from utils import plain as run\n", False),
        ("from .shared import nothing as run\n", None),
        ("from os.path import join as run\n", None),
        ("class Step:\n    def __call__(self, df, stream=None): ...\nrun = Step()\n", None),
        ("from .step import run\n", None),
        ("", None),
    ],
)
def test_an_imported_run_is_followed_or_reported(
    tmp_path: Path, text: str, items: bool | None
) -> None:
    shop = project(tmp_path, "one: x", one=text)
    (tmp_path / "pipelines/one/shared.py").write_text(ITEMS)
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils/__init__.py").write_text(
        "from pipelines.one.shared import run\ndef plain(df): ...\n"
    )
    [pipeline] = shop.pipelines
    assert takes_items(shop, pipeline) is (items is True)
    told = "none of its" if items is False else "pipelines/one/step.py would have to be executed"
    if not items:
        assert why_no_items(shop, pipeline).startswith(told)


def test_a_file_that_is_missing_takes_no_items(tmp_path: Path) -> None:
    shop = project(tmp_path, "one: x")
    shop.transformation_file("one", "step").unlink()
    assert not takes_items(shop, shop.pipelines[0])


# --- registration -------------------------------------------------------------------------------


def test_registering_again_writes_nothing(store: Store, tmp_path: Path) -> None:
    shop = project(tmp_path, "raw: orders > clean", "sums: clean > sums")
    plans = register(store, shop)
    before = everything(store)

    assert plans == plans_of(shop)
    assert store.read_plan("sums") == plans["sums"]
    register(store, shop)
    register(store, shop, "sums")
    assert everything(store) == before


def test_only_the_requested_pipeline_is_registered(store: Store, tmp_path: Path) -> None:
    shop = project(tmp_path, "raw: orders > clean", "sums: clean > sums")
    plans = register(store, shop, "sums")

    assert plans.keys() == {"raw", "sums"}
    assert store.read_plan("raw").outputs == ()
    with pytest.raises(Refused, match="There is no pipeline 'other'"):
        register(store, shop, "other")


def test_a_downstream_pipeline_may_run_what_was_made_before_it_was_there(
    store: Store, tmp_path: Path
) -> None:
    register(store, project(tmp_path, "raw: orders > clean"))
    put(store, "clean", "run-1", jobid="raw")
    register(store, project(tmp_path, "raw: orders > clean", "sums: clean > sums"))

    assert [claim.dataid for claim in take(store, "sums")] == ["run-1"]


def test_a_source_becomes_an_input_once_another_job_writes_it(store: Store, tmp_path: Path) -> None:
    shop = project(tmp_path, "sums: loaded plain > sums")
    assert register(store, shop)["sums"].inputs == ()
    register_job(store, "loader", [], ["loaded"])

    assert register(store, shop)["sums"].inputs == ("loaded",)
    store._plans.clear()
    assert store.read_plan("sums").inputs == ("loaded",)


def test_a_changed_project_changes_its_jobs_and_keeps_what_people_added(
    store: Store, tmp_path: Path
) -> None:
    register(store, project(tmp_path, "raw: orders > clean", "sums: clean > sums"))
    put(store, "sums", "1", jobid="sums")
    register_job(store, "sums", COLOUR="red")
    register(store, project(tmp_path, "raw: orders > clean", "sums: products > totals"))

    found = store.read_plan("sums")
    assert (found.inputs, found.outputs) == ((), ("totals",))
    assert dict(found.environment) == {MARK: "Shop", "COLOUR": "red"}


def test_nothing_is_taken_from_a_job_while_it_runs(store: Store, tmp_path: Path) -> None:
    register(store, project(tmp_path, "raw: orders > clean"))
    put(store, "clean", "1", "PENDING", jobid="raw")
    take(store, "raw")
    with pytest.raises(Refused, match="is running on 1 chunk"):
        register(store, project(tmp_path, "raw: orders > other"))


def test_a_job_of_another_kind_keeps_its_name(store: Store, tmp_path: Path) -> None:
    register_job(store, "daily", ["bobin"], ["bobout"])
    put(store, "bobout", "1", jobid="daily")
    before = everything(store)

    with pytest.raises(Refused) as refused:
        register(store, project(tmp_path, "daily: orders > sales"))
    assert str(refused.value) == (
        "Pipeline 'daily' of 'Shop' can't be a job: a job that isn't a pipeline has that name; "
        "it reads bobin and writes bobout. Give the pipeline another slug; "
        "`odf job list daily` shows that job."
    )
    assert everything(store) == before


def test_a_pipeline_of_another_project_keeps_its_name(store: Store, tmp_path: Path) -> None:
    register(store, project(tmp_path, "daily: orders > sales"))
    with pytest.raises(Refused, match="a job of project 'Shop'"):
        register(store, project(tmp_path, "daily: orders > other", name="Garden"))


def test_a_job_with_the_same_datasets_becomes_the_pipelines(store: Store, tmp_path: Path) -> None:
    register_job(store, "daily", [], ["sales"])
    register(store, project(tmp_path, "daily: orders > sales"))
    assert dict(store.read_plan("daily").environment) == {MARK: "Shop"}


def test_an_invalid_declaration_holds_up_no_other(store: Store, tmp_path: Path) -> None:
    shop = project(tmp_path, "good: x > y", "bad: x > y2")
    text = (tmp_path / "project.yml").read_text()
    (tmp_path / "project.yml").write_text(text.replace("destination: y2", "destination: [y2]"))
    shop = read_project(tmp_path)

    assert register(store, shop).keys() == {"good"}
    with pytest.raises(ProjectError, match="`destination` is a list"):
        register(store, shop, "bad")


@pytest.mark.parametrize("slug", ["a'b; drop table job", "naïve 数", "100%", "x" * 200])
def test_odd_slugs_are_jobs_too(store: Store, tmp_path: Path, slug: str) -> None:
    (tmp_path / "project.yml").write_text(
        f'pipelines:\n  - slug: "{slug}"\n    transformations: [step]\n'
    )
    register(store, read_project(tmp_path))
    assert store.read_plan(slug).outputs == (slug,)


@pytest.mark.parametrize("slug", ["a=b", "x" * (MAX_ID_BYTES + 1), "split", "today"])
def test_invalid_slugs_are_refused_in_one_line(store: Store, tmp_path: Path, slug: str) -> None:
    (tmp_path / "project.yml").write_text(
        f'pipelines:\n  - slug: "{slug}"\n    transformations: [step]\n'
    )
    with pytest.raises(WrongUse):
        register(store, read_project(tmp_path), slug)
