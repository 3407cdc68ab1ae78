"""The names of datasets, chunks and jobs in Dagster."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import dagster as dg

from ..errors import WrongUse
from ..location import place_of
from ..store.catalog import Catalog, CatalogDataset
from ..util.text import first_line

_log = logging.getLogger("opendataflow_dagster")

_HEX = re.compile("(?:%[0-9A-F]{2})+")
_DOTS = re.compile(r"\.{3,}")
_BREAKS_PARTITIONS = frozenset(',"[]*|\\')
"""Characters with a meaning in Dagster's partition selection."""

_WORD = re.compile("_x([0-9A-F]+)_")
_BREAKS_KEYS = frozenset('/\\"*=%?#')
"""Characters with a meaning in an asset's address, or in asset selections."""

_RESERVED = frozenset(
    {
        "context",
        "conf",
        "config",
        "meta",
        "arg_dict",
        "dict",
        "input_arg_dict",
        "output_arg_dict",
        "int",
        "str",
        "float",
        "bool",
        "input",
        "output",
        "type",
    }
)
"""Names that Dagster doesn't allow for ops."""

MAX_LISTED = 16
"""How many definitions' keys are cached."""

_listed: dict[str, tuple[str | None, frozenset[str]]] = {}
"""Definition, as text → its last key, and all its keys."""

_TAG_VALUE = re.compile(r"[A-Za-z0-9_.-]{1,63}")


class DataflowTranslator:
    """The names and looks that datasets and jobs have in Dagster; override what should differ.

    Each asset key must belong to one dataset, and each partition key to one dataid: `dataid` is the
    inverse of `partition_key`. By default, ordinary ids stay unchanged.

    Example:
        class OurTranslator(DataflowTranslator):
            def asset_key(self, datasetid: str) -> dg.AssetKey:
                return dg.AssetKey(["flow", datasetid])
    """

    window: int | None = None
    """How many of a domain's newest chunks the grid shows, besides all that aren't READY; None:
    all. The project's own partitions are always shown unchanged."""

    def asset_key(self, datasetid: str) -> dg.AssetKey:
        """Return the asset of a dataset."""
        return dg.AssetKey([escaped_key(datasetid)])

    def partition_key(self, dataid: str) -> str:
        """Return the partition key of a chunk."""
        return escaped_partition(dataid)

    def dataid(self, partition_key: str) -> str:
        """Return the chunk of a partition key."""
        return unescaped_partition(partition_key)

    def partitions_name(self, domain: str) -> str:
        """Return the name under which Dagster keeps the partition keys of a domain."""
        return f"dataflow/{domain}"

    def partitions_def(self, domain: str) -> dg.PartitionsDefinition:
        """Return the partitions that all datasets of a domain share.

        By default they are dynamic and named by `partitions_name`: their keys follow the chunks.
        Any other definition of one dimension is the project's own: its keys stay unchanged, and a
        chunk whose dataid isn't one of them has no partition.
        """
        return dg.DynamicPartitionsDefinition(name=self.partitions_name(domain))

    def partition_mapping(self, jobid: str, datasetid: str) -> dg.PartitionMapping:
        """Return which chunks of an input a chunk reads; by default, that of the same dataid."""
        return dg.IdentityPartitionMapping()

    def op_name(self, jobid: str) -> str:
        """Return the name of the op that runs a job."""
        return escaped_word(jobid)

    def group_name(self, catalog: Catalog, datasetid: str) -> str | None:
        """Return the group that a dataset is shown in: its domain."""
        return re.sub("[^A-Za-z0-9_]", "_", catalog.domains[datasetid])

    def description(self, dataset: CatalogDataset, jobid: str | None) -> str | None:
        """Return what a dataset's page says."""
        if dataset.description:
            return dataset.description
        producer = f"produced by job `{jobid}`" if jobid else "produced elsewhere"
        return f"Dataset `{dataset.datasetid}` of OpenDataFlow, {producer}."

    def tags(self, dataset: CatalogDataset, jobid: str | None) -> Mapping[str, str]:
        """Return the tags of a dataset's asset."""
        own = {name: value for name, value in dataset.tags.items() if _is_taken("tag", name, value)}
        return own | ({"opendataflow/job": jobid} if jobid and _TAG_VALUE.fullmatch(jobid) else {})

    def kinds(self, dataset: CatalogDataset) -> set[str]:
        """Return the kind of data: the dataset's format."""
        kind = dataset.columns.get("format") or ""
        return {kind} if _TAG_VALUE.fullmatch(kind) else set()

    def owners(self, dataset: CatalogDataset) -> Sequence[str]:
        """Return who is responsible for a dataset: e-mail addresses, or `team:NAME`."""
        return [owner for owner in dataset.owners if _is_taken("owner", owner)]

    def metadata(self, dataset: CatalogDataset, jobid: str | None) -> Mapping[str, Any]:
        """Return what is known about a dataset without its chunks."""
        known = {
            "opendataflow/dataset": dataset.datasetid,
            "opendataflow/job": jobid,
            "opendataflow/location": place_of(dataset.columns) if dataset.columns else None,
        }
        return {name: value for name, value in known.items() if value is not None}

    def _window_entry(self) -> dict[str, str]:
        """Return the entry about the window for the pages of assets."""
        if self.window is None:
            return {}
        line = f"The newest {self.window:,} chunks, and all that aren't READY, have a partition."
        return {"opendataflow/window": f"{line} `odf resubmit JOB DATAID` brings others back."}

    def pool(self, jobid: str) -> str | None:
        """Return the pool whose slots a job's runs take; the job's own limit is `odf policy`."""
        return None

    def _definition(self, domain: str) -> dg.PartitionsDefinition:
        """Return the partitions of a domain, if its chunks can be such."""
        definition: Any = self.partitions_def(domain)
        if isinstance(definition, dg.PartitionsDefinition) and not isinstance(
            definition, dg.MultiPartitionsDefinition
        ):
            return definition
        raise WrongUse(
            f"{type(self).__name__}.partitions_def({domain!r}) is a {type(definition).__name__}, "
            "but a chunk has one dataid: return partitions of one dimension."
        )

    def spec(self, catalog: Catalog, datasetid: str, jobid: str | None) -> dg.AssetSpec:
        """Return the asset of a dataset: produced by a job here, or (None) somewhere else.

        Elsewhere, lineage still follows the registered jobs.
        """
        dataset, domain = catalog.datasets[datasetid], catalog.domains[datasetid]
        partitions = self._definition(domain)
        window = self._window_entry() if is_kept(self, domain, partitions) else {}
        makers = [jobid] if jobid is not None else catalog.producers(datasetid)
        sources = {
            source: maker
            for maker in makers
            for source in catalog.jobs[maker].reads
            if not catalog.in_circle(maker, source)  # Dagster allows no cycles
        }
        return dg.AssetSpec(
            self.asset_key(datasetid),
            deps=[
                dg.AssetDep(
                    self.asset_key(source), partition_mapping=self.partition_mapping(maker, source)
                )
                for source, maker in sorted(sources.items())
            ],
            description=self.description(dataset, jobid),
            metadata={**window, **self.metadata(dataset, jobid)},
            skippable=jobid is not None,
            group_name=self.group_name(catalog, datasetid),
            owners=self.owners(dataset),
            tags=self.tags(dataset, jobid),
            kinds=self.kinds(dataset),
            partitions_def=partitions,
        )


