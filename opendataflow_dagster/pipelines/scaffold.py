"""A new project: a small one that validates, to begin from."""

import json
from pathlib import Path

from ..errors import WrongUse

MODEL = Path(__file__).parent / "new_project"


def make(folder: Path) -> list[Path]:
    """Make `folder` a project, and return its files; a folder that holds anything is refused."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise WrongUse(f"{str(folder)!r} is a file. Name a folder that doesn't exist yet.")
    if folder.is_dir() and any(folder.iterdir()):
        raise WrongUse(f"{str(folder)!r} isn't empty. Name a folder that doesn't exist yet.")
    # JSON's texts are YAML's, whatever the folder is called.
    texts = {
        path.relative_to(MODEL): path.read_text(encoding="utf-8").replace(
            '"PROJECT"', json.dumps(folder.resolve().name)
        )
        for path in sorted(MODEL.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    texts[Path(".gitignore")] = "__pycache__/\noutput/\n.dataflow/\n"
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return [folder / path for path in texts]
