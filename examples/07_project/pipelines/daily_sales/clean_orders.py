from utils.skus import normal

expected_inputs = [
    {"order": 1, "day": "2026-03-01", "sku": "b-2 ", "pieces": 1},
    {"order": 1, "day": "2026-03-01", "sku": "b-2 ", "pieces": 1},
    {"order": 2, "day": "2026-03-02", "sku": "A-1", "pieces": None},
]
expected_output = [
    {"order": 1, "day": "2026-03-01", "sku": "B-2", "pieces": 1},
]


def run(df):
    """Keep each order once, with its product's number as in the catalogue."""
    df = df.drop_duplicates(subset="order").dropna(subset=["pieces"]).copy()
    df["sku"] = df["sku"].map(normal)
    return df
