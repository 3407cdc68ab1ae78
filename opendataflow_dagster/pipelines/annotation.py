"""Which engine a transformation asks for: the annotation of the first parameter of its `run`."""

import ast
from pathlib import Path
from types import ModuleType

PANDAS, SPARK, ON_SPARK = "pandas", "spark", "pandas-on-spark"


def engine_of(file: Path | str | ModuleType) -> str:
    """`pandas`, `spark` or `pandas-on-spark`, of a file that isn't run for it.

    What can't be told is pandas: a file with an error, or a `run` that another file defines.
    """
    path = getattr(file, "__file__", None) if isinstance(file, ModuleType) else file
    try:
        tree = ast.parse(Path(path or "").read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return PANDAS
    known = _names(tree)
    for each in reversed(tree.body):
        if isinstance(each, ast.FunctionDef) and each.name == "run":
            parameters = each.args.posonlyargs + each.args.args
            if not parameters or parameters[0].annotation is None:
                return PANDAS
            return _engine(parameters[0].annotation, known) or PANDAS
    return PANDAS


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
                found[name.asname or name.name] = f"{each.module}.{name.name}"
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
        return ON_SPARK
    if name.startswith("pyspark.sql."):
        return SPARK
    return PANDAS if name.startswith("pandas.") else None
