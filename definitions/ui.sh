#!/bin/sh
# `make ui`: the demo's data in Dagster's UI, with SQLite as storage, until Ctrl-C.
set -eu
cd "$(dirname "$0")/.."
port=${PORT:-3000}
bin=$PWD/.venv/bin
files=$PWD/opendataflow_dagster/cli/demo_files
ODF_DEMO=${ODF_DEMO:-$PWD/odf-demo}
DAGSTER_HOME=$ODF_DEMO/dagster
export ODF_DEMO DAGSTER_HOME
unset DATAFLOW_URL DATAFLOW_PROPERTIES DATAFLOW_SCHEMA DATAFLOW_USER

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
    echo "Making the demo's data in $ODF_DEMO, in a minute or two …"
    said=$("$bin/odf" demo "$ODF_DEMO" 2>&1) || { echo "$said" >&2; exit 1; }
fi
mkdir -p "$DAGSTER_HOME"
cp "$files/spark/dagster/dagster.yaml" "$DAGSTER_HOME"

# November begins: four days arrive; two have been processed, and one of them is broken.
if [ ! -e "$ODF_DEMO/sales/2026-11-01.csv" ]; then (
    cd "$ODF_DEMO"
    if [ ! -e definitions.py ]; then  # `odf demo --scripts`
        DATAFLOW_URL=sqlite:///.dataflow/dataflow.db
        export DATAFLOW_URL
        set -- ./check.sh
    else
        set -- --spark jobs.py:check
    fi
    for day in 02 01 03 04; do
        sed "s/2026-10-/2026-11-/" "sales/2026-10-$day.csv" > "sales/new"
        [ $day != 02 ] || sed -i.good 's/harbour,12\.50$/harbour,12.5O/' sales/new
        mv sales/new "sales/2026-11-$day.csv"
    done
    rm -f sales/new.good
    "$bin/odf" ready sales 2026-11-01 2026-11-02
    "$bin/odf" run --all "$@" > /dev/null 2>&1 || true
    "$bin/odf" ready sales 2026-11-03 2026-11-04
) fi

cat <<END
Dagster opens at http://127.0.0.1:$port in some seconds. Ctrl-C ends it.
One day fails. To mend it, and let it be made by the button Materialize:
  cd $ODF_DEMO && sed -i s/12.5O/12.50/ sales/2026-11-02.csv && odf resubmit check 2026-11-02
END
PYTHONWARNINGS='ignore:Function `dev_command` is superseded'
export PYTHONWARNINGS
exec "$bin/dagster" dev --workspace workspace.yaml --host 127.0.0.1 --port "$port" \
    --log-level warning
