#!/usr/bin/env python3
"""Correct the wrong amount in the table that make_table.py created."""

import sqlite3
import sys

REPAIR = "update orders set amount = 0 where amount < 0"

if len(sys.argv) > 1:
    import psycopg

    with psycopg.connect(sys.argv[1]) as connection:
        connection.execute(REPAIR)
else:
    with sqlite3.connect("big.db") as database:
        database.execute(REPAIR)
    database.close()
