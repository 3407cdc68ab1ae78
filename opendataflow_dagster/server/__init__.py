"""Items over HTTP: what `odf serve` answers, and the worker that it keeps beside it."""

from .app import make_app
from .request import Limits

__all__ = ["Limits", "make_app"]
