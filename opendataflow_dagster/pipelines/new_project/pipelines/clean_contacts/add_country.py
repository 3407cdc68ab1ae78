import pandas as pd

expected_inputs = [
    [{"name": "Ada", "country": "GB"}, {"name": "Nobody", "country": None}],
    [{"code": "GB", "country_name": "United Kingdom"}],
]
expected_output = [
    {"name": "Ada", "country": "GB", "country_name": "United Kingdom"},
    {"name": "Nobody", "country": None, "country_name": None},
]


def run(df, countries):
    """Add the country's name; contacts without a country stay."""
    df = pd.merge(df, countries, how="left", left_on="country", right_on="code")
    return df.drop(columns="code")
