"""The shop of the pictures in docs/images/: three datasets, two jobs, two checks."""

import dagster as dg

from opendataflow_dagster import (
    Chunk,
    Dataset,
    Flow,
    Job,
    Result,
    build_definitions,
    dataflow_check,
)

PLACE = "s3://shop"


@dataflow_check(dataset="checked")
def has_rows(chunk: Chunk) -> bool:
    """A day without a row is a mistake."""
    return bool(chunk.results["checked"].rows)


@dataflow_check(dataset="checked")
def has_prices(chunk: Chunk) -> bool:
    """Each line has a price."""
    return True


def check(chunk: Chunk) -> Result:
    """Drop test sales, refuse lines without a price."""
    rows = 1000 + int(chunk.dataid[-2:])
    return Result(rows=rows, location=f"{PLACE}/checked/{chunk.dataid}.csv")


def report(chunk: Chunk) -> Result:
    """Sum up a day."""
    return Result(rows=12, location=f"{PLACE}/report/{chunk.dataid}.csv")


flow = Flow(
    "shop",
    datasets=[
        Dataset(
            "sales",
            hostname=f"{PLACE}/sales",
            format="csv",
            description="What the tills send, a file a day.",
            owners=["team:tills"],
        ),
        Dataset(
            "checked",
            hostname=f"{PLACE}/checked",
            format="csv",
            description="Sales without test sales, every line with a price.",
            owners=["team:finance"],
        ),
        Dataset(
            "report",
            hostname=f"{PLACE}/report",
            format="csv",
            description="A line for each shop.",
            owners=["team:finance"],
        ),
    ],
    jobs=[
        Job("check", inputs=["sales"], outputs=["checked"]),
        Job("report", inputs=["checked"], outputs=["report"]),
    ],
)

defs = build_definitions(
    flow=flow,
    functions={"check": check, "report": report},
    checks=[has_rows, has_prices],
    executor=dg.in_process_executor,
)
