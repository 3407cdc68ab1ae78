import pyspark.pandas as ps


def run(df: ps.DataFrame, customers: ps.DataFrame) -> ps.DataFrame:
    sums = df.groupby('customer')['total'].sum().reset_index()
    joined = ps.merge(sums, customers, how='left', left_on='customer', right_on='id')
    joined['region'] = joined['region'].fillna('nowhere')
    return joined[['name', 'region', 'total']].sort_values('name')
