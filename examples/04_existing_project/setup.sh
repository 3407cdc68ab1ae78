#!/bin/sh
# Three datasets in folders, two jobs, and three days of sales, one of which is broken.
set -eu
odf init
for dataset in sales checked report; do
    mkdir -p "$dataset"
    odf dataset add "$dataset" --hostname "$PWD/$dataset"
done
odf job add check --in sales --out checked
odf job add report --in checked --out report
for day in 2026-11-01 2026-11-02 2026-11-03; do
    printf 'north,1250\nsouth,990\nnorth,300\n' > "sales/$day.csv"
done
echo 'harbour,12O0' >> sales/2026-11-03.csv
odf ready sales 2026-11-01 2026-11-02 2026-11-03
