"""OpenDataFlow in YAML: the arguments of `build_definitions` as attributes of a component."""

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import dagster as dg
from dagster.components import DefsStateConfig, DefsStateConfigArgs, ResolvedDefsStateConfig

from ..config.settings import redact
from ..errors import NoDatabase, WrongUse
from ..flow.flow import Flow
from ..pipelines.project import find_project, read_project
from ..store.catalog import Catalog, CatalogDataset
from ..util.system import module_of_file
from ..util.text import first_line
from .build import ALL, build_definitions
from .job_assets import JobOptions
from .location import SharedTables
from .pipeline_assets import Projects, tables_of
from .resources import DataflowResource
from .translator import DataflowTranslator

# Components on the same tables share their state on purpose: it is what is registered there.
warnings.filterwarnings("ignore", "Multiple components have the same defs state key: OpenDataFlow")

DEV_VARIABLE = "DAGSTER_IS_DEV_CLI"
"""Set where `dg dev` or `dagster dev` loads a location, which then writes its state itself."""

_log = logging.getLogger("opendataflow_dagster")

SCAFFOLD = """\
# OpenDataFlow: every dataset is an asset and every chunk a partition, as the tables say.
# `dg utils refresh-defs-state` reads the registrations again; `dg dev` does so at each start.
type: {type}

attributes:
  # Where the tables are. Without it: what `odf` would use here (DATAFLOW_URL, the file
  # dataflow.properties, or SQLite in ./.dataflow). Keep passwords out of this file.
  # url: "{{{{ env.DATAFLOW_URL }}}}"
  # config: dataflow.properties

  # A flow.yml, whose datasets and jobs are shown instead of the tables': no database is read.
  # flow: ../flow.yml

  # What runs the jobs: a script for each job, or a folder with scripts named like their jobs.
  # Paths are relative to this file.
  # scripts:
  #   loadbob: ./loadbob.sh
  #   extract: [./extract.py, --fast]

  # Python functions by job: `def fn(chunk)`, or a function of Spark DataFrames, in a module of this
  # project, or in a file beside this one (`./reports.py:report`).
  # functions:
  #   report: my_project.reports.report

  # Dagster's options for the step of a job that a script or a function runs.
  # options:
  #   report:
  #     pool: few
  #     retry_policy: {{max_retries: 3, delay: 30}}

  # A folder with a project.yml, or several: each pipeline becomes an asset with a step for each
  # transformation. Without `url` and `config`, the tables are those of `odf pipeline run`.
  # project: ../shop

  # Settings of the Spark session for functions and pipelines; they override dataflow.properties.
  # spark:
  #   spark.master: local[4]

  # How datasets look. In templates `data` is the dataset, as in {{{{ data.datasetid }}}} or
  # {{{{ data.columns.hostname }}}}.
  # translation:
  #   key_prefix: flow
  #   group_name: sales
  #   tags: {{team: data}}

  # The reconcile sensor keeps the grid equal to the tables. The sensor and the schedules that
  # launch runs are off until you switch them on in the UI, or here with `automatic: true`.
  sensors: true
  schedules: true
  automatic: false

  # Jobs with which a person resubmits, holds or releases chunks in the launchpad.
  operators: true
"""


class Scaffolder(dg.Scaffolder):
    """Writes a defs.yaml that works unchanged and explains the other attributes."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        if request.scaffold_format != "yaml":
            dg.scaffold_component(request)
            return
        path = request.target_path if request.append else request.target_path / "defs.yaml"
        text = SCAFFOLD.format(type=request.type_name)
        with open(path, "a" if request.append else "w", encoding="utf-8") as file:
            file.write(f"---\n{text}" if request.append else text)


class Translation(dg.Model, dg.Resolvable):
    """What should differ from the translator's defaults; texts may be templates."""

    key: str | None = None
    key_prefix: str | list[str] | None = None
    group_name: str | None = None
    description: str | None = None
    owners: list[str] | None = None
    kinds: list[str] | None = None
    tags: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class Retries(dg.Model):
    """A `RetryPolicy`."""

    max_retries: int = 1
    delay: float | None = None
    backoff: Literal["linear", "exponential"] | None = None
    jitter: Literal["full", "plus_minus"] | None = None


class StepOptions(dg.Model):
    """Dagster's options for a job's step and assets: the `JobOptions` that YAML can express."""

    pool: str | None = None
    op_tags: dict[str, Any] | None = None
    code_version: str | int | float | None = None
    group_name: str | None = None
    description: str | None = None
    kinds: list[str] | None = None
    retry_policy: Retries | None = None


