#!/usr/bin/env python3
"""Read the lake as anybody does: all chunks are one dataset."""

import pyarrow.dataset

lake = pyarrow.dataset.dataset("lake", partitioning="hive").to_table()
print(f"{lake.num_rows} rows, {sum(lake['amount'].to_pylist())} in all")
