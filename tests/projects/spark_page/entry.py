from opendataflow_dagster.cli import main

main()
