#!/usr/bin/env python3
"""Read the lake like any other Parquet dataset: all chunks are one dataset."""

import pyarrow.dataset

lake = pyarrow.dataset.dataset("lake", partitioning="hive").to_table()
print(f"{lake.num_rows} rows, {sum(lake['amount'].to_pylist())} in all")
