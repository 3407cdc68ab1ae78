#!/bin/sh
# Copies a day of sales, unless a value isn't a whole number of cents.
set -eu
file=$dataid.csv
if grep -vE '^[a-z]+,[0-9]+$' "$sales_hostname/$file" >&2; then exit 1; fi
cp "$sales_hostname/$file" "$checked_hostname/$file.new"
mv "$checked_hostname/$file.new" "$checked_hostname/$file"
