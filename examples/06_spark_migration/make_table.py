#!/usr/bin/env python3
"""Create the table to migrate: in big.db, or in the PostgreSQL database that is named.

Amounts can't be negative, but one of them is.
"""

import os
import sqlite3
import sys

ROWS = int(os.environ.get("ROWS", "1000000"))
COLUMNS = "id integer primary key, shop integer not null, amount integer"
rows = [(number, number % 97, number % 1009) for number in range(ROWS)]
rows[0] = (0, 0, -1)

if len(sys.argv) > 1:
    import psycopg

    with psycopg.connect(sys.argv[1]) as connection:
        connection.execute(f"create table orders ({COLUMNS})")
        with connection.cursor().copy("copy orders from stdin") as copy:
            for row in rows:
                copy.write_row(row)
else:
    with sqlite3.connect("big.db") as database:
        database.execute(f"create table orders ({COLUMNS})")
        database.executemany("insert into orders values (?, ?, ?)", rows)
    database.close()
