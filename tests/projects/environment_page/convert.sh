#!/bin/sh
set -e
sed 's/;/,/g' "$bobin_hostname/$dataid.csv" > "$bobout_hostname/$dataid.tmp"
rows=$(wc -l < "$bobout_hostname/$dataid.tmp")
echo '{"rows": '$rows', "checks": [{"name": "not empty", "passed": '$([ $rows -gt 0 ] && echo true || echo false)'}]}' >> "$DATAFLOW_RESULT"
[ -e "$DATAFLOW_FENCE" ] && mv "$bobout_hostname/$dataid.tmp" "$bobout_hostname/$dataid.csv"
