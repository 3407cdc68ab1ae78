#!/bin/sh
# An ETL script as you have them: it knows nothing of OpenDataFlow but its environment.
# It copies one day of sales, and stops at an amount that isn't a number.
set -eu
awk -F, -v day="$dataid" '
    NR > 1 && $3 !~ /^[0-9.]+$/ {
        print day ": not an amount in line " NR ": " $0 > "/dev/stderr"; exit 1
    }
    { print }
' "$sales_hostname/$dataid.csv" > "$checked_hostname/$dataid.csv.new"
mv "$checked_hostname/$dataid.csv.new" "$checked_hostname/$dataid.csv"
