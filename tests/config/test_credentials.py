"""The original's values are read; ours are bound to their row, and no failure shows a secret."""

import base64
import hashlib
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opendataflow_dagster.config import credentials
from opendataflow_dagster.config.credentials import (
    PROPERTIES,
    decrypt,
    encrypt,
    find_passkey,
    for_dataset,
    is_legacy,
    is_weak,
    new_key,
)
from opendataflow_dagster.errors import CredentialError

VECTORS = [
    ("ZpLfE+uTYE2mdmjOPrukol3yu+cpAHBnmL6trHa9PHGj", "plugh"),
    ("U3iP2Wxdjmo63GI4YtVBuJIGf0v5nj3r1KpKzsHsGc4gow==", "secret"),
    (
        "jClqNN2z5hhv5O8PFDnHeyCq1iOsnyojoZ4cYxqx9wQB0aIaeroPzG9/7ICvM+h8",
        'pässwörd "q" $HOME',
    ),
]
PASSKEY = "xyzzy-Passkey"
TEXT = "tr0ub4dor-Secret"
SALT = b"0123456789abcdef"  # one for all, so that the suite derives one key
BOB = for_dataset("bobin")


def ours(text: str = TEXT, purpose: credentials.Purpose = BOB) -> str:
    return encrypt(text, PASSKEY, purpose=purpose, salt=SALT)


def refused(call: Callable[[], object], *hidden: str) -> str:
    """Return the message of the CredentialError, after searching everything for secrets."""
    with pytest.raises(CredentialError) as caught:
        call()
    error = caught.value
    assert error.__cause__ is None
    assert error.__context__ is None
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # the lines of this file spell out some of the secrets
    assert frames, "raised by the code under test"
    shown = "".join(traceback.format_exception(type(error), error, frames)) + repr(error.args)
    for secret in (TEXT, PASSKEY, *hidden):
        assert secret not in shown
    assert re.search("`|PASSKEY|Run: ", str(error)), "a message says what to do next"
    return str(error)


# --- the original's values ---


@pytest.mark.parametrize(("value", "text"), VECTORS)
@pytest.mark.parametrize("purpose", [BOB, PROPERTIES])
def test_the_originals_values_are_read_for_any_purpose(
    value: str, text: str, purpose: credentials.Purpose
) -> None:
    assert decrypt(value, "plugh", purpose=purpose) == text
    assert decrypt(f" {value}\n", "plugh", purpose=purpose) == text


@pytest.mark.parametrize(("value", "text"), VECTORS)
def test_every_changed_byte_of_the_originals_values_is_noticed(value: str, text: str) -> None:
    raw = base64.b64decode(value)
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1
        damaged = base64.b64encode(changed).decode()
        with pytest.raises(CredentialError):
            decrypt(damaged, "plugh", purpose=BOB)


def test_values_of_the_original_differ_from_ours_and_from_anything_else() -> None:
    assert [is_legacy(value) for value, _ in VECTORS] == [True] * 3
    assert not is_legacy(ours())
    assert not is_legacy("secret")
    assert not is_legacy("")
    assert not is_legacy(base64.b64encode(b"x" * 27).decode())


# --- ours ---


def test_the_envelope_has_its_documented_form_and_can_be_opened_by_hand() -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    version, kdf, cost, salt, box = encrypt(TEXT, PASSKEY, purpose=BOB).split(".")
    assert (version, kdf, cost) == ("odf1", "scrypt", "15-8-3")

    def raw(part: str) -> bytes:
        return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))

    key = hashlib.scrypt(
        PASSKEY.encode(), salt=raw(salt), n=2**15, r=8, p=3, maxmem=2**26, dklen=32
    )
    bound = b"dataset\0bobin\0encryptedpass"
    assert AESGCM(key).decrypt(raw(box)[:12], raw(box)[12:], bound) == TEXT.encode()


def test_a_value_means_nothing_to_a_shell_sql_or_a_properties_file() -> None:
    assert re.fullmatch(r"[A-Za-z0-9._-]+", ours("quote ' \" $HOME \\ = : #"))


def test_no_two_values_share_their_iv_and_no_two_passkeys_their_salt() -> None:
    one, two = (encrypt(TEXT, PASSKEY, purpose=BOB).split(".") for _ in range(2))
    assert one[3] == two[3]
    assert one[4][:16] != two[4][:16]
    other = encrypt(TEXT, "another-" + PASSKEY, purpose=BOB).split(".")
    assert other[3] != one[3]


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_decrypted_as_it_was(text: str) -> None:
    assert decrypt(ours(text), PASSKEY, purpose=BOB) == text


