"""The product: statuses, claims, history, configuration, credentials and RunJob. Knows no Dagster or Spark."""
