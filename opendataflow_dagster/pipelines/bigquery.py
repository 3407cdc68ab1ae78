"""Tables and SELECTs of BigQuery, through Google's own client."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..chunk import Chunk, Result
from ..errors import CredentialError, DataflowError, Refused, Unreachable, WrongUse
from ..location import BigQueryTable, is_select
from ..model import Claim
from ..storage.folder import as_table, need
from ..util.text import first_line, printable, typed
from .frames import REPLACE, Confirm, Destination, Parts, Source, Verdict, fault, one, whole_pandas

if TYPE_CHECKING:
    from pandas import DataFrame as PandasFrame
    from pyspark.sql import DataFrame, SparkSession

INSTALL = "Install it: pip install 'opendataflow-dagster[bigquery]'"
_REQUEST = re.compile(r"^(GET|POST|PUT) \S+: ")
LOOPBACK = ("127.0.0.1", "localhost", "::1")

TIMEOUT_SECONDS = 60.0
"""Seconds for which a request is retried."""

Password = Callable[[], str | None]


class BigQuerySource(Source):
    """A table or view, or the result of a SELECT."""

    def __init__(self, table: BigQueryTable, password: Password) -> None:
        self._table, self._password, self.location = table, password, table.location

    def pandas(self) -> "PandasFrame":
        import pyarrow

        table = self._rows()
        frame = table.to_pandas()
        for field in table.schema:
            if pyarrow.types.is_decimal(field.type):  # for calculations, as with other databases
                frame[field.name] = frame[field.name].astype(float)
        return frame

    def spark(self, spark: "SparkSession") -> "DataFrame":
        return spark.createDataFrame(self._rows())  # pyright: ignore

    def _rows(self) -> Any:
        need("pyarrow")
        table = self._table
        with _opened(table, self._password) as client:
            from google.cloud.bigquery import QueryJobConfig

            patience = _patience()
            if not is_select(table.name):
                found = client.get_table(_full_name(table), retry=patience)
                if found.table_type == "TABLE":
                    rows = client.list_rows(found, retry=patience)
                    return rows.to_arrow(create_bqstorage_client=False)
                query = f"select * from `{_full_name(table)}`"
            else:
                query = table.name
            plan = client.query(query, QueryJobConfig(dry_run=True), retry=patience)
            if plan.statement_type != "SELECT":
                raise Refused(
                    f"{table.datasetid!r} is registered with a {plan.statement_type}, but a source "
                    f"is only read. Run: odf dataset add {typed(table.datasetid)} --tablename …",
                    code="INVALID_LOCATION",
                )
            rows = client.query_and_wait(query, retry=patience)
            return rows.to_arrow(create_bqstorage_client=False)


class BigQueryDestination(Destination):
    """A table that rows are loaded into; they replace all others if its writemode says so."""

    def __init__(self, table: BigQueryTable, password: Password, mode: str) -> None:
        self._table, self._password, self._mode = table, password, mode
        self.location = table.location

    def replaces(self, *, items: bool = False) -> bool:
        return self._mode == REPLACE

    def publish(self, frame: Any, chunk: Chunk, confirm: Confirm) -> Result:
        with self.rows(frame, chunk) as rows:
            return one(self.append([(chunk.claim, rows)], confirm))

    def append(self, parts: Parts, confirm: Confirm) -> list[Verdict]:
        """Load all in one job: each counts against the table's quota; if it fails, one by one."""
        tables = [_arrow(whole_pandas(frame), self.location) for _, frame in parts]
        verdicts: list[Verdict] = [
            table
            if isinstance(table, DataflowError)
            else Result(table.num_rows, location=self.location)
            for table in tables
        ]
        good = [
            at
            for at, table in enumerate(tables)
            if not isinstance(table, DataflowError) and table.num_columns
        ]
        if not good:
            return verdicts
        with _opened(self._table, self._password) as client:
            confirm()
            groups = [[at] for at in good]
            if not self.replaces() and len(good) > 1:
                together = _together([tables[at] for at in good])
                loaded = self._loaded(client, [parts[at][0] for at in good], together)
                groups = [] if loaded is None else groups
            for [at] in groups:
                if (loaded := self._loaded(client, [parts[at][0]], tables[at])) is not None:
                    verdicts[at] = loaded
        return verdicts

    def _loaded(self, client: Any, claims: Sequence[Claim], table: Any) -> DataflowError | None:
        """Load some rows, once for these claims; return BigQuery's complaint about them, if any."""
        from google.api_core.exceptions import BadRequest, Conflict
        from google.cloud import bigquery

        if isinstance(table, DataflowError):
            return table
        try:
            file = _parquet(table)
        except Exception as error:
            return fault(error, table.to_pandas(), self.location)
        lists = bigquery.ParquetOptions()
        lists.enable_list_inference = True
        how = "WRITE_TRUNCATE" if self.replaces() else "WRITE_APPEND"
        config = bigquery.LoadJobConfig(
            source_format="PARQUET", write_disposition=how, create_disposition="CREATE_IF_NEEDED"
        )
        config.parquet_options = lists
        name = _job_id(self._table, claims)
        try:
            job = client.load_table_from_file(
                file,
                _full_name(self._table),
                rewind=True,
                size=file.tell(),
                num_retries=3,
                job_id=name,
                job_config=config,
                timeout=TIMEOUT_SECONDS,
            )
        except Conflict:  # this generation was loaded already, but the answer got lost
            job = client.get_job(name, retry=_patience())
        try:
            job.result(retry=_patience())
        except BadRequest as error:  # the rows are wrong, not the connection
            return DataflowError(f"{self.location}: {_said(error)}")
        return None


