#!/bin/sh
# One day's revenue per shop, from the checked sales.
set -eu
awk -F, 'NR > 1 { sum[$2] += $3 } END { for (shop in sum) printf "%s,%.2f\n", shop, sum[shop] }' \
    "$checked_hostname/$dataid.csv" | sort > "$report_hostname/$dataid.csv"
