#!/bin/sh
# Adds up the second column of a day's sales.
set -e
mkdir -p "$sums_hostname"
awk -F, '{ sum += $2 } END { print sum }' "$sales_hostname/$dataid.csv" > "$sums_hostname/$dataid.new"
# If this worker was cut off from the tables, another may have claimed the chunk by now: leave its result alone.
[ -e "$DATAFLOW_FENCE" ] && mv "$sums_hostname/$dataid.new" "$sums_hostname/$dataid"
