from pyspark.sql import DataFrame, functions as F

def revenue(checked: DataFrame) -> DataFrame:
    return checked.groupBy("shop").agg(F.sum("amount").alias("amount"))
