from opendataflow_dagster import Dataset, Flow, Job

flow = Flow(
    "shop",
    datasets=[Dataset("sales", hostname="/data/sales", format="csv"), Dataset("checked", hostname="/data/checked")],
    jobs=[Job("check", inputs=["sales"], outputs=["checked"], run="./check.sh", policy={"max_attempts": 3})],
)
