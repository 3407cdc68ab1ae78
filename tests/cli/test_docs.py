"""What the documents say of the code is true."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import opendataflow_dagster
from opendataflow_dagster.cli.app import COMMANDS
from opendataflow_dagster.model import ABSENT, TRANSITIONS

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXPLAINED = re.compile(r"`odf ([a-z-]+)|^odf ([a-z-]+)", re.MULTILINE)


def test_the_page_of_commands_matches_their_help() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "commands.py"))["page"]()
    assert (ROOT / "docs" / "commands.md").read_text() == page, "run `make docs`"


def test_the_page_of_codes_and_tables_matches_the_code() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "reference.py"))["page"]()
    assert (ROOT / "docs" / "reference.md").read_text() == page, "run `make docs`"


def test_the_diagrams_are_drawn_from_the_text_of_their_pages() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))
    for picture, source in script["diagrams"]():
        assert picture.read_text().endswith(script["mark"](source)), "run `make diagrams`"


def test_the_page_of_the_python_api_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    names = re.findall(r"^::: opendataflow_dagster\.(\w+)$", page, re.MULTILINE)
    assert sorted(names) == sorted(opendataflow_dagster.__all__)


def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    loaded = re.compile(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(?:https?:)?//[^> ]+")
    for page in tmp_path.rglob("*.html"):
        assert not loaded.findall(page.read_text()), page.name


def test_the_picture_of_the_statuses_has_every_transition_and_no_other() -> None:
    drawn = set()
    page = (ROOT / "docs" / "statuses.md").read_text()
    for before, after, acts in re.findall(
        r"^    (\[\*\]|[A-Z]+) --> ([A-Z]+): (.*)$", page, re.MULTILINE
    ):
        start = ABSENT if before == "[*]" else before
        drawn |= {(act, start, after) for act in acts.split(", ")}
    assert drawn == {
        (act, before, after)
        for act, moves in TRANSITIONS.items()
        for after, befores in moves.items()
        for before in befores
    }


def test_every_command_that_the_documents_name_exists() -> None:
    later = {"serve", "pipeline"}
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for pair in EXPLAINED.findall(page.read_text()):
            name = pair[0] or pair[1]
            is_option = name.startswith("--")
            assert is_option or name in COMMANDS or name in later, f"{page.name} names `odf {name}`"


def test_the_page_of_the_architecture_has_every_folder_and_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "opendataflow_dagster"
    tree = page[page.index("```") :].split("```")[1]

    listed = set(re.findall(r"^ +(\w+)/", tree, re.MULTILINE))
    assert {path.name for path in package.rglob("*") if (path / "__init__.py").exists()} <= listed
    named = set(re.findall(r"`([\w/]+\.(?:py|sql))`", page))
    assert len(named) > 50
    missing = {name for name in named if not ((package / name).exists() or (ROOT / name).exists())}
    assert missing - {"schema.sql", "job.sh"} == set()


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_examples_that_post_to_a_new_server_retry_until_it_listens() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*/*.md")]:
        for block in re.findall(FENCED, page.read_text()):
            _, served, then = block.partition("odf serve")
            if served and "&" in then.splitlines()[0] and "curl" in then:
                first = then[then.index("curl") :].replace("\\\n", "").splitlines()[0]
                assert "--retry-connrefused" in first, f"{page.name}: {first}"


BANNED = ("whoever", "in hand", "goes on", "go on", "what is there", "anew", "heeds")
"""Words that had to be read twice."""


def test_the_documents_keep_to_the_usual_words_and_to_those_of_the_glossary() -> None:
    """docs/commands.md has the help of all commands."""
    glossary = ROOT / "docs" / "glossary.md"
    terms, _, others = glossary.read_text().partition("## Other words")
    synonyms = [
        word for row in re.findall(r"^\| (.+?) \|", others, re.M) for word in row.split(", ")
    ]
    assert len(synonyms) > 20
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*/*.md")]
    banned = re.compile(rf"\b({'|'.join([*BANNED, *synonyms[1:]])})\b", re.IGNORECASE)
    for page in pages:
        found = banned.findall(terms if page == glossary else page.read_text())
        assert not found, f"{page.name}: {', '.join(sorted(set(found)))}"


def test_the_tests_that_the_documents_name_exist() -> None:
    """A name without a file belongs to the last file that its table row names."""
    named = set()
    for page in (ROOT / "docs").rglob("*.md"):
        for row in page.read_text().splitlines():
            file = ""
            for found, test in re.findall(r"`(?:(test_\w+)\.py::)?(test_\w+)`", row):
                file = found or file
                named.add((file, test))
    assert len(named) >= 10

    paths = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    missing = {(file, test) for file, test in named if f"def {test}(" not in paths.get(file, "")}
    assert not missing
