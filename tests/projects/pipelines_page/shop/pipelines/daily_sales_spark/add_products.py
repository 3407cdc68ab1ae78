from pyspark.sql import DataFrame, functions as F

def run(df: DataFrame, products: DataFrame) -> DataFrame:
    joined = df.join(products, "sku", "left")
    return joined.withColumn("amount", F.col("pieces") * F.col("price")).drop("price")

expected_inputs = [[{"sku": "A", "pieces": 2}], [{"sku": "A", "price": 1.5}]]
expected_output = [{"sku": "A", "pieces": 2, "amount": 3.0}]
