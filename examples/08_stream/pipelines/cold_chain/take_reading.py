import pandas as pd

expected_inputs = [
    [{"freezer": "F-1", "at": "2026-03-01 06:00", "celsius": -19.0, "place": "kitchen"}],
    [{"freezer": "F-1", "place": "kitchen"}, {"freezer": "F-2", "place": "shop"}],
]
stream = [
    {"freezer": "f-2 ", "at": "2026-03-01 06:00", "celsius": "-12,5"},
    {"freezer": "F-1", "at": "2026-03-01 07:00", "celsius": -18},
]
expected_output = [
    {"freezer": "F-1", "at": "2026-03-01 06:00", "celsius": -19.0, "place": "kitchen"},
    {"freezer": "F-2", "at": "2026-03-01 06:00", "celsius": -12.5, "place": "shop"},
    {"freezer": "F-1", "at": "2026-03-01 07:00", "celsius": -18.0, "place": "kitchen"},
]


def run(readings, freezers, stream=None):
    """Add the new reading to those so far, if its freezer is known."""
    if stream is None:
        return readings
    freezer = stream["freezer"].strip().upper()
    places = freezers.set_index("freezer")["place"]
    if freezer not in places:
        raise ValueError(f"there is no freezer {freezer!r} in sources/freezers.csv")
    celsius = float(str(stream["celsius"]).replace(",", "."))
    print(f"{freezer}: {celsius} degrees")
    new = {
        "freezer": freezer,
        "at": pd.Timestamp(stream["at"]).strftime("%Y-%m-%d %H:%M"),
        "celsius": celsius,
        "place": places[freezer],
    }
    return pd.DataFrame([*readings.to_dict("records"), new], columns=readings.columns)
