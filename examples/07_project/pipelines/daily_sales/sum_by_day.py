import pandas as pd

expected_inputs = [
    {"day": "2026-03-01", "amount": 98.0},
    {"day": "2026-03-01", "amount": 19.9},
    {"day": "2026-03-02", "amount": None},
]
expected_output = pd.DataFrame(
    {"day": pd.to_datetime(["2026-03-01", "2026-03-02"]), "orders": [2, 1], "amount": [117.9, 0]}
)


def run(df):
    """Sum up each day in one row."""
    df["day"] = pd.to_datetime(df["day"])
    return df.groupby("day").agg(orders=("day", "size"), amount=("amount", "sum")).reset_index()
