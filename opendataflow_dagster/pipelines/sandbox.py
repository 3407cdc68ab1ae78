"""A project's folder and modules around its code, so that projects in one process don't mix."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from threading import RLock
from types import ModuleType

OURS = __name__.partition(".")[0]
INSTALLED = {"site-packages", "dist-packages"}
LINK = ".odf-project"
"""In a copy of a project's code: where the project is, and so where its code works."""

_turn = RLock()
_inside: list[Path] = []
_modules: dict[Path, dict[str, ModuleType]] = {}


@contextmanager
def surroundings(root: Path) -> Iterator[None]:
    """Work in `root`, with its modules importable, and those of other projects out of sight.

    The working folder and the modules belong to the process: one thread at a time is inside.
    """
    root = root.resolve()
    with _turn:
        if _inside and _inside[-1] == root:
            with _working_in(_home(root)):
                yield
            return
        hidden = {name: sys.modules.pop(name) for name in _shadowed(root)}
        before, path, bytecode = set(sys.modules), list(sys.path), sys.dont_write_bytecode
        _inside.append(root)
        sys.modules.update(_modules.get(root) or _folders(root))
        sys.path.insert(0, str(root))
        sys.dont_write_bytecode = True  # no `__pycache__` in the user's folders
        try:
            with _working_in(_home(root)):
                _look_again(root)
                yield
        finally:
            own = {
                name: module
                for name, module in sys.modules.copy().items()  # other threads import
                if name not in before and _own(name, module, root)
            }
            for name in own:
                del sys.modules[name]
            _modules[root] = own
            sys.modules.update(hidden)
            sys.path[:] = path
            sys.dont_write_bytecode = bytecode
            _inside.pop()


def forget(root: Path) -> None:
    """Let the project's modules be imported anew: their files may have changed."""
    with _turn:
        home = _home(root.resolve())
        for known in [each for each in _modules if _home(each) == home]:  # other versions, too
            del _modules[known]


def _home(root: Path) -> Path:
    """The project's own folder, of a copy of its code; else `root`."""
    home = Path(os.readlink(root / LINK)) if (root / LINK).is_symlink() else root
    return home if home.is_dir() else root


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = None
    with suppress(FileNotFoundError):
        before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        if before is not None:
            os.chdir(before)


def _look_again(root: Path) -> None:
    """Let Python see files of the project that are new.

    `importlib.invalidate_caches` would read every zip file on the path anew: in a worker of Spark
    that takes longer than most transformations.
    """
    for place, finder in list(sys.path_importer_cache.items()):
        if Path(place).is_relative_to(root):
            getattr(finder, "invalidate_caches", lambda: None)()


def _shadowed(root: Path) -> list[str]:
    """Loaded modules in whose place a fresh Python in `root` would import the project's own."""
    found = []
    for each in root.iterdir():
        name = each.stem if each.suffix == ".py" else each.name
        if name in (OURS, "__main__") or name in sys.stdlib_module_names:
            continue
        loaded = sys.modules.get(name)
        if loaded is None:
            continue
        # A folder without `__init__.py` gives way to what is installed.
        plain = each.is_dir() and not (each / "__init__.py").exists()
        if not plain or not INSTALLED & set(Path(getattr(loaded, "__file__", None) or "").parts):
            found.append(name)
    inner = tuple(f"{name}." for name in found)
    return found + [name for name in sys.modules.copy() if name.startswith(inner)]


def _folders(root: Path) -> dict[str, ModuleType]:
    """The project's folders without `__init__.py`, which any package on the path would win over.

    In a process of the project's own nothing else is on the path, except for what is installed.
    """
    installed = [each for each in sys.path if INSTALLED & set(Path(each).parts)]
    found = {}
    for each in root.iterdir():
        name = each.name
        if not each.is_dir() or not name.isidentifier() or (each / "__init__.py").exists():
            continue
        other = PathFinder.find_spec(name, installed)
        if name in sys.modules or name in sys.stdlib_module_names or (other and other.loader):
            continue
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(each)]
        found[name] = module_from_spec(spec)
    return found


def _own(name: str, module: ModuleType, root: Path) -> bool:
    if name.partition(".")[0] == OURS:
        return False
    places = []
    with suppress(Exception):  # what some libraries put there is no module
        places.append(getattr(module, "__file__", None))
        places += list(getattr(module, "__path__", ()))
    for place in filter(None, places):
        with suppress(ValueError, TypeError):
            # A virtual environment may lie in the project.
            return not INSTALLED & set(Path(place).resolve().relative_to(root).parts)
    return False
