expected_inputs = [
    [{"freezer": "F-1", "celsius": -18.5}, {"freezer": "F-2", "celsius": -12.0}],
    [{"freezer": "F-1", "limit": -18}, {"freezer": "F-2", "limit": -15}],
]
expected_output = [
    {"freezer": "F-1", "celsius": -18.5, "too_warm": False},
    {"freezer": "F-2", "celsius": -12.0, "too_warm": True},
]


def run(readings, freezers):
    """Mark readings of freezers that are warmer than allowed."""
    limits = readings["freezer"].map(freezers.set_index("freezer")["limit"])
    readings["too_warm"] = readings["celsius"] > limits
    return readings
