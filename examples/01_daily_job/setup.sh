#!/bin/sh
# Registers the job, and marks three days as arrived.
set -eu
mkdir -p in out
for day in 2026-11-01 2026-11-02 2026-11-03; do
    echo "$day,1000" > "in/$day.csv"
done
odf init
odf dataset add bobin --hostname "$PWD/in"
odf dataset add bobout --hostname "$PWD/out"
odf job add loadbob --in bobin --out bobout
odf ready bobin 2026-11-01 2026-11-02 2026-11-03
