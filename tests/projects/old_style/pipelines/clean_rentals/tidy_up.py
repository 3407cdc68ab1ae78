import numpy as np
import pandas as pd

rentals = [1, 2]
expected_inputs = [[{'rental': r, 'taken': 'x', 'returned': 'y', 'voucher': np.nan} for r in rentals]]
expected_output = pd.DataFrame({'rental': rentals})


def run(df):
    df.drop(columns=['taken', 'returned'], inplace=True)
    df.dropna(axis='columns', how='all', inplace=True)
    return df
