from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType
from utils.money import with_tax

taxed = F.udf(with_tax, DoubleType())


def run(df: DataFrame) -> DataFrame:
    priced = df.withColumn('total', taxed(F.col('quantity') * F.col('unit_price')))
    priced = priced.dropna(subset=['total'])
    print(priced.count(), 'orders have a price')
    return priced
