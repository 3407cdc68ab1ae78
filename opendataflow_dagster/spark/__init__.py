"""Chunks as DataFrames of Spark: sessions, places, publishing, evidence, expectations."""