def _options(context: dg.ResolutionContext, given: Any) -> dict[str, JobOptions] | None:
    return given and {jobid: _job_options(context, model) for jobid, model in given.items()}


def _job_options(context: dg.ResolutionContext, model: Any) -> JobOptions:
    """Return the options of one job."""
    fields = dict(context.resolve_value(model.model_dump(exclude_none=True)))
    if "kinds" in fields:
        fields["kinds"] = set(fields["kinds"])
    if "code_version" in fields:  # YAML reads 3 as a number
        fields["code_version"] = str(fields["code_version"])
    if retries := fields.get("retry_policy"):
        words = {"backoff": dg.Backoff, "jitter": dg.Jitter}
        named = {name: words[name][retries[name].upper()] for name in words if name in retries}
        fields["retry_policy"] = dg.RetryPolicy(**retries | named)
    return cast("JobOptions", fields)


Translate = Callable[[dg.AssetSpec, CatalogDataset, frozenset[str]], dict[str, Any]]
"""Returns the values of some fields of a translation, for a dataset."""

KEYS = frozenset({"key", "key_prefix"})
LOOKS = frozenset(Translation.model_fields) - KEYS
TEXTS = ("key", "group_name", "description")


def _translation(context: dg.ResolutionContext, model: Any) -> Translate | None:
    if model is None:
        return None
    fields = model.model_dump(exclude_unset=True)

    def translate(
        spec: dg.AssetSpec, dataset: CatalogDataset, wanted: frozenset[str]
    ) -> dict[str, Any]:
        raw = {name: value for name, value in fields.items() if name in wanted}
        scope = context.at_path("translation").with_scope(data=dataset, spec=spec)
        values = dict(scope.resolve_value(raw))
        # A template that renders 2024 gives a number.
        values |= {name: str(values[name]) for name in TEXTS if values.get(name) is not None}
        if values.get("tags"):
            values["tags"] = {name: str(value) for name, value in values["tags"].items()}
        if values.get("kinds"):
            values["kinds"] = set(values["kinds"])
        return values

    return translate


def _paths(context: dg.ResolutionContext, given: Any) -> Any:
    """Resolve paths relative to their YAML file: those with a slash, or of a folder or file."""
    folder = dg.ComponentLoadContext.from_resolution_context(context).path
    value = context.resolve_value(given)
    if isinstance(value, str):
        return os.path.join(folder, os.path.expanduser(value))
    if isinstance(value, Mapping):
        return {jobid: _program(folder, script) for jobid, script in value.items()}
    return value


def _folders(context: dg.ResolutionContext, given: Any) -> list[str] | None:
    """Return folders of projects, with paths relative to the YAML file."""
    value = context.resolve_value(given)
    if value is None:
        return None
    folder = dg.ComponentLoadContext.from_resolution_context(context).path
    named = [value] if isinstance(value, str) else value
    return [os.path.normpath(os.path.join(folder, os.path.expanduser(path))) for path in named]


def _program(folder: Path, script: str | list[str]) -> list[str]:
    """Return a program and its arguments; a bare name is looked up in PATH, as `odf run` does."""
    program, *arguments = [script] if isinstance(script, str) else script
    if "/" in program:
        program = os.path.join(folder, os.path.expanduser(program))
    return [program, *arguments]


def _function(context: dg.ResolutionContext, name: str) -> Callable[..., Any]:
    """Return a function by its dotted name, or as `module:function` or `path/file.py:function`.

    Names that begin with a dot, and relative paths, are relative to the YAML file.
    """
    value = context.resolve_value(name, as_type=str)
    module, _, attribute = value.rpartition(":" if ":" in value else ".")
    if not module:
        raise WrongUse(f"{name!r} names no function. Write it as package.module.function.")
    loading = dg.ComponentLoadContext.from_resolution_context(context)
    if module.endswith(".py"):
        path = os.path.join(loading.path, os.path.expanduser(module))
        if not os.path.isfile(path):
            raise WrongUse(f"There is no file {path}. Correct the path in the YAML file.")
        module = module_of_file(path)
    elif module.startswith("."):
        folders = loading.path.relative_to(loading.defs_module_path).parts
        module = ".".join([loading.defs_module_name, *folders, module[1:]])
    found = getattr(importlib.import_module(module), attribute, None)
    if found is None:
        raise WrongUse(f"Module {module} has no {attribute!r}. Correct the name in the YAML file.")
    return found


