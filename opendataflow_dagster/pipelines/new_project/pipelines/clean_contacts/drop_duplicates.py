expected_inputs = [
    {"name": "Ada", "email": "ada@example.org"},
    {"name": "Ada L.", "email": "ada@example.org"},
    {"name": "Grace", "email": "grace@example.org"},
]
expected_output = [
    {"name": "Ada", "email": "ada@example.org"},
    {"name": "Grace", "email": "grace@example.org"},
]


def run(df):
    """Keep the first contact of each address."""
    return df.drop_duplicates(subset="email")
