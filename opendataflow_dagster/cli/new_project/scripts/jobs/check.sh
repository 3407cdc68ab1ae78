#!/bin/sh
# Leaves out the lines without an amount; refuses a day in which no line has one.
set -eu
mkdir -p "$checked_hostname"
new="$checked_hostname/$dataid.csv.new"
awk -F, 'NR == 1 || $2 != ""' "$sales_hostname/$dataid.csv" > "$new"
rows=$(($(wc -l < "$new") - 1))
[ "$rows" -gt 0 ]
# Told to odf: docs/environment.md of opendataflow-dagster. Without odf, nobody asks.
echo "{\"rows\": $rows}" >> "${DATAFLOW_RESULT:-/dev/null}"
mv "$new" "$checked_hostname/$dataid.csv"
