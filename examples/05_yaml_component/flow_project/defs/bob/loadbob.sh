#!/bin/sh
set -eu
cp "$bobin_hostname/$dataid.csv" "$bobout_hostname/$dataid.csv.new"
mv "$bobout_hostname/$dataid.csv.new" "$bobout_hostname/$dataid.csv"
