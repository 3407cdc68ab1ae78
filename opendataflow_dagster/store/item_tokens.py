"""Who may send items to a pipeline: whoever has its token, of which only the hash is kept."""

import hmac
import secrets
from hashlib import sha256

from ..ids import check_id
from .store import Store

BYTES = 32
"""Random bytes of a token: too many to be guessed, so that a plain hash is enough."""


def new_token(store: Store, jobid: str) -> str:
    """Make the token of a pipeline, in place of the one that it may have had."""
    check_id("pipeline", jobid)
    token = secrets.token_urlsafe(BYTES)
    store.db.insist(lambda: store.db.change("tokens.put", jobid=jobid, hash=_hash(token)))
    return token


def check_token(store: Store, jobid: str, given: str) -> bool:
    """Whether this is the pipeline's token; it takes as long whether or not there is one."""
    kept = _kept(store, jobid)
    same = hmac.compare_digest(_hash(given), kept or _hash(""))
    return same and kept is not None


def has_token(store: Store, jobid: str) -> bool:
    """Whether a pipeline takes items at all."""
    return _kept(store, jobid) is not None


def drop_token(store: Store, jobid: str) -> bool:
    """Let nobody send items to a pipeline any more; whether anybody could."""
    changed, lost = store.db.insist(lambda: store.db.change("tokens.drop", jobid=jobid))
    return changed > 0 or lost


def _kept(store: Store, jobid: str) -> str | None:
    rows, _ = store.db.insist(lambda: store.db.run("tokens.hash", jobid=jobid))
    return rows[0][0] if rows else None


def _hash(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