@contextmanager
def _opened(table: BigQueryTable, password: Password) -> Iterator[Any]:
    """Yield a client, and turn its errors into ours."""
    try:
        from google.api_core.exceptions import BadRequest, GoogleAPICallError, GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import bigquery
        from requests import RequestException
    except ModuleNotFoundError as error:
        raise WrongUse(
            f"{table.datasetid!r} is in BigQuery, which needs google-cloud-bigquery. {INSTALL}."
        ) from error
    try:
        client = bigquery.Client(
            table.project,
            credentials=_credentials(table, password()),
            client_options={"api_endpoint": table.host} if table.host else None,
        )
    except GoogleAuthError as error:
        raise _unauthorized(table, error) from None
    try:
        yield client
    except GoogleAuthError as error:
        raise _unauthorized(table, error) from None
    except BadRequest as error:  # what was sent is wrong
        raise DataflowError(f"{table.location}: {_said(error)}") from error
    except (GoogleAPICallError, GoogleAPIError, RequestException) as error:
        raise Unreachable(f"{table.location}: {_said(error)}") from error
    finally:
        client.close()


def _credentials(table: BigQueryTable, password: str | None) -> Any:
    """Return the service account of the dataset's password; None: the machine's own."""
    parts = urlsplit(table.host)
    if table.host and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise Refused(
            f"{table.datasetid!r} has the host {table.host!r}, which isn't an endpoint's URL. "
            f"Run: odf dataset add {typed(table.datasetid)} --hostname ''",
            code="INVALID_LOCATION",
        )
    here = parts.hostname in LOOPBACK
    if parts.scheme == "http" and not here:
        raise Refused(
            f"{table.datasetid!r} is at {table.host}, where data would be sent unencrypted. "
            f"Use https: odf dataset add {typed(table.datasetid)} --hostname https://…",
            code="INVALID_LOCATION",
        )
    if not password:
        if not here:
            return None
        from google.auth.credentials import AnonymousCredentials

        return AnonymousCredentials()
    from google.oauth2.service_account import Credentials

    credentials = None
    with suppress(ValueError, TypeError, AttributeError):  # their texts may reveal the password
        credentials = Credentials.from_service_account_info(json.loads(password))
    if credentials is None:
        raise CredentialError(
            f"The password of {table.datasetid!r} isn't the JSON of a service account's key. "
            f"Run: odf dataset add {typed(table.datasetid)} --password"
        )
    return credentials


def _job_id(table: BigQueryTable, claims: Sequence[Claim]) -> str:
    """Return an id that is equal only for a repeat of these generations, from any tables."""
    identity = [
        table.location,
        [[claim.owner, claim.jobid, claim.dataid, claim.generation] for claim in claims],
    ]
    return f"odf-{sha256(json.dumps(identity).encode()).hexdigest()[:40]}"


def _arrow(frame: Any, where: str) -> Any:
    try:
        return as_table(frame.reset_index(drop=True))
    except Exception as error:
        return fault(error, frame, where)


def _parquet(table: Any) -> BytesIO:
    import pyarrow.parquet

    file = BytesIO()
    pyarrow.parquet.write_table(
        table, file, coerce_timestamps="us", allow_truncated_timestamps=True
    )
    return file


def _together(tables: Sequence[Any]) -> Any:
    import pyarrow

    try:
        return pyarrow.concat_tables(tables, promote_options="permissive")
    except Exception as error:  # then one by one
        return DataflowError(first_line(error))


def _full_name(table: BigQueryTable) -> str:
    return f"{table.project}.{table.dataset}.{table.name}"


def _patience() -> Any:
    from google.cloud.bigquery import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(TIMEOUT_SECONDS)


def _said(error: Exception) -> str:
    """Return an error's text, without the request before it and the job's id after it."""
    message = (getattr(error, "message", "") or first_line(error)).strip().partition("\n")[0]
    return printable(_REQUEST.sub("", message)) or type(error).__name__


def _unauthorized(table: BigQueryTable, error: Exception) -> CredentialError:
    return CredentialError(
        f"BigQuery can't be reached for {table.datasetid!r}: {printable(first_line(error))}. Give "
        f"a service account's key: odf dataset add {typed(table.datasetid)} --password"
    )
