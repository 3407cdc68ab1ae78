import dagster as dg
from opendataflow_dagster import DataflowTranslator

class Ours(DataflowTranslator):
    def asset_key(self, datasetid):
        return dg.AssetKey(["flow", datasetid])

    def group_name(self, catalog, datasetid):
        return "warehouse"
