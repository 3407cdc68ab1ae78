#!/bin/sh
# Copies a chunk from one dataset's folder to the next; see cleaning.py for the files that steer it.
set -eu
case $dataflow_jobid in
    clean) from=$orders_hostname to=$cleaned_hostname ;;
    report) from=$cleaned_hostname to=$report_hostname ;;
esac
told() { grep -qsx "$dataflow_jobid $dataid" "$FLOW_FOLDER/$1"; }

echo "a line of $dataid"
if told slow; then
    sleep 600 &
    echo "$!" > "$FLOW_FOLDER/child.new" && mv "$FLOW_FOLDER/child.new" "$FLOW_FOLDER/child"
    while told slow; do sleep 0.1; done
    kill "$!"
fi
if told bad; then echo "$dataid is bad" >&2; exit 1; fi
cp "$from/$dataid.csv" "$to/$dataid.csv"
echo "$dataflow_jobid $dataid" >> "$FLOW_FOLDER/produced"
