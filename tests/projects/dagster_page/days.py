import dagster as dg
from opendataflow_dagster import DataflowTranslator

class Ours(DataflowTranslator):
    def partitions_def(self, domain):
        if domain == "sales":
            return dg.DailyPartitionsDefinition("2026-01-01", end_offset=1)
        return super().partitions_def(domain)
