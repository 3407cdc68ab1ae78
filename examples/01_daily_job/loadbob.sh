#!/bin/sh
set -eu
cp "$bobin_hostname/$dataid.csv" "$bobout_hostname/$dataid.csv"
