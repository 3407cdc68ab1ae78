import pandas as pd

expected_inputs = [
    pd.DataFrame({'station': [10, 99], 'rider': ['ann','dan']}),
    pd.DataFrame({'id': [10, 11], 'station_name': ['Harbour','Mill'], 'district': ['South',None], 'opened': [2019,2021]})]

# columns in another order than they come out
expected_output = [pd.DataFrame({'rider': ['ann','dan'], 'district': ['South',None], 'station_name': ['Harbour',None],
                                 'station': [10, 99]})]

def run(rentals, stations):
    joined = pd.merge(rentals, stations, how='left', left_on='station', right_on='id')
    print(joined.dtypes)
    joined.drop(['id', 'opened'], axis=1, inplace=True)
    return joined
