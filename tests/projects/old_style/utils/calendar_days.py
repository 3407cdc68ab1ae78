import pandas as pd
from datetime import datetime

SEASON = datetime(2026, 2, 1)


def day_of_season(text):
    return (pd.to_datetime(text) - SEASON).days
