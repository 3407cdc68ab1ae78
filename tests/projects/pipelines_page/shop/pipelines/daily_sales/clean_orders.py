expected_inputs = [{"sku": "A", "pieces": 2}, {"sku": "B", "pieces": None}]
expected_output = [{"sku": "A", "pieces": 2}]

def run(df):
    return df.dropna()
