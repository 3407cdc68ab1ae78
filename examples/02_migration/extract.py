#!/usr/bin/env python3
"""Copy one chunk of `orders` to a file. It knows nothing of OpenDataFlow but its environment."""

import os
import sqlite3
import sys

lower, upper = int(os.environ["orders_chunklower"]), int(os.environ["orders_chunkupper"])
target = os.path.join(os.environ["lake_hostname"], f"{lower:06d}.csv")

tried = target + ".tried"
if lower % 10_000 == 700 and not os.path.exists(tried):  # one chunk in a hundred, the first time
    open(tried, "w").close()
    sys.exit("the server closed the connection")

with sqlite3.connect(f"file:{os.environ['orders_database']}?mode=ro", uri=True) as source:
    rows = source.execute(
        "select * from orders where id >= ? and id < ?", (lower, upper)
    ).fetchall()
source.close()
with open(target + ".new", "w") as file:
    file.writelines(f"{number},{amount}\n" for number, amount in rows)
os.replace(target + ".new", target)
