"""What MkDocs makes of the repository's documents: README and others become pages of the site."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Documents outside of docs/, and what their pages are called."""
DIAGRAM = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents that don't lie in docs/."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(
            File.generated(config, page, content=text.replace("](docs/images/", "](images/"))
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show diagrams as pictures. Of a link to a file that is no page, keep the words."""
    path = page.file.src_uri
    stem = posixpath.splitext(posixpath.basename(path))[0]
    picture = posixpath.relpath(f"images/{stem}.svg", posixpath.dirname(path) or ".")
    markdown = DIAGRAM.sub(f"![Diagram]({picture})", markdown)
    source = next((source for source, name in PAGES.items() if name == path), f"docs/{path}")

    def lead(link: re.Match[str]) -> str:
        words, target = link.groups()
        name, anchor = re.fullmatch(r"([^#]*)(#.*)?", target).groups("")
        if "://" in target or not name:
            return link[0]
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
        place = PAGES.get(place, place.removeprefix("docs/"))
        if files.get_file_from_path(place) is None:
            return words
        return f"[{words}]({posixpath.relpath(place, posixpath.dirname(path) or '.')}{anchor})"

    return LINK.sub(lead, markdown)
