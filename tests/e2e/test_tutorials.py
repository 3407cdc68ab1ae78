"""The commands of the README and of the tutorials print what their pages say."""

from pathlib import Path

import pytest

from tests.support.transcripts import differences

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_print_what_it_says(page: Path, tmp_path: Path) -> None:
    changed = differences(page, tmp_path)
    assert not changed, f"{changed}\n\nto update: python -m tests.support.transcripts {page}"
