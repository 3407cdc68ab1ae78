"""What Dagster loads. No database is read for it, so that it loads anywhere."""

from pathlib import Path

from opendataflow_dagster import build_definitions

# automatic: whatever may run is launched by itself, from the start.
defs = build_definitions(flow=Path(__file__).parent / "flow.yml", automatic=True)
