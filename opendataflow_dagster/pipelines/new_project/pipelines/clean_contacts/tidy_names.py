from utils.text import tidy

expected_inputs = [{"name": "  ada LOVELACE", "email": "ADA@example.org"}]
expected_output = [{"name": "Ada Lovelace", "email": "ada@example.org"}]


def run(df):
    """Normalize names and addresses."""
    df["name"] = df["name"].map(tidy).str.title()
    df["email"] = df["email"].str.lower()
    return df
