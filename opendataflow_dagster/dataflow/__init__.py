"""The product: statuses, claims, history, credentials, RunJob. Knows no Dagster or Spark."""
