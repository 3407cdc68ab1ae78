"""What the parameters of a `run` ask for, read without running its file: an engine, or items."""

import ast
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

PANDAS, SPARK = "pandas", "spark"
PANDAS_ON_SPARK = "pandas-on-spark"
"""An annotation that we read only to refuse it: frames of it were an engine of their own once."""

STARRED = {"pandas", "pyspark.pandas", "pyspark.sql"}
"""The modules whose DataFrame `import *` brings."""


def engine_of(file: Path | str | ModuleType) -> str:
    """The engine that the first parameter of `run` names, of a file that isn't run for it.

    What can't be told is pandas: a file with an error, or a `run` that another file defines.
    """
    path = getattr(file, "__file__", None) if isinstance(file, ModuleType) else file
    tree = _parsed(Path(path or ""))
    run = tree and _function(tree.body, "run", tree.body)
    if tree is None or not isinstance(run, ast.arguments):
        return PANDAS
    first, *_ = [*run.posonlyargs, *run.args, run.vararg, None]
    if first is None or first.annotation is None:
        return PANDAS
    return _engine(first.annotation, _names(tree)) or PANDAS


def takes_stream(file: Path, root: Path, name: str = "run", depth: int = 20) -> bool | None:
    """Whether `run` of a file of the project has a parameter `stream`; None: that can't be read.

    A function that another file of the project defines is read there.
    """
    tree = _parsed(file)
    found = tree and _function(tree.body, name, tree.body)
    if isinstance(found, Imported):
        there = found.file(file, root)
        return takes_stream(there, root, found.name, depth - 1) if there and depth else None
    if found is None:
        return None
    named = [*found.posonlyargs, *found.args, *found.kwonlyargs]
    return any(each.arg == "stream" for each in named)


class Imported(NamedTuple):
    """A function that another module defines."""

    module: str
    level: int
    name: str

    def file(self, by: Path, root: Path) -> Path | None:
        """The module's file, if it is one of the project."""
        base = by.parents[self.level - 1] if self.level else root
        place = base.joinpath(*self.module.split(".")) if self.module else base
        for each in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if each.is_file() and each.is_relative_to(root):
                return each
        return None


def _parsed(file: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # a strange escape is told when it runs
            return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _function(
    body: Sequence[ast.stmt], name: str, module: Sequence[ast.stmt], depth: int = 20
) -> ast.arguments | Imported | None:
    """The parameters of the function that some statements leave under a name.

    Of two branches it is the first that has one; and of `run = go`, those of `go`.
    """
    if depth == 0:
        return None
    for each in reversed(body):
        found = None
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
            return each.args
        if isinstance(each, ast.ImportFrom):
            for known in each.names:
                if (known.asname or known.name) == name:
                    return Imported(each.module or "", each.level, known.name)
        if name in _assigned(each) and isinstance(each, ast.Assign | ast.AnnAssign):
            if isinstance(each.value, ast.Name):
                found = _function(module, each.value.id, module, depth - 1)
            elif isinstance(each.value, ast.Lambda):
                return each.value.args
        elif not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in _branches(each):
                found = found or _function(inner, name, module, depth - 1)
        if found is not None:
            return found
    return None


def _assigned(each: ast.stmt) -> list[str]:
    """The names that a statement gives to the value on its right."""
    targets: list[ast.expr] = []
    if isinstance(each, ast.Assign):
        targets = each.targets
    elif isinstance(each, ast.AnnAssign):
        targets = [each.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _branches(each: ast.stmt) -> list[list[ast.stmt]]:
    """What an `if`, a `try` or a `with` holds, the likeliest first, except for what never runs."""
    test = each.test if isinstance(each, ast.If) else None
    named = getattr(test, "id", None) or getattr(test, "attr", None)
    unmet = named == "TYPE_CHECKING" or (test and ast.unparse(test) == "__name__ == '__main__'")
    names = ["orelse"] if unmet else ["finalbody", "body", "orelse"]
    found = [getattr(each, name, []) for name in names]
    return found + [handler.body for handler in getattr(each, "handlers", [])]


def _names(tree: ast.Module) -> dict[str, str | ast.expr]:
    """What the names of a file stand for: a dotted name that is imported, or an expression."""
    found: dict[str, str | ast.expr] = {}
    for each in ast.walk(tree):  # imports may stand under `if TYPE_CHECKING:`
        if isinstance(each, ast.Import):
            for name in each.names:
                top = name.name.partition(".")[0]
                found[name.asname or top] = name.name if name.asname else top
        elif isinstance(each, ast.ImportFrom) and each.module and not each.level:
            for name in each.names:
                if name.name != "*":
                    found[name.asname or name.name] = f"{each.module}.{name.name}"
                elif each.module in STARRED:
                    found["DataFrame"] = f"{each.module}.DataFrame"
    for each in tree.body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            found[each.targets[0].id] = each.value
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value:
            found[each.target.id] = each.value
        elif type(each).__name__ == "TypeAlias":  # `type Frame = …`, of Python 3.12
            found[each.name.id] = each.value  # pyright: ignore
    return found


def _engine(given: ast.expr, known: dict[str, str | ast.expr], depth: int = 20) -> str | None:
    """The engine that an annotation names somewhere: `Optional[ps.DataFrame]` does, too."""
    if depth == 0:
        return None
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        try:
            return _engine(ast.parse(given.value.strip(), mode="eval").body, known, depth - 1)
        except (SyntaxError, ValueError):
            return None
    if isinstance(given, ast.Name):
        meant = known.get(given.id)
        if isinstance(meant, ast.expr):
            rest = {name: value for name, value in known.items() if name != given.id}
            return _engine(meant, rest, depth - 1)
    if isinstance(given, ast.Name | ast.Attribute):
        return _of_name(_dotted(given, known))
    for inner in ast.iter_child_nodes(given):
        if isinstance(inner, ast.expr) and (found := _engine(inner, known, depth - 1)):
            return found
    return None


def _dotted(given: ast.expr, known: dict[str, str | ast.expr]) -> str:
    if isinstance(given, ast.Attribute):
        return f"{_dotted(given.value, known)}.{given.attr}"
    meant = known.get(given.id, given.id) if isinstance(given, ast.Name) else ""
    return meant if isinstance(meant, str) else ""


def _of_name(name: str) -> str | None:
    if not name.endswith(".DataFrame"):
        return None
    if name.startswith("pyspark.pandas."):
        return PANDAS_ON_SPARK
    if name.startswith("pyspark.sql."):
        return SPARK
    return PANDAS if name.startswith("pandas.") else None
