"""A small disk for a test, and what fills it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder that is its own disk, of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, but: int = 0) -> Path:
    """Fill a disk, `but` so many bytes, with one file."""
    file = folder / "filler"
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(65536))
        except OSError:
            pass
    os.truncate(file, file.stat().st_size - but)
    return file
