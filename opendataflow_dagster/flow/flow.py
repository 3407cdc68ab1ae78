"""A flow: datasets and jobs as code, from flow.yml or Python, and the tables it is meant for."""

import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from ..config.settings import KEYS, Settings, load_settings
from ..errors import FlowError, WrongUse
from ..location import place_of
from ..model import DATASET_COLUMNS, DIALS, check_id, check_text
from ..store import open_from
from ..store.registry import (
    check_columns,
    check_links,
    circle_of_jobs,
    dial_value,
    has_password,
    job_items,
)
from ..store.store import Store
from ..util.text import did_you_mean, printable, typed
from .file import (
    ENGINES,
    FILE,
    RUNNERS,
    RUNS_IN,
    TARGET_KEYS,
    FlowFile,
    Item,
    parse_file,
    read_file,
)

_Made = TypeVar("_Made")

_VARIABLE = re.compile(r"\$(?:(\$)(?=\{)|\{([A-Za-z_][A-Za-z0-9_]*)\})")
EXPANDED = ("hostname", "database", "schemaname", "tablename", "username")
"""The columns in which `${NAME}` stands for a variable of the environment."""


CARRIED = "dataflow_flow"
"""The attribute of Dagster's definitions that has the flow which they were built from."""


def origin_of(flow: str) -> str:
    """What the rows of a flow carry."""
    return f"flow:{flow}"


