"""Transformations that Spark's own frames go through: called here, computed by the cluster."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .annotation import SPARK
from .convert import as_spark, kind_of
from .project import Project
from .sandbox import OURS, surroundings
from .transformation import NO_STREAM, TransformationError, load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def on_driver(
    spark: "SparkSession",
    project: Project,
    slug: str,
    name: str,
    frames: Sequence[Any],
    item: tuple[()] | tuple[Any],
) -> tuple[Any, str]:
    """The frame that a transformation makes, not computed yet, and what it printed."""
    transformation = load(project, slug, name)
    printed = transformation.printed
    given = [as_spark(frame, spark) for frame in frames[: transformation.shape.most]]
    stream = item[0] if item and transformation.shape.stream else NO_STREAM
    with surroundings(project.root), _by_value(project.root):
        try:
            made, said = transformation.call(given, stream)
        except TransformationError as error:
            error.printed = printed + error.printed
            raise
    printed += said
    if kind_of(made) != SPARK:
        what = "nothing" if made is None else f"a {type(made).__module__}.{type(made).__name__}"
        raise TransformationError(
            f"`run` returns {what}, but its first parameter is a {SPARK} DataFrame, and so "
            "must be what it returns.",
            printed=printed,
        )
    return made, printed


@contextmanager
def _by_value(root: Path) -> Iterator[None]:
    """Send functions of the project's modules to the workers, which can't import them."""
    from pyspark.cloudpickle import cloudpickle

    names = {each.stem for each in root.iterdir() if each.suffix == ".py" or each.is_dir()}
    names = {each for each in names if each.isidentifier()} - {OURS, *sys.stdlib_module_names}
    registered = []
    for name in sorted(names - cloudpickle.list_registry_pickle_by_value()):
        new = name not in sys.modules
        module = sys.modules.setdefault(name, ModuleType(name))
        cloudpickle.register_pickle_by_value(module)
        registered.append(module)
        if new:
            del sys.modules[name]
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
