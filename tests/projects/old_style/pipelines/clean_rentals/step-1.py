import pandas as pd
import numpy as np
from datetime import datetime
from utils.calendar_days import day_of_season

expected_input = [
    {'rental': 1, 'taken': '3/1/2026 8:00:00', 'returned': '3/1/2026 8:20:30', 'channel': 'app'},
    {'rental': 2, 'taken': '2/3/2026 9:15:00', 'returned': np.nan, 'channel': None},
]

expected_output = [
    {**expected_input[0], 'open': 0, 'from': datetime(2026, 3, 1, 8), 'to': datetime(2026, 3, 1, 8, 20, 30), 'day': 28},
    {**expected_input[1], 'channel': 'unknown', 'open': 1, 'from': datetime(2026, 2, 3, 9, 15), 'to': pd.NaT, 'day': 2},
]


def run(df):
    print('rows:', len(df))
    df['open'] = np.where(df['returned'].isnull(), 1, 0)
    df['from'] = pd.to_datetime(df['taken'])
    df['to'] = pd.to_datetime(df['returned'])
    df['day'] = df['taken'].apply(day_of_season)
    df.loc[df['channel'].isnull(), 'channel'] = 'unknown'
    return df