class YamlTranslator(DataflowTranslator):
    """The names and looks that a YAML file sets."""

    def __init__(self, translate: Translate) -> None:
        self._translate = translate
        self._keys: dict[str, dg.AssetKey] = {}

    def asset_key(self, datasetid: str) -> dg.AssetKey:
        if datasetid not in self._keys:
            key = super().asset_key(datasetid)
            # The mirror asks for keys of datasets that it knows only by id.
            values = self._translate(dg.AssetSpec(key), CatalogDataset(datasetid, {}), KEYS)
            if values.get("key"):
                key = dg.AssetKey.from_user_string(values["key"])
            if values.get("key_prefix"):
                key = key.with_prefix(values["key_prefix"])
            self._keys[datasetid] = key
        return self._keys[datasetid]

    def spec(self, catalog: Catalog, datasetid: str, jobid: str | None) -> dg.AssetSpec:
        spec = super().spec(catalog, datasetid, jobid)
        values = self._translate(spec, catalog.datasets[datasetid], LOOKS)
        tags, metadata = values.pop("tags", None) or {}, values.pop("metadata", None) or {}
        return spec.replace_attributes(**values).merge_attributes(tags=tags, metadata=metadata)


@dg.scaffold_with(Scaffolder)
class OpenDataFlowComponent(dg.StateBackedComponent, dg.Model, dg.Resolvable):
    """The datasets and jobs of a flow.yml, or of OpenDataFlow's tables, as assets.

    The registrations in the tables are kept as state, so that a reload needs no database.

    Example:
        # defs.yaml
        type: opendataflow_dagster.OpenDataFlowComponent
        attributes:
          flow: ../flow.yml
    """

    url: str | None = None
    schema_name: str | None = None
    user: str | None = None
    config: Annotated[
        str | None,
        dg.Resolver(
            _paths, model_field_type=str | None, description="The path of dataflow.properties."
        ),
    ] = None
    timezone: str | None = None
    flow: Annotated[
        str | None,
        dg.Resolver(
            _paths,
            model_field_type=str | None,
            description="A flow.yml, whose datasets and jobs are shown instead of the tables'.",
        ),
    ] = None
    apply: bool | None = None
    scripts: Annotated[
        str | dict[str, str | list[str]] | None,
        dg.Resolver(
            _paths,
            model_field_type=str | dict[str, str | list[str]] | None,
            description="A folder of scripts; or by job, the script (and arguments) that runs it.",
        ),
    ] = None
    functions: Annotated[
        dict[str, Callable[..., Any]] | None,
        dg.Resolver(
            lambda context, given: (
                given and {jobid: _function(context, name) for jobid, name in given.items()}
            ),
            model_field_type=dict[str, str] | None,
            description="By job, the function that produces its chunks.",
        ),
    ] = None
    options: Annotated[
        dict[str, Any] | None,
        dg.Resolver(
            _options,
            model_field_type=dict[str, StepOptions] | None,
            description="By job, Dagster's options for its step: pool, retry_policy and others.",
        ),
    ] = None
    project: Annotated[
        str | list[str] | None,
        dg.Resolver(
            _folders,
            model_field_type=str | list[str] | None,
            description="Folders with a project.yml, whose pipelines become assets.",
        ),
    ] = None
    spark: dict[str, Any] | None = None
    jobs: list[str] | None = None
    elsewhere: list[str] | None = None
    translation: Annotated[
        Callable[..., Any] | None,
        dg.Resolver(
            _translation,
            model_field_type=Translation | None,
            inject_before_resolve=False,
            description="Names and looks of the datasets; `data` is the dataset in templates.",
        ),
    ] = None
    sensors: bool = True
    schedules: bool = True
    operators: bool = True
    automatic: bool = False
    runs_per_job: int = 1
    batch: int = 500
    defs_state: ResolvedDefsStateConfig = DefsStateConfigArgs.local_filesystem()

    @property
    def defs_state_config(self) -> DefsStateConfig:
        # Short, and equal on every machine.
        where = "/".join((redact(self.url or "") or self.config or "here").split("/")[-2:])
        if self.schema_name:
            where += f"#{self.schema_name}"
        if self.flow is not None:  # a flow needs no state, and mustn't overwrite the tables'
            where += ", flow"
        return DefsStateConfig.from_args(
            self.defs_state, default_key=f"OpenDataFlowComponent[{where}]"
        )

    def write_state_to_path(self, state_path: Path) -> None:
        """Write what is registered; if the database is away, keep what was written before.

        A flow needs no state: its declarations are read at each load.
        """
        if self.flow is not None:
            state_path.write_text("{}", encoding="utf-8")
            return
        try:
            dataflow = self._dataflow(make=True)
            if self._projects:
                projects = Projects(self._projects)
                projects.known_to(dataflow.catalog())
                projects.register(dataflow)
            text = dataflow.catalog().to_json()
        except NoDatabase as error:
            if state_path.exists():
                _log.warning("Showing what was registered before: %s.", first_line(error))
            elif os.environ.get(DEV_VARIABLE):  # without a state, the location loads with a warning
                state_path.write_text("", encoding="utf-8")
            else:
                raise
            return
        state_path.write_text(text, encoding="utf-8")

    def build_defs_from_state(
        self, context: dg.ComponentLoadContext, state_path: Path | None
    ) -> dg.Definitions:
        """Build from the flow or from the state; if no state was ever written, from the tables."""
        same = self._same_tables(context)
        is_first = next(iter(same), self) is self
        state = (
            None if self.flow is not None or state_path is None else state_path.read_text("utf-8")
        )
        return build_definitions(
            self._dataflow(),
            flow=self.flow,
            apply=self.apply,
            catalog=Catalog.from_json(state) if state else None,
            scripts=self.scripts,
            functions=self.functions,
            options=self.options or {},
            jobs=self.jobs,
            elsewhere=self._elsewhere(same),
            projects=self._projects,
            pyspark=self._pyspark(),
            translator=YamlTranslator(self.translation) if self.translation else None,
            sensors=is_first and any(each.sensors for each in same),
            schedules=self.schedules,
            operators=is_first and any(each.operators for each in same),
            automatic=any(each.automatic for each in same),
            runs_per_job=self.runs_per_job,
            batch=self.batch,
        )

    def _same_tables(self, context: dg.ComponentLoadContext) -> "list[OpenDataFlowComponent]":
        """Return the components of the project on the same tables, including this one.

        Dagster copies the sensors of each component, so two copies would share a name: the first
        component has them for all.
        """
        found = context.component_tree.get_all_components(OpenDataFlowComponent)
        if len({id(SharedTables.of(each._dataflow())) for each in [self, *found]}) > 1:
            raise WrongUse(
                "Components of this project name different tables, by url, schema_name, user, "
                "config or timezone. A code location uses one database: put the others into "
                "separate code locations."
            )
        return found

    def _elsewhere(self, same: "Sequence[OpenDataFlowComponent]") -> set[str]:
        """What is shown elsewhere: by this file's own word, by other jobs, or earlier here."""
        others = [other for other in same if other is not self]
        found = {name for other in others for name in other._makes()} | {*(self.elsewhere or ())}
        for earlier in takewhile(lambda other: other is not self, same):
            found |= earlier._shows()
        return found

    def _shows(self) -> set[str]:
        """Return the external datasets that this component shows."""
        if self.flow is None:
            return {ALL}
        flow = Flow.load(self.flow)
        links = {name for job in flow.jobs for name in (*job.inputs, *job.outputs)}
        return links | {dataset.datasetid for dataset in flow.datasets}

    def _makes(self) -> set[str]:
        """Return the jobs that this component runs, and the datasets that its flow's jobs write."""
        made = {*(self.functions or ())}
        if isinstance(self.scripts, str):
            made |= {os.path.splitext(name)[0] for name in os.listdir(self.scripts)}
        else:
            made |= {*(self.scripts or ())}
        if self.flow is not None:
            for job in Flow.load(self.flow).jobs:
                if job.run or job.python or job.spark or job.pipeline:
                    made |= {job.jobid, *job.outputs}
        projects = [read_project(find_project(folder)) for folder in self._projects]
        return made | {pipeline.slug for project in projects for pipeline in project.pipelines}

    def _pyspark(self) -> Any:
        if not self.spark:
            return None
        from .spark_resource import SparkResource  # imports pyspark, which takes 0.5 s

        return SparkResource(spark_config=self.spark, config=self.config)

    @property
    def _projects(self) -> list[str]:
        return [self.project] if isinstance(self.project, str) else self.project or []

    def _dataflow(self, *, make: bool = False) -> DataflowResource:
        if self._projects and not (self.url or self.config or self.user or self.schema_name):
            return tables_of(self._projects[0], make=make, timezone=self.timezone)
        return DataflowResource(
            url=self.url,
            schema_=self.schema_name,
            user=self.user,
            config=self.config,
            timezone=self.timezone,
        )
