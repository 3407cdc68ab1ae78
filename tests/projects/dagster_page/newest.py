from opendataflow_dagster import DataflowTranslator

class Ours(DataflowTranslator):
    window = 10_000
