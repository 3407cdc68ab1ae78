"""`python -m opendataflow_dagster.cli` is `odf`."""

from . import main

main()
