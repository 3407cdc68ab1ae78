"""Encrypted values, and the passkey of this process.

The original's values are read, versioned and salted ones are written:

    odf1.scrypt.15-8-3.SALT.BOX
    odf2.hkdf.SALT.BOX

The key is scrypt(passkey, SALT) with N=2^15, r=8, p=3: a passkey that a person has chosen needs a
derivation that is expensive to repeat. For one that `odf key` has made, the key is HKDF-
SHA256(its 32 bytes, SALT, "odf2"). BOX is an IV of 12 bytes and what AES-256-GCM makes of the
text, with the purpose as associated data. Both are in unpadded URL-safe base64, so that no shell,
SQL literal or properties file gives a character a meaning. The values of a database share their
salt, so that a process derives one key for all.

Errors are raised outside the `except` that saw the cause: its arguments may hold a secret.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from ..errors import CredentialError
from ..util.text import typed

SALT_BYTES = 16
IV_BYTES = 12
TAG_BYTES = 16
COST = (15, 8, 3)  # log2 N, r, p: 32 MiB and about 0.2 s; as much as N=2^17, p=1
RANDOM_KEY = "odfkey1."
KEY_BYTES = 32
MOST_WORK = 2**21  # N·r·p that a value may ask for: 256 MiB and half a second


class Purpose(NamedTuple):
    """What a value is for: decrypting it for anything else fails."""

    label: str
    bound: bytes
    remake: str


PROPERTIES = Purpose(
    "`encrypted` of the properties file", b"properties\0encrypted", "`odf encrypt`"
)


def for_dataset(datasetid: str) -> Purpose:
    """The purpose of one dataset's `encryptedpass`."""
    return Purpose(
        f"encryptedpass of dataset {datasetid!r}",
        b"dataset\0" + datasetid.encode("utf-8", "surrogatepass") + b"\0encryptedpass",
        f"`odf encrypt --dataset {typed(datasetid)}`",
    )


def decrypt(value: str, passkey: str | None, *, purpose: Purpose) -> str:
    """Decrypt a value of either kind; refuse one that was encrypted for another purpose."""
    secret = _bytes_of(passkey, purpose)
    value = value.strip()
    if version := re.match(r"odf([0-9]+)\.", value):
        key, box = _open_envelope(value, version[1], passkey, secret, purpose)
        bound = purpose.bound
    else:
        key, box, bound = _legacy_key(secret), _legacy_box(value), None
    if box is None or len(box) < IV_BYTES + TAG_BYTES:
        raise CredentialError(
            f"{purpose.label} isn't an encrypted value: it is neither a base64 value "
            "of the Java original nor a complete odf1 or odf2 envelope. Encrypt it with "
            f"{purpose.remake}."
        )

    plain = _unseal(key, box, bound)
    if plain is None:
        raise CredentialError(
            f"{purpose.label} can't be decrypted: the passkey is wrong, or the value is "
            "damaged or was made for another dataset or field. Check PASSKEY or "
            f"PASSKEY_FILE, or encrypt it again with {purpose.remake}."
        )
    text = _utf8(plain)
    if text is None:
        raise CredentialError(
            f"{purpose.label} decrypts to something that isn't UTF-8 text. Encrypt it again "
            f"with {purpose.remake}."
        )
    return text


