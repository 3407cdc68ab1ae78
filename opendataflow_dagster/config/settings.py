"""Settings: the environment overrides `dataflow.properties`, which overrides the default."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..errors import DataflowError, WrongUse

FILE_NAME = "dataflow.properties"
PROJECT = "project.yml"
FOLDER = ".dataflow"
DEFAULT_URL = f"sqlite:///{FOLDER}/dataflow.db"
DEFAULT_SCHEMA = "dataflow"
KEYS = ("url", "user", "schema", "encrypted", "timezone")
SPARK = "spark."
"""How the other keys of a properties file begin."""

BUILT_IN = "built-in default"
ENVIRONMENT = "environment"


class Settings(NamedTuple):
    """Where the tables are and how to get in.

    `user` is the effective one: pass it beside `url`, which may name another.
    `timezone` None is the machine's. `origin` says where `url` came from.
    """

    url: str
    user: str | None = None
    encrypted: str | None = None
    schema: str = DEFAULT_SCHEMA
    timezone: str | None = None
    origin: str = BUILT_IN
    path: str | None = None
    values: Mapping[str, str] = {}

    def get(self, key: str, default: str | None = None) -> str | None:
        """Read any key: `spark.master` is also found as DATAFLOW_SPARK_MASTER."""
        return self.values.get(key, self.values.get(flat_key(key), default))

    def __repr__(self) -> str:
        return f"Settings({redact(self.url)!r}, schema={self.schema!r}, origin={self.origin!r})"


def load_settings(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    home: str | os.PathLike[str] | None = None,
) -> Settings:
    """Find and read the settings; `path` is what `--config` names.

    `home` is where the properties file is, unless the working folder has one, and the embedded
    default: by itself the project of pipelines around, if the working folder has no tables.
    """
    home = _project_around() if home is None else os.fspath(home)
    file, text = _find_file(path, environ, home)
    in_file = parse_properties(text) if file else {}
    for key in in_file:
        if key not in KEYS and not key.startswith(SPARK):
            raise _unknown(key, file or "")
    in_env = {
        name.removeprefix("DATAFLOW_").lower(): value
        for name, value in environ.items()
        if name.startswith("DATAFLOW_") and name != "DATAFLOW_PROPERTIES" and value
    }
    values = {key: in_env.get(flat_key(key), value) for key, value in in_file.items()} | in_env

    folder = os.path.dirname(file) if file else ""
    if "url" in in_env:
        raw_url, origin, folder = in_env["url"], ENVIRONMENT, ""
    elif "url" in in_file:
        raw_url, origin = in_file["url"], file or ""
    else:
        raw_url, origin, folder = DEFAULT_URL, BUILT_IN, home or folder
    url, jdbc_schema = _normalise(raw_url.strip(), folder, origin)

    # Credentials go with the url that they were written beside.
    url_user, url_has_password = _credentials_in(url)
    file_encrypted = in_file.get("encrypted", "")
    if url_has_password or (url_user and origin == ENVIRONMENT):
        file_encrypted = ""
    return Settings(
        url=url,
        user=in_env.get("user", "").strip() or url_user or in_file.get("user", "").strip() or None,
        encrypted=in_env.get("encrypted", "").strip() or file_encrypted.strip() or None,
        schema=values.get("schema", "").strip() or jdbc_schema or DEFAULT_SCHEMA,
        timezone=values.get("timezone", "").strip() or None,
        origin=origin,
        path=file,
        values=values,
    )


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a folder and those above it; `.dataflow` is made for its owner alone."""
    path = os.path.abspath(path)
    if ours := private_folder(path):
        os.makedirs(ours, 0o700, exist_ok=True)
    os.makedirs(path, exist_ok=True)


def private_folder(path: str) -> str | None:
    """The folder `.dataflow` that an absolute path is in, if it is in one."""
    above, found, _ = f"{path}{os.sep}".rpartition(f"{os.sep}{FOLDER}{os.sep}")
    return f"{above}{os.sep}{FOLDER}" if found else None


