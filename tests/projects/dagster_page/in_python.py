import pandas as pd
from opendataflow_dagster import Chunk, Dataset, build_definitions, dataflow_assets

@dataflow_assets(inputs=["sales"], outputs=[Dataset("checked", hostname="/data/checked")], policy={"max_attempts": 3})
def check(chunk: Chunk) -> pd.DataFrame:
    return pd.read_csv(f"{chunk.inputs['sales'].location}/{chunk.dataid}.csv").dropna()

defs = build_definitions(flow="flow.yml", assets=[check])   # added to the jobs of the file; without `flow`, they form their own flow