def password_of(
    datasetid: str, encrypted: str | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Return a dataset's password, decrypted now; None if it has none."""
    if not encrypted:
        return None
    return decrypt(encrypted, find_passkey(environ), purpose=for_dataset(datasetid))


def encrypt(
    text: str,
    passkey: str | None,
    *,
    purpose: Purpose,
    salt: bytes | None = None,
    beside: Iterable[str] = (),
) -> str:
    """Encrypt a text for `purpose`.

    The salt is the one that this process uses already, or else the most frequent one among the
    values `beside`, so that a reader of all of them derives one key.
    """
    secret = _bytes_of(passkey, purpose)
    plain = _encoded(text, "strict")
    if plain is None:
        raise CredentialError(
            f"The text for {purpose.label} isn't valid Unicode, so it can't be encrypted. "
            f"Enter it again with {purpose.remake}."
        )
    salt = salt or _salts.get(secret) or common_salt(beside) or os.urandom(SALT_BYTES)
    if len(salt) != SALT_BYTES:
        raise ValueError(f"A salt has {SALT_BYTES} bytes, not {len(salt)}.")

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    random = _random_key(passkey)
    if random:
        key, how = _expand(random, salt), ["odf2", "hkdf"]
    else:
        key, how = _derive(secret, salt, *COST), ["odf1", "scrypt", "-".join(map(str, COST))]
    iv = os.urandom(IV_BYTES)
    box = iv + AESGCM(key).encrypt(iv, plain, purpose.bound)
    return ".".join([*how, _base64(salt), _base64(box)])


def encrypt_as_original(text: str, passkey: str | None) -> str:
    """Write a value that the original reads too; it isn't bound to a dataset, nor salted."""
    from base64 import b64encode

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    key = _legacy_key(_bytes_of(passkey, PROPERTIES))
    plain = _encoded(text, "strict")
    if plain is None:
        raise CredentialError("The text isn't valid Unicode, so it can't be encrypted.")
    iv = os.urandom(IV_BYTES)
    return b64encode(iv + AESGCM(key).encrypt(iv, plain, None)).decode("ascii")


def new_key() -> str:
    """Return a random passkey, which needs no slow key derivation."""
    return RANDOM_KEY + _base64(os.urandom(KEY_BYTES))


def is_legacy(value: str) -> bool:
    """Whether the Java original encrypted this value."""
    box = _legacy_box(value.strip())
    return box is not None and len(box) >= IV_BYTES + TAG_BYTES


def is_encrypted(value: str) -> bool:
    """Whether a value looks like an encrypted one, of the original or of this package."""
    return re.match(r"odf[12]\.", value) is not None or is_legacy(value)


def is_weak(value: str) -> bool:
    """Whether a passkey is easier to guess from this value than from a new one."""
    envelope = re.match(_SCRYPT, value.strip())
    if not envelope:
        return is_legacy(value)
    log_n, r, p = (int(envelope[group]) for group in (1, 2, 3))
    return 2**log_n * r * p < 2 ** COST[0] * COST[1] * COST[2]


def salt_of(value: str) -> bytes | None:
    """The salt of a value; None for one of the original's, and for what isn't whole."""
    parts = value.strip().split(".")
    salt = _unbase64(parts[-2], url_safe=True) if re.match(r"odf[12]\.", value.strip()) else None
    return salt if salt and len(salt) == SALT_BYTES else None


def common_salt(values: Iterable[str]) -> bytes | None:
    """The salt that most of the values have."""
    salts = sorted(salt for value in values if (salt := salt_of(value)))
    return max(salts, key=salts.count, default=None)


def _bytes_of(passkey: str | None, purpose: Purpose) -> bytes:
    if not passkey:
        raise CredentialError(
            f"{purpose.label} needs a passkey, but none is set. Set PASSKEY, or set "
            "PASSKEY_FILE to a file that holds it, then run the command again."
        )
    # A byte of the environment that isn't UTF-8 arrives as a lone surrogate.
    secret = _encoded(passkey, "surrogateescape")
    if secret is None:
        raise CredentialError(
            f"The passkey for {purpose.label} isn't valid Unicode. "
            "Correct PASSKEY or PASSKEY_FILE, then run `odf doctor`."
        )
    return secret


_SCRYPT = r"odf1\.scrypt\.([1-9][0-9]?)-([1-9][0-9]?)-([1-9][0-9]?)\.([\w-]+)\.([\w-]+)\Z"
_HKDF = r"odf2\.hkdf\.([\w-]+)\.([\w-]+)\Z"


def _open_envelope(
    value: str, version: str, passkey: str | None, secret: bytes, purpose: Purpose
) -> tuple[bytes, bytes | None]:
    """The key and the box of an envelope; no box when it isn't whole."""
    if version not in ("1", "2"):
        raise CredentialError(
            f"{purpose.label} was encrypted by a newer version, in an envelope that this "
            "version can't read. Run: pip install --upgrade opendataflow-dagster"
        )
    parts = re.match(_SCRYPT if version == "1" else _HKDF, value)
    salt = salt_of(value)
    if not parts or not salt:
        return b"", None
    box = _unbase64(parts[parts.re.groups], url_safe=True)
    if version == "2":
        random = _random_key(passkey) or secret  # of a text, which opens nothing
        return _expand(random, salt), box
    log_n, r, p = int(parts[1]), int(parts[2]), int(parts[3])
    key = _derived(secret, salt, log_n, r, p) if 2**log_n * r * p <= MOST_WORK else None
    if key is None:
        raise CredentialError(
            f"{purpose.label} has key derivation settings that are invalid, or that need too "
            "much memory or time. The value was tampered with, or another program wrote "
            f"it. Encrypt it again with {purpose.remake}."
        )
    return key, box


def _derived(secret: bytes, salt: bytes, log_n: int, r: int, p: int) -> bytes | None:
    try:
        return _derive(secret, salt, log_n, r, p)
    except (ValueError, MemoryError):
        return None


_salts: dict[bytes, bytes] = {}
"""Passkey → the salt for what this process writes: the first of which it has derived a key."""


@lru_cache(maxsize=64)
def _derive(secret: bytes, salt: bytes, log_n: int, r: int, p: int) -> bytes:
    from hashlib import scrypt

    n = 2**log_n
    room = 128 * r * (n + p + 2) + 2**16  # what OpenSSL asks for, with a margin
    key = scrypt(secret, salt=salt, n=n, r=r, p=p, maxmem=room, dklen=32)
    if (log_n, r, p) == COST:
        _salts.setdefault(secret, salt)
    return key


def _random_key(passkey: str | None) -> bytes | None:
    """Return the bytes of a passkey from `odf key`; None for one that a person chose."""
    if not passkey or not passkey.startswith(RANDOM_KEY):
        return None
    raw = _unbase64(passkey.removeprefix(RANDOM_KEY), url_safe=True)
    return raw if raw and len(raw) == KEY_BYTES else None


def _expand(random: bytes, salt: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, salt, b"odf2").derive(random)


def _legacy_key(secret: bytes) -> bytes:
    from hashlib import sha512

    return sha512(secret).digest()[:32]


def _legacy_box(value: str) -> bytes | None:
    return _unbase64(value.rstrip("="), url_safe=False)


def _unseal(key: bytes, box: bytes, bound: bytes | None) -> bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(box[:IV_BYTES], box[IV_BYTES:], bound)
    except InvalidTag:
        return None


def _encoded(text: str, errors: str) -> bytes | None:
    try:
        return text.encode("utf-8", errors)
    except UnicodeEncodeError:
        return None


def _utf8(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _base64(raw: bytes) -> str:
    from base64 import urlsafe_b64encode

    return urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")


def _unbase64(text: str, *, url_safe: bool) -> bytes | None:
    """Read unpadded base64, as the one text that those bytes have; else None."""
    from base64 import b64decode, b64encode

    alphabet = b"-_" if url_safe else b"+/"
    try:
        raw = b64decode(text + "=" * (-len(text) % 4), alphabet, validate=True)
    except ValueError:
        return None
    return raw if b64encode(raw, alphabet).decode("ascii").rstrip("=") == text else None


# The passkey: read from the environment or a file, then kept in memory alone. A script of a job,
# and code of users in our own process, could read it in the environment: in `os.environ`, and in
# /proc/PID/environ, which shows what the process was started with. So each process of ours takes
# it out of both before it runs anything of theirs, and hands it to its own children by a pipe.

VARIABLES = ("PASSKEY", "NEW_PASSKEY")

_PR_SET_DUMPABLE = 4  # linux/prctl.h
_ENV_START = 47  # of the fields of /proc/PID/stat after the name

_kept: dict[str, tuple[str, str]] = {}
"""Variable → the passkey, and where it came from."""


def find_passkey(environ: Mapping[str, str] = os.environ, variable: str = "PASSKEY") -> str | None:
    """Return the passkey from PASSKEY, or from the file that PASSKEY_FILE names."""
    found = _look_up(environ, variable)
    return found[0] if found else None


def passkey_source(environ: Mapping[str, str] = os.environ) -> str | None:
    """Say where the passkey comes from; None if there is none."""
    found = _look_up(environ, "PASSKEY")
    return found[1] if found else None


def take_passkey() -> None:
    """Move the passkey from this process's environment to its memory, and protect it there.

    Afterwards, nobody but root can attach a debugger, and the process leaves no core dump.
    """
    taken = []
    for variable in VARIABLES:
        if os.environ.get(variable):
            _kept[variable] = os.environ.pop(variable), variable
            taken.append(os.fsencode(f"{variable}="))
        elif passkey := _read_descriptor(os.environ.get(f"{variable}_FILE", "")):
            _kept[variable] = passkey, _file_of(variable)
    if taken:
        _erase(tuple(taken))
    if _kept or any(os.environ.get(f"{variable}_FILE") for variable in VARIABLES):
        _close_memory()


@contextmanager
def handed_on() -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """Return the environment and the descriptors for a child process of this package."""
    if "PASSKEY" not in _kept:
        yield dict(os.environ), ()
        return
    reading, writing = os.pipe()
    try:
        with open(writing, "w", encoding="utf-8", errors="surrogateescape") as pipe:
            pipe.write(_kept["PASSKEY"][0])
        yield {**os.environ, "PASSKEY_FILE": f"/dev/fd/{reading}"}, (reading,)
    finally:
        os.close(reading)


def hand_on_by_multiprocessing() -> None:
    """Let children that `multiprocessing` starts have the passkey, as Dagster starts its runs.

    What is in `_config` of a process is pickled for its children, as its `authkey` is: it goes
    through the pipe by which they get their work.
    """
    if not _kept:
        return
    from multiprocessing.process import current_process

    current_process()._config["opendataflow_passkey"] = HandedOn()  # type: ignore[attr-defined]


class HandedOn:
    """A handle to the passkeys in memory: pickled for a child process, it passes them on."""

    def __reduce__(self) -> tuple:
        from multiprocessing.context import get_spawning_popen

        return _receive, ({} if get_spawning_popen() is None else dict(_kept),)


def _receive(kept: dict[str, tuple[str, str]]) -> HandedOn:
    _kept.update(kept)
    if kept:
        _close_memory()
    return HandedOn()


def _look_up(environ: Mapping[str, str], variable: str) -> tuple[str, str] | None:
    if passkey := environ.get(variable):
        return passkey, variable
    if variable in _kept:
        return _kept[variable]
    path = environ.get(f"{variable}_FILE")
    if not path:
        return None
    reason = "it is empty"
    passkey = ""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            passkey = _without_newline(file.read())
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if not passkey:
        raise CredentialError(
            f"The passkey file {path!r}, named by {variable}_FILE, can't be used: {reason}. "
            f"Correct it, or set {variable}, then run `odf doctor`."
        )
    return passkey, _file_of(variable)


def _file_of(variable: str) -> str:
    return f"the file that {variable}_FILE names"


def _read_descriptor(path: str) -> str | None:
    """Read an open file that this process was started with, and close it, so no child gets it.

    It couldn't be opened again by its name if it belongs to another user.
    """
    for folder in ("/dev/fd/", "/proc/self/fd/"):
        number = path.removeprefix(folder)
        if number != path and number.isascii() and number.isdigit() and int(number) > 2:
            try:
                with open(int(number), encoding="utf-8", errors="surrogateescape", newline="") as f:
                    return _without_newline(f.read())
            except OSError:  # `find_passkey` tells it
                return None
    return None


def _without_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _erase(starts: tuple[bytes, ...]) -> None:
    """Overwrite variables in the block of memory that /proc/PID/environ shows.

    Not by NUL: two of them end the block for psutil and others.
    """
    if sys.platform != "linux":
        return
    try:
        from _ctypes import _SimpleCData

        with open("/proc/self/environ", "rb", 0) as file:
            block = file.read()
        with open("/proc/self/stat", "rb", 0) as file:
            address = int(file.read().rpartition(b")")[2].split()[_ENV_START])
    except (ImportError, OSError):  # no ctypes, no /proc
        return

    class Byte(_SimpleCData):  # type: ignore[type-arg]
        _type_ = "c"

    for entry in block.split(b"\0"):
        for start in starts:
            if address and entry.startswith(start):
                for at in range(len(start), len(entry)):
                    Byte.from_address(address + at).value = b"*"
        address += len(entry) + 1 if address else 0


def _close_memory() -> None:
    """Keep everyone but root from reading this process's memory and environment, or tracing it."""
    from ..util.system import libc_function

    if sys.platform == "linux" and (prctl := libc_function("prctl")):
        prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
