"""`odf encrypt`, `odf decrypt` and `odf rotate`: no secret is ever an argument."""

import os
import sys
from contextlib import suppress

import click

from ..config import credentials
from ..config.credentials import find_passkey
from ..config.settings import load_settings
from ..errors import CredentialError, DataflowError, WrongUse

NO_ARGUMENTS = {"ignore_unknown_options": True}
"""So that a password that begins with a dash isn't repeated in a message either."""

for_dataset = click.option(
    "--dataset", metavar="ID", help="The value is this dataset's encryptedpass."
)
stray = click.argument("stray", nargs=-1, type=click.UNPROCESSED, metavar="")


@click.command(
    context_settings=NO_ARGUMENTS,
    epilog="Example: odf encrypt --dataset bobin < password.txt",
)
@for_dataset
@stray
@click.pass_context
def encrypt(ctx: click.Context, dataset: str | None, stray: tuple[str, ...]) -> None:
    """Encrypt a text from standard input, or from a prompt that doesn't show it.

    Without --dataset, the value is for `encrypted` of the properties file.
    """
    purpose = _purpose("encrypt", dataset, stray)
    key = find_passkey()
    if key is None:
        key = _prompt_for_key("PASSKEY", "The passkey")
    text = _text("The text to encrypt", twice=True)
    click.echo(credentials.encrypt(text, key, purpose=purpose, beside=_in_properties(ctx)))


@click.command(
    context_settings=NO_ARGUMENTS,
    epilog="Example: echo 'odf1.scrypt…' | odf decrypt --dataset bobin",
)
@for_dataset
@stray
def decrypt(dataset: str | None, stray: tuple[str, ...]) -> None:
    """Decrypt a value from standard input, or from a prompt, and print the text."""
    purpose = _purpose("decrypt", dataset, stray)
    key = find_passkey()
    if key is None:
        key = _prompt_for_key("PASSKEY", "The passkey")
    click.echo(credentials.decrypt(_text("The value to decrypt"), key, purpose=purpose))


@click.command(epilog="Example: (umask 077; odf key > /etc/odf/passkey)")
def key() -> None:
    """Print a new random passkey.

    Nobody can guess it, so a job that needs a password starts without the fifth of a second that
    a passkey of your own costs. Keep it in a file that PASSKEY_FILE names; to change to it, run
    `odf rotate`.
    """
    click.echo(credentials.new_key())


@click.command(
    context_settings=NO_ARGUMENTS,
    epilog="Example: PASSKEY_FILE=old.key NEW_PASSKEY_FILE=new.key odf rotate",
)
@stray
@click.pass_context
def rotate(ctx: click.Context, stray: tuple[str, ...]) -> None:
    """Encrypt everything again, with another passkey.

    The key until now is that of PASSKEY or PASSKEY_FILE, the new one that of NEW_PASSKEY or
    NEW_PASSKEY_FILE. Killed or refused, it can be run again with the same two keys. When it is
    through, give the new key to those who run jobs. With the same key as both, it renews the values
    that `odf doctor` calls weak.
    """
    from ..store import rotate_passkey

    if stray:
        raise WrongUse(
            "`odf rotate` takes no arguments: the keys come from the environment or a prompt."
        )
    old = find_passkey() or _prompt_for_key("PASSKEY", "The passkey until now")
    new = find_passkey(os.environ, "NEW_PASSKEY") or _prompt_for_key(
        "NEW_PASSKEY", "The new passkey", twice=True
    )
    done = rotate_passkey.rotate(load_settings(ctx.find_root().obj), old, new)
    file = " and `encrypted` of the properties file" if done.file else ""
    click.echo(
        f"{done.rows} rows of dataset{file} are encrypted anew; {done.kept} values were already.",
        err=True,
    )
    if os.environ.get("DATAFLOW_ENCRYPTED"):
        click.echo(
            "DATAFLOW_ENCRYPTED is yours to change: make its new value with `odf encrypt`.",
            err=True,
        )
    click.echo(
        "Now give the new passkey to all who run jobs, and run `odf doctor` with it.", err=True
    )


def _in_properties(ctx: click.Context) -> list[str]:
    """The value in the properties file, whose salt those of datasets share."""
    with suppress(DataflowError):
        if value := load_settings(ctx.find_root().obj).encrypted:
            return [value]
    return []


def _purpose(command: str, dataset: str | None, stray: tuple[str, ...]) -> credentials.Purpose:
    if stray:
        raise WrongUse(
            f"`odf {command}` takes no argument but --dataset ID: other users can read a command "
            "line, and shells remember it. Give the text on standard input, as in "
            f"odf {command} < FILE, or type it at the prompt."
        )
    return credentials.for_dataset(dataset) if dataset else credentials.PROPERTIES


def _text(what: str, *, twice: bool = False) -> str:
    if sys.stdin.isatty():
        return click.prompt(what, hide_input=True, confirmation_prompt=twice, err=True)
    return given_text()


def given_text() -> str:
    """All of standard input, without the end of its last line."""
    raw = sys.stdin.buffer.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = None
    if text is None:
        raise CredentialError("The text on standard input isn't UTF-8. Convert it, and try again.")
    return text.removesuffix("\n").removesuffix("\r")


def _prompt_for_key(variable: str, what: str, *, twice: bool = False) -> str:
    if not sys.stdin.isatty():
        raise CredentialError(
            f"No passkey is set. Set {variable}, or {variable}_FILE to a file that holds it."
        )
    return click.prompt(what, hide_input=True, confirmation_prompt=twice, err=True)
