"""Kill the servers of a test once the process that started them is gone.

Usage: python -m tests.support.process_guard PARENT MARK FOLDER
It survives what its parent doesn't.
"""

import os
import shutil
import sys
import time

import psutil

NAME = "ODF_TEST_SERVERS"


def marked(mark: str) -> list[psutil.Process]:
    """Return every living process that inherited the mark, even if its parents are dead."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(NAME) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_marked(mark: str) -> None:
    """Kill all of them, and what they start meanwhile, until two listings find none.

    One may miss the child of a process that ends while the listing is made.
    """
    empty = 0
    while empty < 2:
        processes = marked(mark)
        empty = 0 if processes else empty + 1
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=5)


def main(parent: int, mark: str, folder: str) -> None:
    """Wait for the end of `parent`, then kill what has the mark and delete the folder."""
    while os.getppid() == parent:
        time.sleep(0.5)
    kill_marked(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
