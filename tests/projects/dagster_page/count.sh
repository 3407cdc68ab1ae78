mkdir -p "$counts_hostname"
wc -l < "$sales_hostname/$dataid.csv" > "$counts_hostname/$dataid.txt"
