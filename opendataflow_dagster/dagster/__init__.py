"""Everything that imports Dagster: assets, sensors, the partition grid, code locations."""
