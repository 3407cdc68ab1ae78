import pandas as pd

expected_inputs = pd.DataFrame({'station': [11, 10, 11], 'rider': ['b','a','c'], 'day': [1, 2, 0]})
expected_output = [{'station': 10, 'rider': 'a', 'day': 2.0}, {'station': 11, 'rider': 'c', 'day': 0.0}]


def run(df):
    first = df.sort_values('day').groupby('station').first()
    first.reset_index(inplace=True)
    return first
