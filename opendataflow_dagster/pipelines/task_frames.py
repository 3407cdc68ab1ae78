"""Frames on their way to the tasks: those that many batches read are sent once."""

import hashlib
import pickle
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .convert import as_pandas
from .sandbox import surroundings
from .task import Sent, in_one_line
from .task_data import Shipper
from .transformation import TransformationError


class Loads:
    """What was sent to the tasks of one session, for one project."""

    def __init__(self, root: Path, shipper: Shipper) -> None:
        self.root, self.shipper = root, shipper
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[Any, Sent]] = {}
        self._retired: list[Sent] = []

    def once(self, frame: Any) -> Sent:
        """Send a frame for one task; whoever asks drops it."""
        return Sent(self.shipper.send(dumped(frame, self.root)))

    def sources(self, slug: str, sources: Sequence[Any]) -> list[Sent]:
        """Send a pipeline's sources, unless the tasks have them as they are now."""
        return [self._source((slug, at), each) for at, each in enumerate(sources)]

    def _source(self, place: tuple[str, int], source: Any) -> Sent:
        version = source.version() if hasattr(source, "version") else None
        told = None if version is None else (source.location, version)
        with self._lock:
            known = self._known.get(place)
        if known and told is not None and known[0] == told:
            return known[1]
        data = dumped(as_pandas(source), self.root)
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            if known and known[1].key == digest:
                sent = known[1]
            else:
                sent = Sent(self.shipper.send(data), digest)
                if known:  # a batch may be reading it
                    self._retired.append(known[1])
            self._known[place] = told, sent
        return sent

    def tidy(self) -> None:
        """Remove what has a newer version, while no task is at work."""
        with self._lock:
            while self._retired:
                self._retired.pop().parcel.drop()

    def close(self) -> None:
        self.tidy()
        with self._lock:
            while self._known:
                _, (_, sent) = self._known.popitem()
                sent.parcel.drop()


def dumped(frame: Any, root: Path) -> bytes:
    """A pickled frame, with its index and types; its cells may have classes of the project's."""
    try:
        return pickle.dumps(frame, 5)
    except Exception:
        try:
            with surroundings(root):
                return pickle.dumps(frame, 5)
        except Exception as error:
            raise TransformationError(
                f"A frame has a value that can't go to another process: {in_one_line(error)}"
            ) from error


def loaded(data: bytes, root: Path) -> Any:
    try:
        return pickle.loads(data)
    except (ImportError, AttributeError):
        with surroundings(root):
            return pickle.loads(data)
