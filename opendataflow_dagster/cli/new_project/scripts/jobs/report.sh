#!/bin/sh
# Adds up what each shop has sold.
set -eu
mkdir -p "$report_hostname"
new="$report_hostname/$dataid.csv.new"
echo shop,cents > "$new"
awk -F, 'NR > 1 { cents[$1] += $2 } END { for (shop in cents) print shop "," cents[shop] }' \
    "$checked_hostname/$dataid.csv" | sort >> "$new"
mv "$new" "$report_hostname/$dataid.csv"
