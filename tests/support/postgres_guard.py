"""End a test server and delete its folder once the process that started it is gone.

Usage: postgres_guard.py PARENT FOLDER. It survives what its parent doesn't: SIGKILL of pytest, a
time limit in CI, a closed terminal.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path


def main(parent: int, folder: Path) -> None:
    """Wait for the end of `parent`, then stop the server in `folder` and delete the folder."""
    # A parent that ends hands its children to another one at once, even if nobody reaps it.
    while os.getppid() == parent:
        time.sleep(0.5)
    # It may have ended while pg_ctl was starting the server: look again for a while.
    for _ in range(10):
        signal_server(folder / "data" / "postmaster.pid", signal.SIGQUIT)
        time.sleep(0.2)
    signal_server(folder / "data" / "postmaster.pid", signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def signal_server(pidfile: Path, number: signal.Signals) -> None:
    """Send a signal to the server whose `postmaster.pid` this is, if it runs."""
    try:
        os.kill(int(pidfile.read_text().split()[0]), number)
    except (OSError, ValueError, IndexError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