@dataclass(frozen=True)
class Dataset:
    """Data with a place.

    Args:
        datasetid: Its id.
        hostname: The machine or the folder that it is on. This and the next ones are columns of the
            table `dataset`. In a place, `${NAME}` stands for an environment variable, and `$${` for
            `${`.
        password: The environment variable with the password, as `${NAME}`.
        encryptedpass: Instead, the password as `odf encrypt --dataset` printed it.
        options: How CSV files written by others are formatted, as a mapping.
        expect: What must hold before a chunk is READY: `exists`, and `rows` with `min` and `max`.
            This and the next three aren't written to the tables.
        description: What it is, for people.

    Raises:
        FlowError: The password is written out, or another value isn't valid.

    Example:
        Dataset("sales", hostname="/data/sales", format="csv")
    """

    datasetid: str
    _: KW_ONLY
    hostname: str | None = None
    database: str | None = None
    schemaname: str | None = None
    tablename: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    encryptedpass: str | None = field(default=None, repr=False)
    format: str | None = None
    chunkcolumn: str | None = None
    domain: str | None = None
    writemode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    expect: Mapping[str, Any] = field(default_factory=dict)
    description: str | None = None
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    where: str = field(default="", compare=False, repr=False)
    """The file and line of the dataset."""

    def __post_init__(self) -> None:
        _set_tuples(self, "owners")
        if self.password is not None and not _is_reference(self.password):
            raise FlowError(
                f"The password of dataset {self.datasetid!r} is in the file, where everyone can "
                "read it. Write password: ${NAME} and set that variable, or encryptedpass: "
                f"with the output of `odf encrypt --dataset {typed(self.datasetid)}`.",
                key="password",
            )
        if self.password and self.encryptedpass:
            raise FlowError(
                f"Dataset {self.datasetid!r} has both password and encryptedpass. Remove one.",
                key="password",
            )
        _refuse_wrong_row(self.datasetid, self.raw_columns())
        _refuse_wrong_expect(self)

    def raw_columns(self) -> dict[str, str | None]:
        """The columns of its row as they are written, with None for an empty text."""
        row = {name: getattr(self, name) or None for name in DATASET_COLUMNS}
        row["options"] = json.dumps(dict(self.options)) if self.options else None
        return row

    def columns(self, environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
        """The columns of its row, with variables of the environment in the places."""
        row = self.raw_columns()
        try:
            for name in EXPANDED:
                row[name] = expand(row[name] or "", environ) or None
            _refuse_wrong_row(self.datasetid, row)
        except FlowError as error:
            raise self._located(error) from None
        return row

    def secret(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The password that the environment has for it; None if it names no variable."""
        try:
            return None if self.password is None else expand(self.password, environ)
        except FlowError as error:
            raise self._located(error) from None

    def _located(self, error: FlowError) -> FlowError:
        where = self.where or f"Dataset {self.datasetid!r}"
        return FlowError(f"{where}: {error}", key=error.key)


@dataclass(frozen=True)
class Job:
    """A job: what it reads and writes, and what runs it.

    Args:
        jobid: Its id.
        inputs: The datasets that it reads; `today` stands for the current date.
        outputs: The datasets that it writes.
        run: The script that produces a chunk, and its arguments; or one of the next three.
        python: The Python function that produces a chunk, as `FILE.py:FUNCTION`.
        spark: The function of DataFrames that produces chunks, as `FILE.py:FUNCTION`.
        pipeline: The folder of the project whose pipeline has the job's name.
        engine: What runs that pipeline, `spark` or `local`; by default, what its project.yml says.
        policy: The dials that the flow sets; `odf policy` sets the others.
        environment: Variables for its script.
        runs_in: Who starts it: `work`, `dagster` or `cron`.
        description: What it is, for people. This and the next two aren't written to the tables.

    Raises:
        FlowError: The job has no output, or another value isn't valid.

    Example:
        Job("check", inputs=["sales"], outputs=["checked"], run="./check.sh")
    """

    jobid: str
    _: KW_ONLY
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    run: str | None = None
    python: str | None = None
    spark: str | None = None
    pipeline: str | None = None
    engine: str | None = None
    policy: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    runs_in: str | None = None
    description: str | None = None
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    where: str = field(default="", compare=False, repr=False)
    """The file and line of the job."""

    def __post_init__(self) -> None:
        _set_tuples(self, "inputs", "outputs", "owners")
        object.__setattr__(self, "policy", {key: str(value) for key, value in self.policy.items()})
        self._refuse_wrong_items()
        given = [name for name in RUNNERS if getattr(self, name) is not None]
        if len(given) > 1:
            raise FlowError(
                f"Job {self.jobid!r} has both {given[0]} and {given[1]}. Remove one.",
                key=given[1],
            )
        for key, choices in (("runs_in", RUNS_IN), ("engine", ENGINES)):
            if (value := getattr(self, key)) not in (None, *choices):
                raise FlowError(
                    f"{key} of job {self.jobid!r} is {value!r}. Use one of {', '.join(choices)}.",
                    key=key,
                )
        if self.engine and self.pipeline is None:
            raise FlowError(
                f"Job {self.jobid!r} has an engine but no pipeline. Remove engine.",
                key="engine",
            )
        self._refuse_wrong_runner()
        check_policy(f"job {self.jobid!r}", self.policy)

    @property
    def items(self) -> set[tuple[str, str | None, str | None]]:
        """The rows of the table `job`: itemtype, datasetid, itemvalue."""
        return set(job_items(self.jobid, self.inputs, self.outputs, self.environment))

    def words(self) -> list[str]:
        """The script and its arguments, as a shell would split them."""
        return shlex.split(self.run or "")

    def _refuse_wrong_items(self) -> None:
        check_id("jobid", self.jobid)
        if not self.outputs:
            raise FlowError(
                f"Job {self.jobid!r} has no output, so nothing could record which chunks it has "
                "done. Give it one: out: [DATASET]."
            )
        check_links(self.jobid, {(item[0], item[1]) for item in self.items if item[1]})

    def _refuse_wrong_runner(self) -> None:
        for name in RUNNERS:
            value = getattr(self, name)
            check_text(f"value of {name}", value)
            if value is not None and not value.strip():
                raise FlowError(f"{name} of job {self.jobid!r} is empty. Remove it.", key=name)
            if name in ("python", "spark") and value and not re.fullmatch(r"[^:]+:\w+", value):
                raise FlowError(
                    f"{name} of job {self.jobid!r} is {value!r}. Write FILE.py:FUNCTION.", key=name
                )
        try:
            is_command = self.run is None or bool(self.words())
        except ValueError:
            is_command = False
        if not is_command:
            raise FlowError(
                f"run of job {self.jobid!r} isn't a command: a quote isn't closed, or it is "
                "only a comment. Correct it.",
                key="run",
            )


@dataclass(frozen=True)
class Flow:
    """The datasets and jobs of a project, under one name.

    Args:
        name: Its registrations carry this name, so that several flows may share a database.
        datasets: Its datasets.
        jobs: Its jobs; what they read and write needn't be among `datasets`.
        targets: Databases by name: `{"prod": {"properties": "prod.properties"}}`.
        file: The file that it was read from; paths are relative to its folder.

    Raises:
        FlowError: A declaration isn't valid, or two of them contradict each other.

    Example:
        Flow("shop", datasets=[Dataset("sales", hostname="/data/sales")],
             jobs=[Job("check", inputs=["sales"], outputs=["checked"], run="./check.sh")])
    """

    name: str
    _: KW_ONLY
    datasets: Sequence[Dataset] = ()
    jobs: Sequence[Job] = ()
    targets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    file: str | None = None

    def __post_init__(self) -> None:
        _set_tuples(self, "datasets", "jobs")
        check_id("flow's name", self.name)
        _refuse_twice("dataset", [dataset.datasetid for dataset in self.datasets])
        _refuse_twice("job", [job.jobid for job in self.jobs])
        for name, target in self.targets.items():
            _refuse_wrong_target(name, target)
        links = [
            (job.jobid, kind, item) for job in self.jobs for kind, item, _ in job.items if item
        ]
        for dataset in self.datasets:
            self._refuse_unasked(dataset)
        if circle := circle_of_jobs(links):
            raise FlowError(
                f"These would wait for each other for ever: {circle}. Use another dataset as "
                "the output of one of the jobs."
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str] = FILE) -> "Flow":
        """Read a flow.yml; what is wrong with it is a `FlowError` with file and line."""
        return _flow_of(read_file(path))

    @classmethod
    def parse(cls, text: bytes | str, path: str = FILE) -> "Flow":
        """Read the text of a flow.yml; `path` is for messages, and what paths are relative to."""
        return _flow_of(parse_file(text, path))

    @property
    def origin(self) -> str:
        return origin_of(self.name)

    @property
    def folder(self) -> str:
        """The folder that its paths are relative to."""
        return os.path.dirname(os.path.abspath(self.file)) if self.file else os.getcwd()

    def job(self, jobid: str) -> Job | None:
        return next((job for job in self.jobs if job.jobid == jobid), None)

    def expected(self, jobid: str) -> dict[str, Mapping[str, Any]]:
        """The expectations of the chunks that a job produces, by dataset."""
        job = self.job(jobid)
        outputs = job.outputs if job else ()
        return {
            dataset.datasetid: dataset.expect
            for dataset in self.datasets
            if dataset.expect and dataset.datasetid in outputs
        }

    def _refuse_unasked(self, dataset: Dataset) -> None:
        """Refuse expectations of a dataset that nothing would check."""
        if not dataset.expect:
            return
        jobs = [job for job in self.jobs if dataset.datasetid in job.outputs]
        why = "no job of this flow writes it" if not jobs else ""
        for job in jobs:
            if not (job.run or job.python or job.spark):
                why = f"job {job.jobid!r}, which writes it, has no run, python or spark"
        if why:
            where = f"{dataset.where}: " if dataset.where else ""
            raise FlowError(
                f"{where}Dataset {dataset.datasetid!r} has expect, and {why}, so nothing would "
                "check it. Remove expect.",
                key="expect",
            )


def _flow_of(file: FlowFile) -> Flow:
    """What a file declares, checked; what is refused is at the line of the key that it names."""
    policy = file.policy.values
    _made(file.policy, check_policy, "defaults", policy)
    jobs = [item._replace(values=_merged(policy, item.values)) for item in file.jobs]
    return _made(
        file.top,
        Flow,
        file.top.name,
        datasets=[_made(item, Dataset, item.name, **_placed(item)) for item in file.datasets],
        jobs=[_made(item, Job, item.name, **_placed(item)) for item in jobs],
        targets=file.targets,
        file=file.path,
    )


def _merged(policy: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """A job's values by the names of its fields, with the dials of all jobs."""
    fields = {"in": "inputs", "out": "outputs"}
    found = {fields.get(name, name): value for name, value in values.items()}
    return found | {"policy": {**policy, **values.get("policy", {})}}


def _placed(item: Item) -> dict[str, Any]:
    return {**item.values, "where": item.where}


def _made(item: Item, make: Callable[..., _Made], *words: Any, **values: Any) -> _Made:
    try:
        return make(*words, **values)
    except WrongUse as error:
        where = item.lines.get(getattr(error, "key", ""), item.where)
        raise FlowError(f"{where}: {error}") from None


def check_policy(whose: str, policy: Mapping[str, str]) -> None:
    """Refuse dials, or values of them, that a flow can't set."""
    for dial, value in policy.items():
        if dial not in DIALS:
            like = did_you_mean(dial, DIALS) or f". The dials are {', '.join(DIALS)}."
            raise FlowError(f"There is no dial {dial!r} for {whose}{like}", key="policy")
        if DIALS[dial].unit != "time":
            dial_value(dial, value.strip())
        elif value.strip().startswith("+"):
            raise FlowError(
                f"{dial} of {whose} is {value!r}, which each `odf apply` would move. Write a "
                "time such as 2026-03-01T14:30Z, forever, or none.",
                key="policy",
            )


def expand(text: str, environ: Mapping[str, str]) -> str:
    """A text with `${{NAME}}` replaced by the variables of the environment."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return "$"
        if not environ.get(found[2]):
            raise FlowError(
                f"The environment has no {found[2]}. Set it, as in: "
                f"export {found[2]}=…; for a literal `${{`, write `$${{`.",
            )
        return environ[found[2]]

    return _VARIABLE.sub(value, text)


def escape(text: str) -> str:
    """Escape a text so that `expand` doesn't change it."""
    return text.replace("${", "$${")


def _refuse_wrong_row(datasetid: str, row: Mapping[str, str | None]) -> None:
    for name in ("hostname", "database"):
        if has_password(row[name] or ""):
            raise FlowError(
                f"The {name} of dataset {datasetid!r} has a password in its URL, where everyone "
                "can read it. Remove it, and write password: ${NAME}.",
                key=name,
            )
    for name, value in row.items():
        try:
            check_columns(datasetid, {name: value})
        except WrongUse as error:
            raise FlowError(str(error), key=name) from None


def _refuse_wrong_expect(dataset: Dataset) -> None:
    """Refuse what can't be expected of the chunks of a dataset."""
    if fault := _fault_of_expect(dataset.expect, place_of(dataset.raw_columns())):
        raise FlowError(f"expect of dataset {dataset.datasetid!r} {fault}.", key="expect")


def _fault_of_expect(expect: Mapping[str, Any], place: str | None) -> str:
    """What is wrong with `expect`, in words; empty if it can be checked there."""
    rows = expect.get("rows", {"min": 0}) if isinstance(expect, Mapping) else {}
    for found, names in ((expect, ("exists", "rows")), (rows, ("min", "max"))):
        if not isinstance(found, Mapping) or not {*found} <= {*names}:
            return f"is {expect!r}. Write exists: true or rows: {{min: N, max: N}}"
    if not rows or any(type(count) is not int or count < 0 for count in rows.values()):
        return "needs a min or a max of rows, a number from 0"
    if rows.get("min", 0) > rows.get("max", math.inf):
        return "has a min of rows above the max"
    if expect.get("exists", True) is not True:
        return "has exists, which must be true, or be left out"
    if "exists" in expect and place is None:
        return "has exists, but the dataset has no location. Give it one, such as hostname: /FOLDER"
    return ""


def _is_reference(text: str) -> bool:
    found = _VARIABLE.fullmatch(text)
    return bool(found and found[2])


def _set_tuples(item: object, *names: str) -> None:
    for name in names:
        value: str | Iterable[str] = getattr(item, name)
        object.__setattr__(item, name, (value,) if isinstance(value, str) else tuple(value))


def _refuse_twice(kind: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FlowError(f"Two {kind}s have the name {twice!r}. Rename one.")


def _refuse_wrong_target(name: str, target: Mapping[str, str]) -> None:
    known = [key.name for key in TARGET_KEYS]
    for key, value in target.items():
        if key not in known:
            like = did_you_mean(key, known) or f". It may have {', '.join(known)}."
            raise FlowError(f"Target {name!r} has an unknown key {key!r}{like}", key="targets")
        check_text(f"{key} of target {name!r}", value)
    if has_password(target.get("url", "")):
        raise FlowError(
            f"The url of target {printable(name)!r} has a password, where everyone can read "
            "it. Remove it, and write encrypted: with the output of `odf encrypt`, or url: "
            "${NAME}.",
            key="targets",
        )
    if ("properties" in target) == ("url" in target):
        raise FlowError(
            f"Target {printable(name)!r} needs either properties: FILE or url: ADDRESS.",
            key="targets",
        )


# Which tables a flow is applied to: a target that it names, or the ones that commands use here.


VARIABLE = "DATAFLOW_TARGET"
PROPERTIES = "DATAFLOW_PROPERTIES"
_OWN = "DATAFLOW_"


def settings_of(
    flow: Flow,
    target: str | None = None,
    config: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """The settings for a target; without one, as every command finds them.

    A target counts as it is written: no DATAFLOW_URL and no other properties file change it.
    """
    target = target or environ.get(VARIABLE) or None
    if target is None:
        return load_settings(config, environ)
    _refuse_both(target, config)
    named = _variables(flow, target, environ)
    outside = {name: value for name, value in environ.items() if not name.startswith(_OWN)}
    settings = load_settings(None, {**outside, **named})
    return settings._replace(origin=f"target {target}")


def enter_target(target: str | None = None, config: str | None = None) -> None:
    """Let this process, and what it starts, use the tables of a target of ./flow.yml.

    What tells of other tables is removed from the environment.

    Args:
        target: Its name; without one, that of DATAFLOW_TARGET.
        config: The properties file that is named beside it, which is refused.
    """
    environ = os.environ
    target = target or environ[VARIABLE]
    _refuse_both(target, config)
    refuse_without_flow(target)
    named = _variables(Flow.load(FILE), target, environ)
    for name in (VARIABLE, PROPERTIES, *(f"{_OWN}{key.upper()}" for key in KEYS)):
        environ.pop(name, None)
    environ.update(named)


def refuse_without_flow(target: str) -> None:
    """Refuse a target where no flow.yml says which tables it has."""
    if not os.path.isfile(FILE):
        raise FlowError(
            f"There is no {FILE} in this folder, so the tables of target {target!r} aren't "
            f"known. Go to the folder of the flow, or unset {VARIABLE}."
        )


def _variables(flow: Flow, target: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What names the tables of a target, as variables of the environment."""
    if target not in flow.targets:
        known = ", ".join(flow.targets) or "none"
        like = did_you_mean(target, flow.targets) or "."
        raise FlowError(
            f"{flow.file or flow.name} has no target {target!r}{like} Its targets: {known}."
        )
    given = {key: expand(value, environ) for key, value in flow.targets[target].items()}
    path = os.devnull
    if "properties" in given:
        path = os.path.abspath(os.path.join(flow.folder, given.pop("properties")))
    else:
        given["url"] = _absolute(given["url"], flow.folder)
    return {PROPERTIES: path, **{f"{_OWN}{key.upper()}": value for key, value in given.items()}}


def _refuse_both(target: str, config: str | None) -> None:
    if config is not None:
        raise WrongUse(f"--config and the target {target!r} both name tables. Remove one.")


def open_target(settings: Settings) -> tuple[Store, bool]:
    """The store of some settings; and whether it has a database, as only SQLite may lack it yet."""
    path = settings.url.removeprefix("sqlite:///")
    return open_from(settings), path == settings.url or os.path.exists(path)


def _absolute(url: str, folder: str) -> str:
    path = url.removeprefix("sqlite:///")
    if path == url:
        return url
    return "sqlite:///" + os.path.abspath(os.path.join(folder, os.path.expanduser(path)))