def redact(url: str) -> str:
    """Hide the passwords in a URL; if it is ambiguous, hide too much rather than too little."""
    url = re.sub(r"(?is)^(jdbc:oracle:\w+:[^/@]*/)[^@]*@", r"\1***@", url)
    url = re.sub(r"(?i)((?:^|[?&;,(\s])[\w.%-]*(?:password|passwd|pwd)\s*=)[^&]*", r"\1***", url)
    return re.sub(r"(?s)(://[^:@/]*:).*@", r"\1***@", url)


def check_postgres_url(url: str) -> None:
    """Refuse a URL in which libpq would take a part of the password for a host, and show it."""
    rest = url.partition("://")[2]
    found = re.match(r"(?s)[^:/@?#\[]*:(.*)@", rest)
    password = found[1] if found else ""
    is_port = re.match(r"\d*[/?,]", password)  # then the @ is one of the parameters'
    encoded = not re.search(r"%(?![0-9A-Fa-f]{2})|%00", rest)
    if encoded and (is_port or not re.search(r"[@/?#]", password)):
        return
    raise WrongUse(
        f"The password in the url {redact(url)} contains a character that has a meaning "
        "in URLs. Write @ as %40, / as %2F, ? as %3F, # as %23 and % as %25; or remove "
        "the password and set `encrypted`: see odf encrypt --help"
    )


def flat_key(key: str) -> str:
    """A key as it stands in the name of a variable."""
    return key.replace(".", "_").replace("-", "_").lower()


def _unknown(key: str, file: str) -> WrongUse:
    from ..util.text import did_you_mean, printable

    like = did_you_mean(key, KEYS)
    head, dot, _ = key.partition(".")
    if not like and dot:
        like = did_you_mean(f"{head}.", [f"{SPARK}…"])
    return WrongUse(
        f"{file} has an unknown key {printable(key)[:40]!r}{like or '.'} Known keys are "
        f"{', '.join(KEYS)}, and keys that begin with `{SPARK}`. Correct that line."
    )


def _project_around() -> str:
    """The project in a folder of which we are; nothing if there is none, or tables are here."""
    if os.path.exists(DEFAULT_URL.removeprefix("sqlite:///")):
        return ""
    folder = os.getcwd()
    while True:
        if os.path.isfile(os.path.join(folder, PROJECT)):
            # Other tools have a file of that name, too.
            return folder if os.path.isdir(os.path.join(folder, "pipelines")) else ""
        above = os.path.dirname(folder)
        if above == folder:
            return ""
        folder = above


def _find_file(
    path: str | os.PathLike[str] | None, environ: Mapping[str, str], home: str
) -> tuple[str | None, str]:
    named_by, named = "--config", path
    if path is None:
        named_by, named = "DATAFLOW_PROPERTIES", environ.get("DATAFLOW_PROPERTIES") or None
    file = FILE_NAME if named is None else os.fspath(named)
    if named is None and not os.path.exists(FILE_NAME):
        file = os.path.join(home, FILE_NAME)
    try:
        with open(file, "rb") as opened:
            text, _ = _decode(opened.read())
    except FileNotFoundError:
        if named is None:
            return None, ""
        raise WrongUse(
            f"There is no properties file {file!r}, which {named_by} names. Correct the "
            "path, or remove it to use ./dataflow.properties."
        ) from None
    except OSError as error:
        raise WrongUse(
            f"The properties file {file!r} can't be read: {error.strerror}. "
            "Correct its permissions, or name another file with --config."
        ) from None
    return os.path.abspath(file), text


# --- urls ---------------------------------------------------------------------------------------