@pytest.mark.parametrize("passkey", ["pässwört", "🔑" * 40, " ", "a\0b", "bytes\udcff"])
def test_any_passkey_works_but_only_that_one(passkey: str) -> None:
    value = encrypt(TEXT, passkey, purpose=BOB, salt=SALT)
    assert decrypt(value, passkey, purpose=BOB) == TEXT
    refused(lambda: decrypt(value, passkey + "x", purpose=BOB))


def test_every_changed_character_of_a_new_value_is_noticed() -> None:
    value = ours()
    for at, old in enumerate(value):
        if value[:at].count(".") == 2:  # the costs: a derivation each; they have their own test
            continue
        for new in {"A", "b", "_", "."} - {old}:
            damaged = value[:at] + new + value[at + 1 :]
            if value[:at].count(".") == 3 and at % 6:
                continue  # a changed salt costs a derivation too: every sixth will do
            with pytest.raises(CredentialError):
                decrypt(damaged, PASSKEY, purpose=BOB)
    for cut in range(len(value)):
        with pytest.raises(CredentialError):
            decrypt(value[:cut], PASSKEY, purpose=BOB)


@pytest.mark.parametrize("cost", ["14-8-1", "15-7-1", "15-8-2", "1-1-1"])
def test_a_changed_cost_is_noticed(cost: str) -> None:
    damaged = ours().replace("15-8-3", cost)
    assert "can't be decrypted" in refused(lambda: decrypt(damaged, PASSKEY, purpose=BOB))


@pytest.mark.parametrize(
    ("made_for", "read_for"),
    [
        (BOB, for_dataset("bobout")),
        (BOB, for_dataset("BOBIN")),
        (for_dataset("caf\u00e9"), for_dataset("cafe\u0301")),
        (BOB, PROPERTIES),
        (PROPERTIES, BOB),
    ],
)
def test_a_value_copied_to_another_place_is_refused(
    made_for: credentials.Purpose, read_for: credentials.Purpose
) -> None:
    value = ours(purpose=made_for)
    assert decrypt(value, PASSKEY, purpose=made_for) == TEXT
    message = refused(lambda: decrypt(value, PASSKEY, purpose=read_for))
    assert read_for.label in message
    assert "another dataset or field" in message


# --- the cost of a key ---


