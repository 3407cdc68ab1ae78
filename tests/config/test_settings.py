"""The environment beats the file beats the default, and old properties files keep working."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from opendataflow_dagster.config import settings
from opendataflow_dagster.config.settings import (
    Settings,
    load_settings,
    parse_properties,
    redact,
    replace_property,
)
from opendataflow_dagster.errors import DataflowError, WrongUse
from opendataflow_dagster.store import open_store


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a test, empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def properties(folder: Path, text: str, name: str = "dataflow.properties") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("page", ["configuration_page", "spark_page"])
def test_the_files_of_the_pages(page: str) -> None:
    file = Path(__file__).parents[1] / "projects" / page / "dataflow.properties"
    found = load_settings(str(file), environ={})
    assert found.url == "postgresql://db.example:5432/dataflow"
    if page == "configuration_page":
        assert (found.user, found.schema, found.timezone) == ("etl", "dataflow", "Europe/Berlin")
    else:
        assert found.values["spark.executor.memory"] == "8g"


# --- who wins ---


def test_without_any_settings_the_default_is_sqlite_in_the_working_folder(folder: Path) -> None:
    assert load_settings(environ={}) == Settings(
        url=f"sqlite:///{folder}/.dataflow/dataflow.db",
        user=None,
        encrypted=None,
        schema="dataflow",
        timezone=None,
        origin="built-in default",
        path=None,
        values={},
    )
    assert list(folder.iterdir()) == [], "looking creates nothing"


def test_the_file_of_the_working_folder_beats_the_default(folder: Path) -> None:
    path = properties(
        folder,
        "url=jdbc:postgresql://db.example:5432/dataflow\nuser=etl\nschema=flow\n"
        "encrypted=abc=\ntimezone=Europe/Berlin\nspark.master=local[2]\n",
    )
    found = load_settings(environ={})
    assert found[:7] == (
        "postgresql://db.example:5432/dataflow",
        "etl",
        "abc=",
        "flow",
        "Europe/Berlin",
        str(path),
        str(path),
    )
    assert found.get("spark.master") == "local[2]"
    assert found.get("spark.home") is None
    assert found.get("spark.home", "/opt") == "/opt"


@pytest.mark.parametrize(
    ("key", "like"),
    [
        ("urll", "'url'"),
        ("User", "'user'"),
        ("time.zone", "'timezone'"),
        ("spark_master", ""),
        ("sparc.master", "'spark.…'"),
        ("driver", ""),
    ],
)
def test_an_unknown_key_of_the_file_is_refused(folder: Path, key: str, like: str) -> None:
    properties(folder, f"url=sqlite:///a.db\n{key}=secret\n")
    with pytest.raises(WrongUse) as refused:
        load_settings(environ={})
    text = str(refused.value)
    assert f"has an unknown key {key!r}" in text
    assert (f"Did you mean {like}?" in text) if like else "Did you mean" not in text
    assert "url, user, schema, encrypted, timezone" in text
    assert "secret" not in text


def test_the_environment_beats_the_file_key_by_key(folder: Path) -> None:
    path = properties(folder, "url=postgresql://one/db\nuser=etl\nspark.master=local\n")
    found = load_settings(
        environ={
            "DATAFLOW_USER": "admin",
            "DATAFLOW_SCHEMA": "other",
            "DATAFLOW_TIMEZONE": "UTC",
            "DATAFLOW_ENCRYPTED": "xyz",
            "DATAFLOW_SPARK_MASTER": "spark://m:7077",
            "DATAFLOW_FETCH_SIZE": "10",
            "DATAFLOWER": "no",
            "dataflow_jobid": "no",
        }
    )
    assert found[:7] == (
        "postgresql://one/db",
        "admin",
        "xyz",
        "other",
        "UTC",
        str(path),
        str(path),
    )
    assert found.get("spark.master") == "spark://m:7077"
    assert found.get("fetch.size") == "10"
    assert sorted(found.values) == [
        "encrypted",
        "fetch_size",
        "schema",
        "spark.master",
        "spark_master",
        "timezone",
        "url",
        "user",
    ]


def test_settings_say_that_the_url_came_from_the_environment(folder: Path) -> None:
    path = properties(folder, "url=postgresql://one/db\n")
    found = load_settings(environ={"DATAFLOW_URL": "postgresql://two/db"})
    assert (found.url, found.origin, found.path) == (
        "postgresql://two/db",
        "environment",
        str(path),
    )


def test_an_empty_variable_is_not_a_setting(folder: Path) -> None:
    properties(folder, "url=postgresql://one/db\nuser=etl\n")
    found = load_settings(
        environ={"DATAFLOW_URL": "", "DATAFLOW_USER": "", "DATAFLOW_PROPERTIES": ""}
    )
    assert (found.url, found.user) == ("postgresql://one/db", "etl")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAFLOW_URL", "postgresql://here/db")
    assert load_settings().url == "postgresql://here/db"


def test_the_argument_beats_the_variable_beats_the_working_folder(folder: Path) -> None:
    properties(folder, "user=working\n")
    variable = properties(folder, "user=variable\n", "v.properties")
    argument = properties(folder, "user=argument\n", "a.properties")
    environ = {"DATAFLOW_PROPERTIES": str(variable)}
    assert load_settings(environ={}).user == "working"
    assert load_settings(environ=environ).user == "variable"
    assert load_settings(argument, environ).user == "argument"
    assert load_settings("a.properties", environ).path == str(argument)


@pytest.mark.parametrize("named_by", ["--config", "DATAFLOW_PROPERTIES"])
def test_a_named_file_that_is_missing_is_named_with_who_named_it(
    folder: Path, named_by: str
) -> None:
    properties(folder, "user=not-this-one\n")
    path, environ = None, {named_by: "gone.properties"}
    if named_by == "--config":
        path, environ = "gone.properties", {}
    with pytest.raises(WrongUse) as caught:
        load_settings(path, environ)
    assert "'gone.properties'" in str(caught.value)
    assert named_by in str(caught.value)


def test_an_empty_argument_is_a_mistake_not_a_wish_for_the_default(folder: Path) -> None:
    properties(folder, "user=not-this-one\n")
    with pytest.raises(WrongUse, match="no properties file ''"):
        load_settings("", {})


def test_a_file_that_cannot_be_read_is_not_passed_over(folder: Path) -> None:
    (folder / "dataflow.properties").mkdir()
    with pytest.raises(WrongUse, match=r"dataflow\.properties.*Is a directory"):
        load_settings(environ={})


@pytest.mark.parametrize(
    ("url", "environ", "user", "encrypted"),
    [
        ("postgresql://h/db", {}, "file", "abc"),
        ("postgresql://own@h/db", {}, "own", "abc"),
        ("jdbc:postgresql://h/db?user=own%40x", {}, "own@x", "abc"),
        ("postgresql://own:pw@h/db", {}, "own", None),
        ("jdbc:postgresql://h/db?user=own&password=pw", {}, "own", None),
        ("postgresql://own@h/db", {"DATAFLOW_USER": "env"}, "env", "abc"),
        ("postgresql://h/db", {"DATAFLOW_URL": "postgresql://g/db"}, "file", "abc"),
        ("postgresql://h/db", {"DATAFLOW_URL": "postgresql://own@g/db"}, "own", None),
        (
            "postgresql://h/db",
            {"DATAFLOW_URL": "postgresql://own@g/db", "DATAFLOW_ENCRYPTED": "env"},
            "own",
            "env",
        ),
    ],
)
def test_credentials_go_with_the_url_that_they_were_written_beside(
    folder: Path, url: str, environ: dict[str, str], user: str, encrypted: str | None
) -> None:
    properties(folder, f"url={url}\nuser=file\nencrypted=abc\n")
    found = load_settings(environ=environ)
    assert (found.user, found.encrypted) == (user, encrypted)


def test_settings_show_no_password(folder: Path) -> None:
    properties(folder, "url=postgresql://u:hunter2@h/db\nencrypted=hunter2\n")
    found = load_settings(environ={})
    assert "hunter2" in found.url
    assert "hunter2" not in f"{found!r} {found}"


@pytest.mark.parametrize(
    "rest",
    [
        "u:hun@hunter2@localhost:1/db",
        "u:hun/hunter2@localhost:1/db",
        "u:hun#hunter2@localhost:1",
        "u:@hunter2@localhost:1/db",
        "u:hunter2@x@[localhost/db",
        "u:hunter2%x@localhost:1/db",
        "u:hun?hunter2@localhost:1",
        "localhost:1/db?password=hunter2%x",
        "u:hunter2%00@localhost:1",
    ],
)
def test_a_password_that_libpq_would_read_otherwise_is_shown_nowhere(rest: str) -> None:
    for url in (f"postgresql://{rest}", f"jdbc:postgresql://{rest}"):
        with pytest.raises(DataflowError) as refused:
            open_store(load_settings(environ={"DATAFLOW_URL": url}).url).db.connect()
        assert "hunter2" not in str(refused.value)
        assert "%40" in str(refused.value) or url.startswith("jdbc")


@pytest.mark.parametrize(
    "rest",
    [
        "u:a%40b@h:5433/db",
        "h:5433/db?user=me@corp",
        "a:1,b:2/db?user=me@corp",
        "u@h/db",
        "[::1]:5433/db?user=me@corp",
        "/db",
        "h/db?password=a%26b",
        "u:a:b@h/db",
    ],
)
def test_urls_that_libpq_reads_as_they_are_meant_are_kept(rest: str) -> None:
    db = open_store(f"postgresql://{rest}").db
    assert db.url == f"postgresql://{rest}"  # type: ignore[attr-defined]


# --- urls ---

H_DB = {"host": "h", "dbname": "db"}


@pytest.mark.parametrize(
    ("jdbc", "libpq"),
    [
        ("//h:5433/db", {"host": "h", "port": "5433", "dbname": "db"}),
        ("//h/db", {"host": "h", "dbname": "db"}),
        ("//h/", {"host": "h"}),
        ("//h", {"host": "h"}),
        ("///db", {"host": "localhost", "dbname": "db"}),
        ("//:5433/db", {"host": "localhost", "port": "5433", "dbname": "db"}),
        ("db", {"host": "localhost", "dbname": "db"}),
        ("/", {"host": "localhost"}),
        ("//[::1]:5433/db", {"host": "::1", "port": "5433", "dbname": "db"}),
        ("//a:1,b:2/db", {"host": "a,b", "port": "1,2", "dbname": "db"}),
        ("//h/my%20db", {"host": "h", "dbname": "my db"}),
        ("//h/db?user=a%26b&password=p%40+%2B", H_DB | {"user": "a&b", "password": "p@ +"}),
        ("db?user=me", {"host": "localhost", "dbname": "db", "user": "me"}),
        ("//h/db?ssl=true", H_DB | {"sslmode": "require"}),
        ("//h/db?ssl", H_DB | {"sslmode": "require"}),
        ("//h/db?ssl=true&sslmode=verify-full", H_DB | {"sslmode": "verify-full"}),
        ("//h/db?sslmode=disable&ssl=true", H_DB | {"sslmode": "disable"}),
        (
            "//h/db?sslrootcert=/r.pem&sslcert=/c.pem&sslkey=/k.pem",
            H_DB | {"sslrootcert": "/r.pem", "sslcert": "/c.pem", "sslkey": "/k.pem"},
        ),
        ("//h/db?connectTimeout=7", H_DB | {"connect_timeout": "7"}),
        ("//h/db?ApplicationName=my+app", H_DB | {"application_name": "my app"}),
        (
            "//a,b/db?targetServerType=primary",
            {"host": "a,b", "port": ",", "dbname": "db", "target_session_attrs": "primary"},
        ),
    ],
)
def test_a_jdbc_url_becomes_one_that_libpq_accepts(jdbc: str, libpq: dict[str, str]) -> None:
    found = load_settings(environ={"DATAFLOW_URL": "jdbc:postgresql:" + jdbc})
    assert found.url.startswith("postgresql://")
    accepted = conninfo_to_dict(found.url)
    assert accepted == libpq


@pytest.mark.parametrize(
    "ignored",
    ["socketTimeout=30", "ssl=false", "reWriteBatchedInserts=true", "nonsense", "", "&&", "a=b=c"],
)
def test_parameters_that_only_java_knows_are_left_out(ignored: str) -> None:
    found = load_settings(environ={"DATAFLOW_URL": f"jdbc:postgresql://h/db?{ignored}"})
    assert found.url == "postgresql://h/db"


def test_the_schema_of_a_jdbc_url_is_used_unless_the_key_says_another(folder: Path) -> None:
    url = "jdbc:postgresql://h/db?currentSchema=flow,public"
    assert load_settings(environ={"DATAFLOW_URL": url}).schema == "flow"
    assert load_settings(environ={"DATAFLOW_URL": url, "DATAFLOW_SCHEMA": "x"}).schema == "x"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:p%40@h:5432/db?sslmode=require",
        "postgres://u:p%40@h:5432/db?sslmode=require",
        "postgresql+psycopg://u:p%40@h:5432/db?sslmode=require",
        "  postgresql://u:p%40@h:5432/db?sslmode=require  ",
    ],
)
def test_a_libpq_url_stays_as_it_is(url: str) -> None:
    found = load_settings(environ={"DATAFLOW_URL": url})
    assert found.url == "postgresql://u:p%40@h:5432/db?sslmode=require"


def test_a_relative_sqlite_path_starts_at_the_file_that_names_it(folder: Path) -> None:
    (folder / "conf").mkdir()
    properties(folder, "url=sqlite:///data/flow.db\n", "conf/p.properties")
    inside = load_settings("conf/p.properties", {})
    assert inside.url == f"sqlite:///{folder}/conf/data/flow.db"
    environ = {"DATAFLOW_URL": "sqlite:///data/flow.db"}
    assert load_settings("conf/p.properties", environ).url == f"sqlite:///{folder}/data/flow.db"


def test_other_forms_of_sqlite_paths_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def url(given: str) -> str:
        return load_settings(environ={"DATAFLOW_URL": given}).url

    monkeypatch.setenv("HOME", "/home/me")
    assert url("sqlite:////var/lib/flow.db") == "sqlite:////var/lib/flow.db"
    assert url("sqlite:////var/lib/../a%20b?.db") == "sqlite:////var/a%20b?.db"
    assert url("sqlite:///~/flow.db") == "sqlite:////home/me/flow.db"


def test_a_file_without_a_url_has_its_default_database_beside_it(folder: Path) -> None:
    (folder / "conf").mkdir()
    properties(folder, "timezone=UTC\n", "conf/p.properties")
    found = load_settings("conf/p.properties", {})
    assert found.url == f"sqlite:///{folder}/conf/.dataflow/dataflow.db"
    assert found.origin == "built-in default"


def test_h2_is_refused_in_one_line_that_says_what_to_do(folder: Path) -> None:
    path = properties(folder, "url=jdbc:h2:./flow;PASSWORD=hunter2\n")
    with pytest.raises(WrongUse) as caught:
        load_settings(environ={})
    message = str(caught.value)
    assert "\n" not in message
    assert "hunter2" not in message
    assert str(path) in message
    assert "H2" in message
    assert "`odf init`" in message


@pytest.mark.parametrize(
    "url",
    [
        "mysql://u:hunter2@h/db",
        "jdbc:oracle:thin:u/hunter2@h:1521/x",
        "jdbc:mysql://h/db?password=hunter2",
        "host=h password=hunter2",
        "hunter2",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite://flow.db",
        "flow.db",
        "",
    ],
)
def test_other_urls_are_refused_without_their_password(folder: Path, url: str) -> None:
    path = properties(folder, f"url={url}\n")
    with pytest.raises(WrongUse) as caught:
        load_settings(environ={})
    assert caught.value.exit_code == 2
    assert str(path) in str(caught.value)
    assert "sqlite:///FILE" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:hunter2@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("postgresql://u:hun@ter/2:hunter2@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:@h/db", "postgresql://u:***@h/db"),
        (
            "postgresql://h:1/db?user=u&password=hunter@2&sslmode=require",
            "postgresql://h:1/db?user=u&password=***&sslmode=require",
        ),
        ("postgresql://h/db?sslpassword=hunter2", "postgresql://h/db?sslpassword=***"),
        ("jdbc:h2:./flow;PASSWORD=hunter2", "jdbc:h2:./flow;PASSWORD=***"),
        (
            "jdbc:mysql://address=(host=h)(password=hunter2)/d",
            "jdbc:mysql://address=(host=h)(password=***",
        ),
        ("jdbc:oracle:thin:u/hunter2@h:1521/x", "jdbc:oracle:thin:u/***@h:1521/x"),
        ("jdbc:oracle:thin:@//h:1521/x", "jdbc:oracle:thin:@//h:1521/x"),
        ("host=h password=hunter2", "host=h password=***"),
        ("postgresql://u@h:5432/db?sslmode=require", "postgresql://u@h:5432/db?sslmode=require"),
        ("sqlite:////var/lib/flow.db", "sqlite:////var/lib/flow.db"),
    ],
)
def test_redact_hides_the_password_and_little_else(url: str, shown: str) -> None:
    assert redact(url) == shown


# --- the syntax of Java's properties ---


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a=1", {"a": "1"}),
        ("a = 1\nb: 2\nc 3\nd\t4\ne\n", {"a": "1", "b": "2", "c": "3", "d": "4", "e": ""}),
        ("a==1\nb = = 2\nc := 3", {"a": "=1", "b": "= 2", "c": "= 3"}),
        ("  # no\n! no = 1\n\n \t \na=1 # yes", {"a": "1 # yes"}),
        ("# no \\\na=1", {"a": "1"}),
        ("a=1\\\n   2\\\r\n\t3", {"a": "123"}),
        ("a=1\\\n# 2", {"a": "1# 2"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=1\\\\\\\n2", {"a": "1\\2"}),
        ("a\\\n  b\\\n =c", {"ab": "c"}),
        ("a=\\u00e4\\u20AC\\t\\n\\r\\f\\q\\\\", {"a": "ä€\t\n\r\fq\\"}),
        ("a=\\ud83d\\ude00", {"a": "😀"}),
        ("a=\\ud83d", {"a": "\ufffd"}),
        ("a=C:\\\\dir", {"a": "C:\\dir"}),
        ("a\\ b\\=c\\:=1", {"a b=c:": "1"}),
        ("a=1\na=2\nb=3\na=4", {"a": "4", "b": "3"}),
        ("a=1\r\nb=2\rc=3", {"a": "1", "b": "2", "c": "3"}),
        ("\ufeffa=1", {"a": "1"}),
        ("a=1  ", {"a": "1  "}),
        ("a=b\\", {"a": "b"}),
        ("a\\", {"a": ""}),
        ("=1", {"": "1"}),
        ("a=\\u12", {"a": "u12"}),
        ("", {}),
    ],
)
def test_properties_are_read_as_java_reads_them(text: str, read: dict[str, str]) -> None:
    assert parse_properties(text) == read


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_both_encodings_and_a_mark_are_read(folder: Path, encoding: str) -> None:
    text = "user=jörg\r\nurl=postgresql://h/db\r\n"
    (folder / "dataflow.properties").write_bytes(text.encode(encoding))
    found = load_settings(environ={})
    assert (found.user, found.url) == ("jörg", "postgresql://h/db")


def test_a_long_hostile_file_is_read_in_a_moment() -> None:
    for text in ("\\\n" * 50_000, " " * 100_000 + "\\", "a" * 100_000 + "\\\n \\", "=:" * 50_000):
        parse_properties(text)


# --- changing one key ---


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"encrypted=old\n", b"encrypted=NEW\n"),
        (b"# c\r\n\r\nencrypted : old\r\nz=\xe4\r\n", b"# c\r\n\r\nencrypted : NEW\r\nz=\xe4\r\n"),
        (b"\xef\xbb\xbfencrypted=old", b"\xef\xbb\xbfencrypted=NEW"),
        (b"encrypted=a\\\n  b\\\n  c\nz=1\n", b"encrypted=NEW\nz=1\n"),
        (b"encrypted=1\nencrypted=2\nz=\\u00e4\\\n", b"encrypted=1\nencrypted=NEW\nz=\\u00e4\\\n"),
        (b"  encrypted\told  \nz\n", b"  encrypted\tNEW\nz\n"),
        (b"encrypted\nz=\xc3\xa4\n", b"encrypted=NEW\nz=\xc3\xa4\n"),
        (b"encrypted=\n", b"encrypted=NEW\n"),
        (b"encr\\u0079pted=old\n", b"encr\\u0079pted=NEW\n"),
        (b"#encrypted=old\nz=1", b"#encrypted=old\nz=1\nencrypted=NEW\n"),
        (b"z=1\r\n", b"z=1\r\nencrypted=NEW\r\n"),
        (b"", b"encrypted=NEW\n"),
    ],
)
def test_writing_a_key_leaves_every_other_byte_unchanged(
    folder: Path, before: bytes, after: bytes
) -> None:
    path = folder / "p"
    path.write_bytes(before)
    replace_property(path, "encrypted", "NEW")
    assert path.read_bytes() == after
    assert os.listdir(folder) == ["p"], "nothing temporary stays"


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT, TEXT, TEXT)
def test_any_key_and_value_is_read_back_and_the_others_are_unchanged(
    key: str, value: str, other: str
) -> None:
    before = settings._with("", "other " + other, "kept")
    once = settings._with(before, key, value)
    assert parse_properties(once) == {"other " + other: "kept", key: value}
    assert once.startswith(before)
    twice = settings._with(once, key, other)
    assert parse_properties(twice) == {"other " + other: "kept", key: other}
    assert twice.count("\n") == 2, "replaced, not added"


def test_a_key_with_spaces_is_written_and_read_back(folder: Path) -> None:
    path = folder / "p"
    path.write_bytes(b"my\\ key = old\nmy key\n")
    replace_property(path, "my key", "NEW")
    assert path.read_bytes() == b"my\\ key = NEW\nmy key\n"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_writing_keeps_the_files_mode(folder: Path, mode: int) -> None:
    path = properties(folder, "encrypted=old\n")
    path.chmod(mode)
    replace_property(path, "encrypted", "NEW")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_text() == "encrypted=NEW\n"


def test_a_link_stays_a_link(folder: Path) -> None:
    (folder / "real").mkdir()
    target = properties(folder, "encrypted=old\n", "real/p")
    link = folder / "dataflow.properties"
    link.symlink_to("real/p")
    replace_property(link, "encrypted", "NEW")
    assert link.is_symlink()
    assert target.read_text() == "encrypted=NEW\n"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = properties(folder, "encrypted=old\n")

    def disk_is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, disk_is_full)
    with pytest.raises(DataflowError, match="No space left on device"):
        replace_property(path, "encrypted", "NEW")
    assert path.read_text() == "encrypted=old\n"
    assert os.listdir(folder) == ["dataflow.properties"]


def test_the_new_file_is_on_disk_before_it_takes_the_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = properties(folder, "encrypted=old\n")
    steps: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def recorded(*args, name=name, real=real):
            steps.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, recorded)
    replace_property(path, "encrypted", "NEW")
    assert steps == ["fsync", "replace", "fsync"]


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(DataflowError, match=r"gone.*No such file"):
        replace_property(folder / "gone", "encrypted", "NEW")


# --- cold start ---


@pytest.mark.parametrize("module", ["errors", "config.settings", "config.credentials"])
def test_importing_costs_nothing_heavy(module: str) -> None:
    import subprocess
    import sys

    heavy = "pathlib dataclasses subprocess logging inspect json cryptography hashlib urllib.parse"
    program = (
        f"import sys, opendataflow_dagster.{module}\n"
        f"print(*[name for name in {heavy.split()} if name in sys.modules])"
    )
    root = Path(settings.__file__).parents[2]
    # -S: what site-packages preloads isn't ours.
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_psycopg_accepts_what_the_store_will_do_with_a_url() -> None:
    found = load_settings(environ={"DATAFLOW_URL": "jdbc:postgresql://h/db?user=own"})
    assert found.user == "own"
    joined = make_conninfo(found.url, user="other", password="pw")
    assert conninfo_to_dict(joined)["user"] == "other"


def test_within_a_project_of_pipelines_every_command_uses_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop/pipelines/a").mkdir(parents=True)
    (tmp_path / "shop/project.yml").write_text("pipelines: []\n")
    monkeypatch.chdir(tmp_path / "shop/pipelines/a")
    assert load_settings().url == f"sqlite:///{tmp_path}/shop/.dataflow/dataflow.db"
    (tmp_path / "shop/dataflow.properties").write_text("url=sqlite:///mine.db\n")
    assert load_settings().url == f"sqlite:///{tmp_path}/shop/mine.db"
    Path(".dataflow").mkdir()
    Path(".dataflow/dataflow.db").touch()
    assert load_settings().url == f"sqlite:///{tmp_path}/shop/pipelines/a/.dataflow/dataflow.db"


def test_a_project_of_another_tool_has_no_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app/src").mkdir(parents=True)
    (tmp_path / "app/project.yml").touch()
    monkeypatch.chdir(tmp_path / "app/src")
    assert load_settings().url == f"sqlite:///{tmp_path}/app/src/.dataflow/dataflow.db"
