#!/bin/sh
# Adds a line to the report: one at a time, by the job's concurrency.
set -e
mkdir -p "$report_hostname"
echo "$dataid: $(cat "$sums_hostname/$dataid")" >> "$report_hostname/report.txt"
