import pyspark.pandas as ps
from utils.money import with_tax


def taxed(amount) -> float:
    return with_tax(amount)


def run(df: ps.DataFrame):
    df['total'] = (df['quantity'] * df['unit_price']).apply(taxed)
    df = df.dropna(subset=['total'])
    print(len(df), 'orders have a price')
    return df