def is_kept(
    translator: DataflowTranslator, domain: str, definition: dg.PartitionsDefinition
) -> bool:
    """Whether the keys of a domain's partitions are added and removed with its chunks."""
    is_dynamic = isinstance(definition, dg.DynamicPartitionsDefinition)
    return is_dynamic and definition.name == translator.partitions_name(domain)


def partition_keys(definition: dg.PartitionsDefinition) -> frozenset[str]:
    """Return the keys of partitions that aren't dynamic.

    Listing 60,000 hours takes seconds, so this is repeated only when the last key changes.
    Dagster's `has_partition_key` doesn't help: it accepts half past two for hourly partitions.
    """
    what, last = repr(definition), definition.get_last_partition_key()
    if what not in _listed or _listed[what][0] != last:
        if len(_listed) >= MAX_LISTED:
            _listed.clear()
        _listed[what] = last, frozenset(definition.get_partition_keys())
    return _listed[what][1]


def described(definition: dg.PartitionsDefinition) -> str:
    """Describe a partitions definition for people."""
    name = definition.name if isinstance(definition, dg.DynamicPartitionsDefinition) else None
    return f"{type(definition).__name__} {name!r}" if name else type(definition).__name__


@cache
def _is_taken(kind: str, *words: str) -> bool:
    """Whether Dagster accepts an owner or a tag; a refused one is left out, with one warning."""
    try:
        if kind == "owner":
            dg.AssetSpec("asset", owners=list(words))
        else:
            dg.AssetSpec("asset", tags={words[0]: words[1]})
    except dg.DagsterInvalidDefinitionError as error:
        _log.warning("The %s %s is left out: %s", kind, ": ".join(words), first_line(error))
        return False
    return True


def escaped_partition(dataid: str) -> str:
    """Return a dataid with the characters that partition keys can't have as `%2C`, and so on."""
    if dataid == "":
        return "%"
    last = len(dataid) - 1
    dotted = {at for run in _DOTS.finditer(dataid) for at in range(*run.span())}
    return "".join(
        _percent(character)
        if character in _BREAKS_PARTITIONS
        or at in dotted
        or not character.isprintable()
        or (character.isspace() and at in (0, last))
        or (character == "%" and (last == 0 or _HEX.match(dataid, at)))
        else character
        for at, character in enumerate(dataid)
    )


def unescaped_partition(key: str) -> str:
    """Return the dataid that was escaped; a key that wasn't is returned unchanged."""
    if key == "%":
        return ""
    try:
        return _HEX.sub(lambda found: bytes.fromhex(found[0].replace("%", "")).decode(), key)
    except UnicodeDecodeError:
        return key


def escaped_key(datasetid: str) -> str:
    """A datasetid with the characters that break an asset's address as `_x2F_`, and so on."""
    last = len(datasetid) - 1
    return "".join(
        _word(character)
        if character in _BREAKS_KEYS
        or not character.isprintable()
        or (character.isspace() and at in (0, last))
        or (character == "_" and _begins_escape(datasetid, at))
        else character
        for at, character in enumerate(datasetid)
    )


def escaped_word(name: str) -> str:
    """Return a name with all but ASCII letters, digits and `_` as `_x2D_`, and so on."""
    from keyword import iskeyword

    escaped = "".join(
        character
        if character.isascii()
        and (character.isalnum() or (character == "_" and not _begins_escape(name, at)))
        else _word(character)
        for at, character in enumerate(name)
    )
    if escaped in _RESERVED or iskeyword(escaped):
        return _word(escaped[0]) + escaped[1:]
    return escaped


def unescaped_word(text: str) -> str:
    """Return the argument of `escaped_key` or `escaped_word`."""
    return _WORD.sub(lambda found: chr(int(found[1], 16)), text)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def _word(character: str) -> str:
    return f"_x{ord(character):X}_"


def _begins_escape(text: str, at: int) -> bool:
    return re.compile("_x[0-9A-F]").match(text, at) is not None
