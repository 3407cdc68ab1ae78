"""Dagster's UI in a real browser: this machine's Chromium, headless, and what people do in it."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

SCREENSHOTS = Path(__file__).parents[1] / "screenshots"
NO_CHROMIUM = "Chromium isn't installed: {} (Debian: apt-get install chromium)"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A container's /dev/shm is often too small for it.
    "--disable-dev-shm-usage",
]
SECONDS = 20  # for a page, on a machine that does other things too
COLOURS = {"green": "green", "red": "red", "blue": "blue", "gray": "missing"}

# The list draws only the rows in sight: where each begins tells how far to scroll for the next.
READ_SQUARES = """() => [...document.querySelectorAll('[class*=VirtualizedTable_row] [title]')]
  .map(each => [
    each.title,
    each.parentElement.parentElement.lastElementChild.style.background.match(/accent-(\\w+)/)?.[1],
  ])"""
SCROLL = """by => {
  let box = document.querySelector('[class*=VirtualizedTable_row]');
  while (box && box.scrollHeight <= box.clientHeight + 1) box = box.parentElement;
  if (!box || (by > 0 && box.scrollTop + box.clientHeight >= box.scrollHeight - 1)) return false;
  box.scrollTop = by > 0 ? box.scrollTop + box.clientHeight * by : 0;
  return true;
}"""


def chromium() -> str | None:
    """The executable of this machine's Chromium, or of CHROMIUM; None if there is none."""
    found = (shutil.which(name) for name in (os.environ.get("CHROMIUM", ""), *NAMES) if name)
    return next((path for path in found if path), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium with an empty profile, which contacts no other server."""
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()


class UI:
    """What a person sees and does in Dagster's UI."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        page.set_default_timeout(SECONDS * 1000)
        expect.set_options(timeout=SECONDS * 1000)

    def shoot(self, name: str) -> Path:
        """Keep a screenshot under tests/screenshots/, and print where."""
        SCREENSHOTS.mkdir(exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        self.page.screenshot(path=path)
        print(f"screenshot: {path}")
        return path

    def open(self, path: str) -> None:
        """Open a page by its path."""
        self.page.goto(self.url + path, wait_until="commit")

    def open_partitions(self, asset: str) -> None:
        """Open the page with the partitions of an asset, and wait for the first one's colour."""
        self.open(f"/assets/{quote(asset)}?view=partitions")
        end = time.monotonic() + SECONDS
        while not any(self.counts().values()):  # it counts none until it has been told
            assert time.monotonic() < end, f"{asset} has no partitions"
            self.page.wait_for_timeout(50)

    def counts(self) -> dict[str, int]:
        """What the page counts: green, red, blue, missing."""
        names = {
            "Materialized": "green",
            "Failed": "red",
            "Materializing": "blue",
            "Missing": "missing",
        }
        found = {}
        for word, colour in names.items():
            label = self.page.get_by_text(re.compile(rf"^{word} \(\d+\)$"))
            found[colour] = int(re.sub(r"\D", "", label.inner_text()))
        return found

    def squares(self) -> dict[str, str]:
        """Every partition on the page and its colour: green, red, blue or missing."""
        self.page.evaluate(SCROLL, 0)
        found: dict[str, str] = {}
        while True:
            self.page.wait_for_timeout(100)
            for title, colour in self.page.evaluate(READ_SQUARES):
                found[title] = COLOURS.get(colour, str(colour))
            if not self.page.evaluate(SCROLL, 0.8):
                self.page.evaluate(SCROLL, 0)
                return found

    def see(
        self, wanted: Callable[[dict[str, str]], object], what: str, seconds: float = 30
    ) -> dict[str, str]:
        """Watch the squares until they are as wanted."""
        end = time.monotonic() + seconds
        while not wanted(squares := self.squares()):
            if time.monotonic() > end:
                self.shoot("failed")
                raise AssertionError(f"{what}: not within {seconds} s. Seen last: {squares}")
            # The page renews itself too, but only seconds later.
            self.page.wait_for_timeout(200)
            self.page.reload(wait_until="commit")
            self.counts()
        return squares

    def choose(self, partition: str) -> None:
        """Click a partition in the list, on the page with the partitions of an asset."""
        rows = self.page.locator("[class*=AssetEventList_assetListRow]")
        rows.get_by_title(partition, exact=True).click()
        self.page.get_by_role("button", name=re.compile("^View all historical events")).wait_for()

    def dialog(self) -> Locator:
        """The dialog in front."""
        return self.page.locator(".bp5-dialog")

    def materialize(self, asset: str, partition: str) -> None:
        """Choose a partition of an asset, press Materialize, and launch its run."""
        self.open_partitions(asset)
        self.choose(partition)
        self._press_materialize()
        self.dialog().get_by_role("button", name="Launch 1 run", exact=True).click()
        expect(self.dialog()).to_have_count(0)

    def backfill(self, asset: str, which: str = "Failed and missing") -> int:
        """Launch a backfill: All, Failed, Missing, Failed and missing. Return how many keys."""
        self.open_partitions(asset)
        self._press_materialize()
        self.dialog().get_by_role("button", name=which, exact=True).click()
        chosen = self.dialog().get_by_text(re.compile(r"^[1-9]\d* partitions?$")).first
        count = int(chosen.inner_text().split()[0])
        self.dialog().get_by_role("button", name=re.compile("^Launch (backfill|1 run)$")).click()
        expect(self.dialog()).to_have_count(0)
        return count

    def switch_sensor(self, location: str, sensor: str, on: bool) -> None:
        """Open the page of a sensor and switch it on or off."""
        row = self.page.get_by_role("row", name="Running")
        box = row.get_by_role("checkbox")
        for _ in range(5):
            self.open(f"/locations/{quote(location)}/sensors/{quote(sensor)}")
            box.wait_for(state="attached")
            if box.is_checked() == on:
                return
            row.locator("label").click()
            # A tick that ends at this moment writes back the switch as it was when it began.
            self.page.wait_for_timeout(1000)
        raise AssertionError(f"{sensor} can't be switched {'on' if on else 'off'}")

    def _press_materialize(self) -> None:
        # "Materialize…" asks for partitions; with one of them chosen, the dialog starts with it.
        self.page.get_by_role("button", name="Materialize").first.click()
        self.dialog().get_by_text("Partition selection").wait_for()
