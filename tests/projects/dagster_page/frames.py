import dagster as dg
import pandas as pd
from opendataflow_dagster import DataflowTranslator

@dg.asset(
    partitions_def=DataflowTranslator().partitions_def("sales"),
    ins={"checked": dg.AssetIn(input_manager_key="dataflow_io_manager")},
    io_manager_key="dataflow_io_manager",
)
def report(checked: pd.DataFrame) -> pd.DataFrame:
    return checked.groupby("shop", as_index=False).sum()