def _normalise(url: str, folder: str, origin: str) -> tuple[str, str | None]:
    """A `postgresql://` or `sqlite:////absolute` url, and the schema that a JDBC url named."""
    path = url.removeprefix("sqlite:///")
    if path not in (url, "", ":memory:"):  # memory would be gone with this very command
        return "sqlite:///" + os.path.abspath(os.path.join(folder, os.path.expanduser(path))), None
    if native := re.match(r"postgres(?:ql)?(?:\+\w+)?://", url):
        return "postgresql://" + url[native.end() :], None
    if url.startswith("jdbc:postgresql:"):
        return _from_jdbc(url.removeprefix("jdbc:postgresql:"))
    if url.startswith("jdbc:h2:"):
        raise WrongUse(
            f"The url of {origin} is an H2 database, which only Java can open. Set "
            "url=sqlite:///dataflow.db or postgresql://…, run `odf init`, and load the "
            "exported tables with `odf load FOLDER`."
        )
    scheme = re.match(r"(?:jdbc:)?[a-z][\w+]*:(?=/|\w)", url)  # the rest may hold a password
    raise WrongUse(
        f"The url of {origin}, {scheme[0] + '…' if scheme else 'without a scheme'}, can't be used: "
        "it must be postgresql://HOST/DB, jdbc:postgresql://HOST/DB or sqlite:///FILE. "
        "Correct it, then run `odf doctor`."
    )


FROM_JDBC = {
    "user": "user",
    "password": "password",
    "sslmode": "sslmode",
    "sslrootcert": "sslrootcert",
    "sslcert": "sslcert",
    "sslkey": "sslkey",
    "sslpassword": "sslpassword",
    "connectTimeout": "connect_timeout",
    "ApplicationName": "application_name",
    "options": "options",
}
# Without it, one of several hosts may be a read-only standby.
SERVER_TYPES = {
    "master": "primary",
    "primary": "primary",
    "secondary": "standby",
    "slave": "standby",
    "preferSecondary": "prefer-standby",
    "preferSlave": "prefer-standby",
}


def _from_jdbc(rest: str) -> tuple[str, str | None]:
    """Translate what follows `jdbc:postgresql:` into a libpq url, and the schema it named."""
    from urllib.parse import parse_qsl, quote, unquote_plus

    address, _, query = rest.partition("?")
    check_postgres_url(f"postgresql:{address}")
    hosts, _, database = address[2:].partition("/") if address[:2] == "//" else ("", "", address)
    # The Java driver goes to localhost where libpq would look for a Unix socket.
    hosts = ",".join(
        host if host and host[0] != ":" else "localhost" + host for host in hosts.split(",")
    )
    given = dict(parse_qsl(query, keep_blank_values=True))
    wanted = {FROM_JDBC[key]: value for key, value in given.items() if key in FROM_JDBC}
    if given.get("ssl", "false").lower() in ("true", ""):
        wanted.setdefault("sslmode", "require")
    if server_type := SERVER_TYPES.get(given.get("targetServerType", "")):
        wanted["target_session_attrs"] = server_type

    url = f"postgresql://{hosts}/{quote(unquote_plus(database.strip('/')), safe='')}"
    parameters = "&".join(f"{key}={quote(value, safe='')}" for key, value in wanted.items())
    schema = given.get("currentSchema", "").split(",")[0].strip()
    return f"{url}?{parameters}" if parameters else url, schema or None


def _credentials_in(url: str) -> tuple[str | None, bool]:
    """The user that a postgresql url names, and whether it has a password too."""
    if not url.startswith("postgresql://"):
        return None, False
    from urllib.parse import unquote

    userinfo = re.match(r"postgresql://([^:@/?]*)(:[^@/]*)?@", url)
    user = re.search(r"[?&]user=([^&]*)", url) or userinfo
    has_password = bool(re.search(r"[?&]password=[^&]", url) or (userinfo and userinfo[2]))
    return (unquote(user[1]) or None) if user else None, has_password


# --- the properties file, in Java's syntax ------------------------------------------------------

