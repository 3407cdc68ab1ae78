"""Records commands into docs/images/terminal.svg, as a terminal shows them: `make pictures`."""

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).parent / "images" / "terminal.svg"
COLUMNS = 80
BROKEN = "2026-03-07"
PREPARED = f"""
odf new shop --kind scripts && cd shop && sed -i /concurrency/d flow.yml && odf apply
for day in 01 02 03 04 05 06 07 08 09 10; do
    test $day = 01 || cp data/sales/2026-03-01.csv data/sales/2026-03-$day.csv
    days="$days 2026-03-$day"
done
echo shop,cents > data/sales/{BROKEN}.csv
odf ready sales $days && ! odf run --all-jobs
cp data/sales/2026-03-01.csv data/sales/{BROKEN}.csv
"""
RECORDED = (
    "odf status --grid",
    f"odf why check {BROKEN}",
    "odf resubmit --failed",
    "odf run --all-jobs 2>&1 | tail -n 1",
)


def record() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as home:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"HOME": home, "PATH": path, "USER": "ada", "TERM": "xterm-256color"}
        env |= {"COLUMNS": str(COLUMNS), "LINES": "50"}
        subprocess.run(["sh", "-c", PREPARED], cwd=home, env=env, capture_output=True, check=True)
        for number, command in enumerate(RECORDED):
            console.print(
                Text.assemble("\n" * bool(number), ("$ ", "bold green"), (command, "bold"))
            )
            console.print(Text.from_ansi(_output(command, Path(home, "shop"), env)))
    drawn = console.export_svg(title="odf", unique_id="terminal")
    # Its font would come from the network.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    PICTURE.write_text(drawn, encoding="utf-8")


def _output(command: str, folder: Path, env: dict[str, str]) -> str:
    """What a command writes to a terminal, colours and all."""
    spawn = "import pty, sys; pty.spawn(['sh', '-c', sys.argv[1]])"
    words = [sys.executable, "-c", spawn, f"stty cols {COLUMNS} && {command}"]
    done = subprocess.run(
        words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    return done.stdout.decode().replace("\r\n", "\n").rstrip()


if __name__ == "__main__":
    record()
