"""The `odf` command. What a cron line runs a thousand times a day is served without click."""

import sys


def main() -> None:
    """Run `odf` with this process's arguments, and exit."""
    from .app import app

    app(sys.argv[1:], prog_name="odf")
