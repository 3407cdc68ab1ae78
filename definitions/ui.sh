#!/bin/sh
# `make ui`: the demo's data in Dagster's UI, with SQLite as storage, until Ctrl-C.
set -eu
cd "$(dirname "$0")/.."
port=${PORT:-3000}
bin=$PWD/.venv/bin
ODF_DEMO=${ODF_DEMO:-$PWD/odf-demo}
DAGSTER_HOME=$ODF_DEMO/dagster
export ODF_DEMO DAGSTER_HOME

"$bin/python" - "$port" <<'END'
import socket, sys
port = sys.argv[1]
if not (port.isdecimal() and 0 < int(port) < 65536):
    sys.exit(f"PORT={port} is no port. Give a number: make ui PORT=3001")
with socket.socket() as probe:
    if probe.connect_ex(("127.0.0.1", int(port))) == 0:
        sys.exit(f"Port {port} is taken by another program. Choose another: make ui PORT=3001")
END

if [ ! -e "$ODF_DEMO/.dataflow/dataflow.db" ]; then
    echo "Making the demo's data in $ODF_DEMO …"
    said=$("$bin/odf" demo "$ODF_DEMO" 2>&1) || { echo "$said" >&2; exit 1; }
fi

# November begins: four days arrive, two have been looked at, one of which is broken.
if [ ! -e "$ODF_DEMO/sales/2026-11-01.csv" ]; then (
    cd "$ODF_DEMO"
    DATAFLOW_URL=sqlite:///.dataflow/dataflow.db
    export DATAFLOW_URL
    for day in 01 02 03 04; do
        sed "s/2026-10-/2026-11-/" "sales/2026-10-$day.csv" > "sales/2026-11-$day.csv"
    done
    sed 3s/12.50/12.5O/ sales/2026-11-02.csv > broken && mv broken sales/2026-11-02.csv
    "$bin/odf" ready sales 2026-11-01 2026-11-02 2026-11-03 2026-11-04
    "$bin/odf" run ./check.sh > /dev/null 2>&1
    "$bin/odf" run ./check.sh > /dev/null 2>&1 || true
) fi

mkdir -p "$DAGSTER_HOME"
cp definitions/dagster.yaml "$DAGSTER_HOME"
cat <<END
Dagster opens at http://127.0.0.1:$port in some seconds. Ctrl-C ends it.
One day fails. To mend it and let it run again:
  cd $ODF_DEMO && sed -i s/12.5O/12.50/ sales/2026-11-02.csv && odf resubmit check 2026-11-02
END
PYTHONWARNINGS='ignore:Function `dev_command` is superseded'
export PYTHONWARNINGS
exec "$bin/dagster" dev --workspace workspace.yaml --host 127.0.0.1 --port "$port" \
    --log-level warning
