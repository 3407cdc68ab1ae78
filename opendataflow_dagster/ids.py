"""What may be the id of a dataset, a job or a chunk; their natural order; and names misspelled."""

import re

from .errors import WrongUse

MAX_ID_BYTES = 500
"""Bytes of an id: a job's, a chunk's and its natural key must fit one index row of PostgreSQL."""

_DIGITS = re.compile("[0-9]+")
_HIJACKS = (  # compiled where it is used: most runs don't pay for it
    r"(PATH|IFS|ENV|BASH_ENV|SHELLOPTS|BASHOPTS|PS4|CDPATH|GLOBIGNORE|PROMPT_COMMAND|HOME|SHELL|USER"
    r"|LOGNAME|TMPDIR|PASSKEY.*|LD_.*|DYLD_.*|PYTHON.*|PERL.*|RUBY.*|NODE_.*|JAVA_TOOL_OPTIONS|_JAVA_OPTIONS"
    r"|GCONV_PATH|LOCPATH|NLSPATH|MALLOC_.*|GLIBC_.*|BASH_FUNC_.*|DATAFLOW_.*|dataflow_.*|dataid|jobid)"
)


def natural_key(dataid: str) -> str:
    """A sort key by which 2 comes before 10: each run of digits is led by its length."""
    return _DIGITS.sub(_led_by_length, dataid)


def check_id(kind: str, value: str) -> str:
    """The id itself, if it can be kept exactly as it is; `kind` is a word for messages."""
    if not value:
        raise WrongUse(f"The {kind} is empty. Give it a name.")
    if "\0" in value:
        raise WrongUse(f"The {kind} {_shown(value)} has a NUL character, which no database keeps.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise WrongUse(
            f"The {kind} {_shown(value)} isn't valid Unicode. Give it in UTF-8."
        ) from None
    if size > MAX_ID_BYTES:
        raise WrongUse(
            f"The {kind} {_shown(value)} has {size} bytes. At most {MAX_ID_BYTES} are kept."
        )
    if kind != "dataid" and any(
        ord(letter) < 32 or ord(letter) == 127 or letter == "=" for letter in value
    ):
        raise WrongUse(
            f"The {kind} {_shown(value)} has a control character or '=', so it can't be part of an "
            "environment variable's name. Give it another name."
        )
    return value


def check_variable(name: str) -> str:
    """The name of a job's environment item, if it can't hijack the process that it is given to."""
    if hijacks(name):
        raise WrongUse(
            f"A job's environment can't set {name}: it would change what the process itself runs. "
            "Choose another name and read it in the script."
        )
    return check_id("environment item", name)


def check_text(kind: str, value: str | None) -> None:
    """Refuse a text that no database keeps, or no process gets, as it is."""
    if value is None:
        return
    if "\0" in value:
        raise WrongUse(f"The {kind} has a NUL character, which no database keeps. Leave it out.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WrongUse(f"The {kind} isn't valid Unicode. Give it in UTF-8.") from None


def hijacks(name: str) -> bool:
    return re.fullmatch(_HIJACKS, name) is not None


def _shown(value: str) -> str:
    return ascii(value if len(value) <= 40 else value[:37] + "...")


def _led_by_length(digits: re.Match[str]) -> str:
    number = digits[0].lstrip("0")
    return f"{len(number):03d}{number}"
