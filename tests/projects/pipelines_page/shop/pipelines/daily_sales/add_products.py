expected_inputs = [[{"sku": "A", "pieces": 2}], [{"sku": "A", "price": 1.5}]]
expected_output = [{"sku": "A", "pieces": 2, "amount": 3.0}]

def run(df, products):
    joined = df.merge(products, on="sku", how="left")
    return joined.assign(amount=joined["pieces"] * joined["price"]).drop(columns="price")
