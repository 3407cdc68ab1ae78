"""The commands of the README and of docs/ print what their pages say; other examples are run."""

import re
import runpy
from pathlib import Path

import pytest

from tests.support.transcripts import differences

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "docs" / "howto" / "install.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PLAYED = [page for page in PAGES if "```console\n" in page.read_text() and page != INSTALL]
PIP = re.compile(r"pip install '?opendataflow-dagster(\[[a-z,]+\]')?(  +#.*)?$")
COMPARED = {"commands.md", "architecture.md", "benchmarks.md"}
"""Pages whose blocks without a language are compared with the code, or written by a program."""
JAVA = {"migrating.md"}
"""Commands for H2 and its Java, which aren't here."""
RUN = ("examples/", "tests/", "opendataflow_dagster/")
UPDATE = "to update: python -m tests.support.transcripts"
BLOCK = re.compile(r'^( *)```(\w*)(?: title="([^"]+)")?\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PLAYED, ids=lambda p: p.stem)
def test_the_commands_of_a_page_print_what_it_says(page: Path, tmp_path: Path) -> None:
    changed = differences(page, tmp_path)
    assert not changed, f"{changed}\n\n{UPDATE} {page}"


@pytest.mark.timeout(300)
def test_the_wheel_is_installed_as_the_page_says(wheel: Path, tmp_path: Path) -> None:
    changed = differences(INSTALL, tmp_path, instead={"opendataflow-dagster": str(wheel)})
    assert not changed, changed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_not_played_is_copied_from_a_file_that_is_run(page: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    fences = re.findall(r"^ *(?:```|~~~)", page.read_text(), re.MULTILINE)
    assert len(fences) == 2 * len(blocks), f"{page.name} has a block of another form"
    for indent, language, source, text in blocks:
        if language == "sh" and not source:  # nothing is installed here: INSTALL is played
            assert all(PIP.match(line) for line in text.splitlines()), f"{page.name}: {text}"
        elif language in ("text", ""):
            assert page.name in COMPARED | JAVA, f"{page.name}: {text}"
        elif language == "console":
            assert not indent, f"{page.name}: this block isn't played, as it is indented: {text}"
        elif language != "mermaid":
            assert source.startswith(RUN), (
                f"a block of {page.name} is neither played nor has it a title: {text}"
            )
            assert text in (ROOT / source).read_text(), f"{page.name} and {source} differ: {text}"


def test_the_table_of_extras_has_all_of_them() -> None:
    rows = re.findall(r"^\| (?:`([\w-]+)`|none) \| ", INSTALL.read_text(), re.MULTILINE)
    assert rows == runpy.run_path(str(ROOT / "docs" / "extras.py"))["extras"]()
