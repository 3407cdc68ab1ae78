# Source this before each process of Dagster: `. ./environment.sh`. It keeps variables already set.
export DAGSTER_HOME="${DAGSTER_HOME:-$PWD}"
export DAGSTER_POSTGRES_HOST="${DAGSTER_POSTGRES_HOST:-127.0.0.1}"
export DAGSTER_POSTGRES_PORT="${DAGSTER_POSTGRES_PORT:-5432}"
export DAGSTER_POSTGRES_DB="${DAGSTER_POSTGRES_DB:-dagster}"
export DAGSTER_POSTGRES_USER="${DAGSTER_POSTGRES_USER:-dagster}"
# A secret: from your secret store or a file that isn't in git, not from here.
export DAGSTER_POSTGRES_PASSWORD="${DAGSTER_POSTGRES_PASSWORD:-dagster}"
export DAGSTER_EVENT_BATCH_SIZE="${DAGSTER_EVENT_BATCH_SIZE:-500}"
