#!/bin/sh
set -eu
odf init
odf dataset add orders --database "$PWD/big.db" --tablename orders
odf dataset add lake --hostname "$PWD/lake"
odf job add extract --in orders --out lake
odf split orders --column id --from 0 --to 20000 --chunks 200
mkdir -p lake
