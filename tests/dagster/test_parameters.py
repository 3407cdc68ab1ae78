"""What a function may take besides its chunk; unknown parameters are refused at load."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from opendataflow_dagster import (
    Chunk,
    DataflowResource,
    Flow,
    Job,
    Result,
    build_definitions,
    dataflow_assets,
)
from opendataflow_dagster.errors import DataflowError, WrongUse
from opendataflow_dagster.store.overview import facts, truths


class Api(dg.ConfigurableResource):
    url: str = "https://nowhere.invalid"


class Scale(dg.Config):
    factor: int = 2


def assets_of(fn: Callable[..., Any], **options: Any) -> dg.AssetsDefinition:
    return dataflow_assets(inputs=["sales"], outputs=["total"], **options)(fn)


def test_a_function_is_given_config_resources_and_the_context() -> None:
    told = []

    def total(
        chunk: Chunk,
        context: dg.AssetExecutionContext,
        config: Scale,
        api: Api,
        motto: dg.ResourceParam[str],
        dataflow: DataflowResource,
        rounds: int = 1,
    ) -> Result:
        told.append((config.factor, api.url, motto, dataflow.store.version, rounds))
        return Result(rows=config.factor, metadata={"run": context.run.run_id})

    tables = DataflowResource.ephemeral(ready={"sales": ["1", "2"]})
    given = {"api": Api(url="https://here.invalid"), "motto": "hear"}
    made = assets_of(total, required_resource_keys={"more"})
    for key, factor in (("1", 2), ("2", 5)):
        config = {"ops": {"total": {"config": {"factor": factor}}}} if factor != 2 else None
        done = tables.materialize([made], key, resources=given | {"more": "m"}, run_config=config)
        assert done.success
    assert told == [(n, "https://here.invalid", "hear", tables.store.version, 1) for n in (2, 5)]
    with pytest.raises(dg.DagsterInvalidConfigError, match="factr"):
        tables.materialize(
            [made],
            "2",
            resources=given | {"more": "m"},
            run_config={"ops": {"total": {"config": {"factr": 1}}}},
        )
    with pytest.raises(dg.DagsterInvalidDefinitionError, match="'api'"):
        tables.materialize([made], "2", resources={"motto": "", "more": ""})


def test_the_parameters_may_be_in_any_order() -> None:
    seen = []

    def total(context, api: Api, chunk, *, config: Scale) -> None:  # type: ignore[no-untyped-def]
        seen.append((chunk.dataid, context.partition_key, api.url, config.factor))

    tables = DataflowResource.ephemeral(ready={"sales": ["1"]})
    assert tables.materialize([assets_of(total)], "1", resources={"api": Api()}).success
    assert seen == [("1", "1", "https://nowhere.invalid", 2)]


def config_of_another_name(chunk: Chunk, scale: Scale) -> None: ...
def config_without_class(chunk: Chunk, config: dict) -> None: ...
def unknown_text(chunk: Chunk, api: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def by_position(chunk: Chunk, context: dg.AssetExecutionContext, /) -> None: ...


@pytest.mark.parametrize(
    ("fn", "line"),
    [
        (lambda: None, "takes no chunk. It may take"),
        (lambda context: None, "takes no chunk. It may take"),
        (
            lambda chunk, warehouse: None,
            "has a parameter 'warehouse' that nothing provides. It may",
        ),
        (lambda chunk, *, other: None, "has a parameter 'other' that nothing provides"),
        (config_without_class, "has a parameter 'config' that nothing provides. It may take"),
        (config_of_another_name, "is a Scale, which is a dg.Config. Name it `config`."),
        (unknown_text, "has a parameter 'api' that nothing provides"),
        (by_position, "gets 'context' by name"),
    ],
)
def test_a_parameter_that_nothing_provides_is_refused_at_load(
    fn: Callable[..., Any], line: str
) -> None:
    for load in (
        lambda: assets_of(fn),
        lambda: build_definitions(
            flow=Flow("shop", jobs=[Job("total", inputs=["sales"], outputs=["total"])]),
            functions={"total": fn},
        ),
    ):
        with pytest.raises(WrongUse) as refusal:
            load()
        assert line in str(refusal.value)
        assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("fn", [lambda _: None, lambda chunk, _: None, lambda *parts: None])
def test_functions_of_earlier_versions_stay_valid(fn: Callable[..., Any]) -> None:
    tables = DataflowResource.ephemeral(ready={"sales": ["1"]})
    assert tables.materialize([assets_of(fn, name="step")], "1").success


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"poool": "few"}, "There is no option 'poool' .* Did you mean 'pool'"),
        ({"kinds": "python"}, "Option 'kinds' .* must be a set of names"),
        ({"config_schema": {"a": int}, "fn": "config"}, "Leave out config_schema"),
    ],
)
def test_a_wrong_option_is_refused_at_load(options: dict[str, Any], line: str) -> None:
    def plain(chunk: Chunk) -> None: ...
    def with_config(chunk: Chunk, config: Scale) -> None: ...

    fn = with_config if options.pop("fn", "") else plain
    with pytest.raises(WrongUse, match=line):
        assets_of(fn, **options)


def test_the_code_version_is_evidence_of_the_chunk() -> None:
    tables = DataflowResource.ephemeral(ready={"sales": ["1"]})
    done = tables.materialize([assets_of(lambda chunk: None, name="step", code_version="7")], "1")
    [event] = done.get_asset_materialization_events()
    assert event.materialization.tags["dagster/code_version"] == "7"
    record = facts(tables.store, "total", truths(tables.store, "total", ["1"]))["1"]
    assert re.fullmatch(r"version:7 (git:\w+ )?file:\w+", record["code"])


# --- options of jobs that functions, scripts and a flow run ---------------------------------------


def shop(tmp_path: Path) -> Flow:
    script = tmp_path / "load.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return Flow(
        "shop",
        jobs=[
            Job("load", inputs=["sales"], outputs=["loaded"], run=str(script)),
            Job("total", inputs=["loaded"], outputs=["total"]),
            Job("late", inputs=["loaded"], outputs=["later"]),
        ],
    )


def test_options_are_given_by_job_to_functions_scripts_and_a_flow(tmp_path: Path) -> None:
    defs = build_definitions(
        flow=shop(tmp_path),
        functions={"total": lambda chunk: None},
        scripts={"late": "true"},
        options={
            "load": {"pool": "few", "op_tags": {"size": "big"}},
            "total": {"retry_policy": dg.RetryPolicy(max_retries=2), "code_version": "3"},
            "late": {"kinds": {"shell"}, "group_name": "slow"},
        },
    )
    load, total, late = (defs.resolve_assets_def(key) for key in ("loaded", "total", "later"))
    assert (load.op.pool, load.op.tags) == ("few", {"size": "big"})
    assert total.op.retry_policy == dg.RetryPolicy(max_retries=2)
    assert [spec.code_version for spec in total.specs] == ["3"]
    [spec] = late.specs
    assert (spec.group_name, spec.kinds >= {"shell"}) == ("slow", True)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"totl": {}}, "'totl', which no function or script here runs. Did you mean 'total'"),
        ({"total": {}}, "'total', which no function or script here runs"),
        ({"own": {}}, "'own', run by the assets of @dataflow_assets. Give them to @data"),
        ({"load": {"retries": 3}}, "There is no option 'retries' for the assets of job 'load'"),
        ({"load": {"config_schema": {"a": int}}}, "'load' can't receive a config"),
    ],
)
def test_options_for_nothing_are_refused_at_load(
    tmp_path: Path, options: dict[str, Any], line: str
) -> None:
    @dataflow_assets(inputs=["sales"], outputs=["mine"])
    def own(chunk: Chunk) -> None: ...

    with pytest.raises(DataflowError, match=line):
        build_definitions(flow=shop(tmp_path), assets=[own], options=options)
    with pytest.raises(WrongUse, match=r"no parameter 'automatik'\. Did you mean 'automatic'"):
        build_definitions(flow=shop(tmp_path), automatik=True)  # type: ignore[call-arg]
