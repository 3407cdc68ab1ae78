import pandas as pd

expected_inputs = [pd.DataFrame({
    'from': pd.to_datetime(['2026-03-01 08:00:00', '2026-03-02 09:15:00']),
    'to': pd.to_datetime(['2026-03-01 08:20:30', None]),
    'rider': ['ann', 'bea'], 'station_name': ['Harbour', None],
})]

added = [{'time': pd.Timedelta(seconds=1230), 'label': 'ann from Harbour'},
         {'time': pd.NaT, 'label': 'bea from somewhere'}]
expected_output = [[{**row, **more} for row, more in zip(expected_inputs[0].to_dict('records'), added)]]


def run(df):
    df['time'] = df['to'] - df['from']
    labels = []
    for row in df.itertuples():
        place = row.station_name if isinstance(row.station_name, str) else 'somewhere'
        labels.append(row.rider + ' from ' + place)
    df['label'] = labels
    return df
