#!/bin/sh
# Three datasets in folders, two jobs, and three days that have arrived.
set -eu
odf init
for dataset in bobin bobout counted; do
    mkdir -p "data/$dataset"
    odf dataset add "$dataset" --hostname "$PWD/data/$dataset"
done
odf job add loadbob --in bobin --out bobout
odf job add count --in bobout --out counted
for day in 2026-11-01 2026-11-02 2026-11-03; do
    printf 'a\nb\n' > "data/bobin/$day.csv"
done
odf ready bobin 2026-11-01 2026-11-02 2026-11-03