@pytest.fixture
def derivations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls of scrypt."""
    credentials._derive.cache_clear()
    credentials._salts.clear()
    calls: list[int] = []
    scrypt = hashlib.scrypt

    def counted(*args, **kwargs):
        calls.append(kwargs["n"])
        return scrypt(*args, **kwargs)

    monkeypatch.setattr(hashlib, "scrypt", counted)
    return calls


def test_one_salt_costs_one_derivation_and_two_salts_two(derivations: list[int]) -> None:
    for number in range(20):
        assert decrypt(ours(str(number)), PASSKEY, purpose=BOB) == str(number)
    assert len(derivations) == 1
    other = encrypt(TEXT, PASSKEY, purpose=BOB, salt=b"fedcba9876543210")
    assert len(derivations) == 2
    assert decrypt(other, PASSKEY, purpose=BOB) == TEXT
    assert len(derivations) == 2


def test_all_that_a_process_writes_costs_one_derivation(derivations: list[int]) -> None:
    read = ours()
    derivations.clear()
    credentials._derive.cache_clear()

    assert decrypt(read, PASSKEY, purpose=BOB) == TEXT
    for number in range(20):
        value = encrypt(str(number), PASSKEY, purpose=BOB)
        assert decrypt(value, PASSKEY, purpose=BOB) == str(number)

    assert derivations == [2**15]


def test_a_new_value_has_the_salt_that_most_values_beside_it_have(derivations: list[int]) -> None:
    passkey = "of-another-process"
    beside = [
        encrypt(TEXT, PASSKEY, purpose=BOB, salt=salt) for salt in (b"0" * 16, b"1" * 16, b"1" * 16)
    ]

    value = encrypt(TEXT, passkey, purpose=BOB, beside=[VECTORS[0][0], "x", *beside])

    assert credentials.salt_of(value) == b"1" * 16


# --- a random key ---


def test_a_random_key_needs_no_expensive_derivation(derivations: list[int]) -> None:
    key = new_key()
    value = encrypt(TEXT, key, purpose=BOB)

    assert decrypt(value, key, purpose=BOB) == TEXT
    assert derivations == []
    assert re.fullmatch(r"odf2\.hkdf\.[\w-]+\.[\w-]+", value)
    assert not is_weak(value)
    for other in (new_key(), PASSKEY):
        refused(lambda other=other: decrypt(value, other, purpose=BOB), key, other)
    refused(lambda: decrypt(value, key, purpose=for_dataset("bobout")), key)


def test_the_envelope_of_a_random_key_can_be_opened_by_hand() -> None:
    import hmac

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    key = new_key()
    _, _, salt, box = encrypt(TEXT, key, purpose=BOB).split(".")

    def raw(part: str) -> bytes:
        return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))

    extracted = hmac.digest(raw(salt), raw(key.removeprefix("odfkey1.")), "sha256")
    derived = hmac.digest(extracted, b"odf2\x01", "sha256")
    bound = b"dataset\0bobin\0encryptedpass"
    assert AESGCM(derived).decrypt(raw(box)[:12], raw(box)[12:], bound) == TEXT.encode()


def test_every_changed_character_of_a_random_keys_value_is_noticed() -> None:
    key = new_key()
    value = encrypt(TEXT, key, purpose=BOB)
    for at, old in enumerate(value):
        for new in {"A", "b", "_", "."} - {old}:
            with pytest.raises(CredentialError):
                decrypt(value[:at] + new + value[at + 1 :], key, purpose=BOB)
    for cut in range(len(value)):
        with pytest.raises(CredentialError):
            decrypt(value[:cut], key, purpose=BOB)


def test_random_keys_differ_and_have_all_their_bits() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"odfkey1\.[\w-]{43}", key) for key in keys)


@pytest.mark.parametrize("passkey", ["odfkey1.", "odfkey1.short", "odfkey1." + "!" * 43])
def test_a_passkey_that_only_looks_like_a_random_key_is_a_text(
    passkey: str, derivations: list[int]
) -> None:
    value = encrypt(TEXT, passkey, purpose=BOB)
    assert value.startswith("odf1.scrypt.")
    assert decrypt(value, passkey, purpose=BOB) == TEXT


def test_a_random_key_reads_what_was_written_by_scrypt() -> None:
    """Like older programs, which read any key as text."""
    key = new_key()
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    derived = hashlib.scrypt(key.encode(), salt=SALT, n=2**15, r=8, p=1, maxmem=2**26, dklen=32)
    box = b"i" * 12 + AESGCM(derived).encrypt(b"i" * 12, TEXT.encode(), BOB.bound)
    salt, sealed = (base64.urlsafe_b64encode(each).decode().rstrip("=") for each in (SALT, box))
    assert decrypt(f"odf1.scrypt.15-8-1.{salt}.{sealed}", key, purpose=BOB) == TEXT


def test_values_weaker_than_new_ones_are_reported() -> None:
    assert [is_weak(value) for value, _ in VECTORS] == [True] * 3
    assert is_weak(ours().replace("15-8-3", "15-8-1"))
    assert is_weak(ours().replace("15-8-3", "14-8-3"))
    assert not is_weak(ours())
    assert not is_weak(ours().replace("15-8-3", "16-8-2"))
    assert not is_weak(ours().replace("15-8-3", "17-8-1"))


def test_the_keys_kept_in_memory_are_bounded() -> None:
    assert credentials._derive.cache_info().maxsize == 64


@pytest.mark.parametrize("cost", ["30-8-1", "99-99-99", "19-8-1", "15-99-1", "15-8-99", "18-8-2"])
def test_a_hostile_cost_is_refused_before_it_is_paid(cost: str, derivations: list[int]) -> None:
    hostile = ours().replace("15-8-3", cost)
    derivations.clear()
    message = refused(lambda: decrypt(hostile, PASSKEY, purpose=BOB))
    assert "too much memory" in message
    assert derivations == []


def test_a_cost_that_scrypt_rejects_is_a_credential_error() -> None:
    impossible = ours().replace("15-8-3", "20-1-1")
    assert "settings that are invalid" in refused(lambda: decrypt(impossible, PASSKEY, purpose=BOB))


@pytest.mark.parametrize("cost", ["0-8-1", "015-8-3", "15-8", "15-8-3-1", "-15-8-3", "x-8-1", ""])
def test_a_malformed_cost_is_refused(cost: str) -> None:
    malformed = ours().replace("15-8-3", cost)
    assert "isn't an encrypted value" in refused(lambda: decrypt(malformed, PASSKEY, purpose=BOB))


def test_one_value_has_one_spelling() -> None:
    # The last character of the salt has four bits that mean nothing.
    salt = base64.urlsafe_b64encode(SALT).decode().rstrip("=")
    assert salt.endswith("g")
    respelled = ours().replace(salt, salt[:-1] + "h")
    assert "isn't an encrypted value" in refused(lambda: decrypt(respelled, PASSKEY, purpose=BOB))


@pytest.mark.parametrize("size", [1, 15, 17, 48])
def test_a_salt_of_another_size_is_refused_before_its_cost_is_paid(
    size: int, derivations: list[int]
) -> None:
    parts = ours().split(".")
    derivations.clear()
    parts[3] = base64.urlsafe_b64encode(b"s" * size).decode().rstrip("=")
    message = refused(lambda: decrypt(".".join(parts), PASSKEY, purpose=BOB))
    assert "isn't an encrypted value" in message
    assert derivations == []


def test_a_salt_of_the_wrong_size_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError):
        encrypt(TEXT, PASSKEY, purpose=BOB, salt=b"short")


# --- what each failure says ---


@pytest.mark.parametrize("passkey", [None, ""])
@pytest.mark.parametrize("value", [VECTORS[0][0], None])
def test_decrypting_without_a_passkey_says_what_to_set(
    passkey: str | None, value: str | None
) -> None:
    value = value or ours()
    for message in (
        refused(lambda: decrypt(value, passkey, purpose=BOB)),
        refused(lambda: encrypt(TEXT, passkey, purpose=BOB)),
    ):
        assert "none is set" in message
        assert "PASSKEY_FILE" in message
        assert "dataset 'bobin'" in message


@pytest.mark.parametrize("value", [VECTORS[1][0], None])
def test_decrypting_with_another_passkey_fails(value: str | None) -> None:
    value = value or ours()
    message = refused(lambda: decrypt(value, "another-" + PASSKEY, purpose=BOB), "another-")
    assert "the passkey is wrong, or the value is damaged" in message
    assert "`odf encrypt --dataset bobin`" in message


@pytest.mark.parametrize(
    "value",
    [
        "",
        "a plain pw!",
        "Qx7vPlainPassword",
        "odf1.PlainPassword",
        "odf1.argon2.1-1-1.AAAA.AAAA",
        "c2hvcnQ=",
        "pässwörd",
        "a\0b",
    ],
)
def test_a_value_that_was_never_encrypted_is_not_repeated(value: str) -> None:
    message = refused(lambda: decrypt(value, PASSKEY, purpose=PROPERTIES), *filter(None, [value]))
    assert "isn't an encrypted value" in message
    assert "`odf encrypt`" in message


def test_an_envelope_of_a_newer_version_says_to_upgrade() -> None:
    newer = "odf3" + ours().removeprefix("odf1")
    assert "pip install --upgrade" in refused(lambda: decrypt(newer, PASSKEY, purpose=BOB))


def test_a_decrypted_text_that_is_not_utf8_stays_hidden() -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    key = hashlib.sha512(PASSKEY.encode()).digest()[:32]
    latin = b"l\xe4tin-Plaintext"
    value = base64.b64encode(b"i" * 12 + AESGCM(key).encrypt(b"i" * 12, latin, None)).decode()
    message = refused(lambda: decrypt(value, PASSKEY, purpose=BOB), "tin-Plaintext")
    assert "isn't UTF-8" in message


def test_a_lone_surrogate_is_refused_without_showing_what_is_around_it() -> None:
    text, passkey = "broken-text\ud800", "broken-key\ud800"
    refused(lambda: encrypt(text, PASSKEY, purpose=BOB), "broken-t")
    refused(lambda: encrypt(TEXT, passkey, purpose=BOB), "broken-k")
    value = ours()
    refused(lambda: decrypt(value, passkey, purpose=BOB), "broken-k")


# --- where the passkey comes from ---


def test_without_either_variable_there_is_no_passkey() -> None:
    assert find_passkey({}) is None
    assert find_passkey({"PASSKEY": "", "PASSKEY_FILE": ""}) is None


def test_the_variable_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file")
    assert find_passkey({"PASSKEY_FILE": str(file)}) == "from-file"
    assert find_passkey({"PASSKEY": "from-env", "PASSKEY_FILE": str(file)}) == "from-env"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSKEY", "of-this-process")
    assert find_passkey() == "of-this-process"


@pytest.mark.parametrize(
    ("content", "passkey"),
    [
        (b"key\n", "key"),
        (b"key\r\n", "key"),
        (b"key\n\n", "key\n"),
        (b" key ", " key "),
        ("schlüssel\n".encode(), "schlüssel"),
    ],
)
def test_one_newline_at_the_end_of_the_file_is_not_the_key(
    tmp_path: Path, content: bytes, passkey: str
) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    assert find_passkey({"PASSKEY_FILE": str(file)}) == passkey


def test_a_key_of_bytes_is_the_same_from_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    file = tmp_path / "key"
    file.write_bytes(b"k\xff\xfe")
    monkeypatch.setitem(os.environb, b"PASSKEY", b"k\xff\xfe")
    assert find_passkey({"PASSKEY_FILE": str(file)}) == find_passkey()


def test_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for path, reason in [
        (tmp_path / "missing", "No such file"),
        (tmp_path, "Is a directory"),
        (empty, "it is empty"),
    ]:
        message = refused(lambda path=path: find_passkey({"PASSKEY_FILE": str(path)}))
        assert str(path) in message
        assert reason in message
