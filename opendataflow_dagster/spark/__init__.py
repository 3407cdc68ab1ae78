"""Chunks as Spark DataFrames: sessions, reading, writing, evidence, expectations."""
