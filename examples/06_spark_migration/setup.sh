#!/bin/sh
# Registers the table, the folder, and the job between them; then the table's chunks.
# Usage: ./setup.sh [HOST:PORT DATABASE USER], of a PostgreSQL; else the table is in big.db.
set -eu
odf init
if [ $# -gt 0 ]; then
    odf dataset add orders --hostname "$1" --database "$2" --username "$3" \
        --tablename orders --chunkcolumn id
else
    odf dataset add orders --database "$PWD/big.db" --tablename orders --chunkcolumn id
fi
odf dataset add lake --hostname "$PWD/lake"
odf job add extract --in orders --out lake
odf split orders --column id --from 0 --to "${ROWS:-1000000}" --chunks "${CHUNKS:-100}"
