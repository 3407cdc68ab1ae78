import pandas as pd

expected_inputs = [[{'rental': 1, 'rider': 'ann'}]]

stream = [
    {'rental': 2, 'rider': "it's \"bea\"\nimport os"},
    {'rental': 3, 'rider': 'cid'},
]

expected_output = expected_inputs[0] + stream


def run(df, stream=None):
    if stream is not None:
        df.loc[len(df)] = [stream[name] for name in df.columns]
    return df
