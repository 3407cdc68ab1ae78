#!/usr/bin/env python3
"""Create the table to migrate."""

import sqlite3

with sqlite3.connect("big.db") as database:
    database.execute("create table orders (id integer primary key, amount integer)")
    database.executemany(
        "insert into orders values (?, ?)", ((number, number % 97) for number in range(20_000))
    )
database.close()
