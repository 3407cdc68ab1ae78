"""`odf demo`: a month of chunks, with scripts or with Spark and Dagster."""
