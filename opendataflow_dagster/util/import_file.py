"""Python files as modules."""

import importlib
import os
import sys

from ..errors import WrongUse


def import_beside(folder: str) -> None:
    """Let what lies in a folder be imported."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def module_of_file(path: str) -> str:
    """The name of the module that a file is, imported: what lies beside it can be, too."""
    folder, file = os.path.split(os.path.abspath(path))
    name = file.removesuffix(".py")
    import_beside(folder)
    found = importlib.import_module(name).__file__ or ""
    if not (os.path.exists(found) and os.path.samefile(found, path)):
        raise WrongUse(f"{path} is called like the module {found}. Give the file another name.")
    return name