_FOLD = r"\\(?:\r\n|\r|\n)[ \t\f]*+"  # a backslash joins the next line, less its indent
_GAP = rf"(?:[ \t\f]|{_FOLD})*+"
_ENTRY = (  # compiled where it is used: a run without a file doesn't pay for it
    rf"(?:{_GAP}[#!][^\r\n]*+"
    rf"|(?P<head>{_GAP}(?P<key>(?:[^\\=: \t\f\r\n]|{_FOLD}|\\[^\r\n])*+){_GAP}[=:]?{_GAP})"
    r"(?P<value>(?:[^\\\r\n]|\\(?:\r\n|.)?+)*+))"
    r"(?:\r\n|\r|\n|\Z)"
)
_ESCAPE = rf"{_FOLD}|\\(?:u([0-9a-fA-F]{{4}})|(.?))"
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def parse_properties(text: str) -> dict[str, str]:
    """Read the text of a Java `.properties` file; of a duplicated key, the last one wins."""
    return {_unescape(entry["key"]): _unescape(entry["value"]) for entry in _entries(text)}


def read_properties(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read a `.properties` file that is known to be there."""
    with open(path, "rb") as file:
        return parse_properties(_decode(file.read())[0])


def replace_property(path: str | os.PathLike[str], key: str, value: str) -> None:
    """Change one key of a file, or append it; every other byte and the mode stay.

    A reader sees the old file or the new one, never a part. A link stays a link.
    """
    path = os.path.realpath(path)
    try:
        with open(path, "rb") as file:
            text, encoding = _decode(file.read())
            _replace_file(path, _with(text, key, value).encode(encoding), os.fstat(file.fileno()))
    except OSError as error:
        raise DataflowError(
            f"{path} wasn't changed: {error.strerror}. Make the file and its folder "
            "writable, then run the command again."
        ) from None


def _entries(text: str) -> Iterator[re.Match[str]]:
    after_mark = 1 if text.startswith("\ufeff") else 0
    for entry in re.compile(_ENTRY, re.DOTALL).finditer(text, after_mark):
        if entry["head"] is not None and entry[0].strip():  # neither a comment nor blank
            yield entry


def _with(text: str, key: str, value: str) -> str:
    escaped = _escape(value, "\\")
    if escaped.startswith(" "):
        escaped = "\\" + escaped
    found = [entry for entry in _entries(text) if _unescape(entry["key"]) == key]
    if found:
        last = found[-1]
        joint = "" if last["head"][-1:] in tuple("=: \t\f") else "="
        return text[: last.start("value")] + joint + escaped + text[last.end("value") :]
    newline = "\r\n" if "\r\n" in text else "\n"
    before = text if text.endswith(("\n", "\r")) or text in ("", "\ufeff") else text + newline
    return before + _escape(key, "\\=:#! ") + "=" + escaped + newline


def _unescape(raw: str) -> str:
    def plain(found: re.Match[str]) -> str:
        if found[1]:
            return chr(int(found[1], 16))
        return _CONTROL.get(found[2], found[2]) if found[2] else ""

    text = re.sub(_ESCAPE, plain, raw, flags=re.DOTALL)
    if re.search("[\ud800-\udfff]", text):  # Java writes an emoji as two escapes
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _escape(text: str, special: str) -> str:
    def escaped(char: str) -> str:
        if char in special:
            return "\\" + char
        if " " <= char <= "~":
            return char
        units = char.encode("utf-16-be", "surrogatepass").hex()
        return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))

    return "".join(map(escaped, text))


def _decode(raw: bytes) -> tuple[str, str]:
    """Java reads Latin-1, editors write UTF-8: both come back as the same bytes."""
    try:
        return raw.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        return raw.decode("latin-1"), "latin-1"


def _replace_file(path: str, content: bytes, like: os.stat_result) -> None:
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{os.urandom(6).hex()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(handle, "wb") as file:
            if (like.st_uid, like.st_gid) != (os.getuid(), os.getgid()):
                os.fchown(handle, like.st_uid, like.st_gid)
            os.fchmod(handle, like.st_mode & 0o7777)
            file.write(content)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    parent = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
