"""A data set read by lists of indices: a lot in parts, each small enough for memory, whatever the size of the lot.

Tensors that lie in memory are indexed; any other map-style data set is read item by item, in worker processes where
asked. An empty list gives a batch whose tensors have no rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from terrine.common import generators
from terrine.common.keys import Key
from terrine.common.people import People
from terrine.errors import InvalidArgument
from terrine.sgd.clipping.batch import flatten_batch
from terrine.sgd.clipping.state import Watch
from terrine.sgd.plan import Plan
from terrine.sgd.sampling import Indices

Collate = Callable[[list[Any]], Any]
Asked: TypeAlias = tuple[Indices, bytes | None]
"""Which examples, and what to seed the global generators with before they are read."""


class LotPart(NamedTuple):
    """A part of a lot: which rows, whether it is the lot's last, and how many rows each person has (None: examples)."""

    rows: Indices
    is_last: bool
    people: tuple[int, ...] | None = None

    def keep(self, places: Indices) -> LotPart:
        """Return the part with the rows at these places alone; people without any are not in it."""
        if len(places) == len(self.rows):
            return self
        if self.people is None:
            return self._replace(rows=self.rows[places])
        owners = np.repeat(np.arange(len(self.people)), self.people)[places]
        counts = tuple(int(count) for count in np.bincount(owners, minlength=len(self.people)) if count)
        return self._replace(rows=self.rows[places], people=counts)


class RowReader:
    """A data set that can be read by index lists; `person` has an id for every row where the plan draws people.

    Raises:
        InvalidArgument: it cannot be read so, or it has another number of examples or people than the plan.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan | None = None,
        person: Any = None,
        *,
        collate: Collate | None = None,
        workers: int = 0,
    ) -> None:
        self._tensors = _tensors(dataset)
        if self._tensors is None:
            _check_map_style(dataset)
        self._dataset, self.workers = dataset, workers
        self._reader = None if self._tensors is not None else _Reader(dataset, collate or default_collate)
        self.examples = len(self._tensors[0]) if self._tensors is not None else len(dataset)
        self.people = None if plan is None else _people(plan, person, self.examples)
        if plan is not None and self.people is None and self.examples != plan.examples:
            raise InvalidArgument(f"dataset of {self.examples} examples: want the plan's examples={plan.examples}")

    def part(self, units: Indices, is_last: bool, plan: Plan, key: Key, step: int) -> LotPart:
        """Return the rows of these units, which are people where the plan draws people."""
        if self.people is None:
            return LotPart(units, is_last)
        assert plan.rows_per_person is not None
        rows, counts = self.people.rows(units, plan.rows_per_person, key, step)
        return LotPart(rows, is_last, counts)

    def first(self) -> Any:
        """Return the first row as a batch: for its shape."""
        with generators.untouched():
            return next(self.batches(iter([np.zeros(min(1, self.examples), dtype=np.int64)])))

    def batches(self, indices: Iterator[Indices]) -> Iterator[Any]:
        """Return one batch for every index list, in order; an empty list gives a batch without rows."""
        return (batch for batch, _ in self.seeded((rows, None) for rows in indices))

    def seeded(self, asked: Iterator[Asked]) -> Iterator[tuple[Any, Indices]]:
        """Return the same with the places of the rows that could be read, each after a seed, where there is one."""
        if self._reader is None:
            assert self._tensors is not None
            tensors = self._tensors
            return ((self._selected(tensors, indices), np.arange(len(indices))) for indices, _ in asked)
        if not self.workers:
            reader = self._reader
            return (reader[request] for request in asked)
        return self._loaded(asked)

    def digest(self) -> str:
        """Return a digest of the data, by which processes tell whether they were given the same: see `_LOOKED_AT`."""
        people = None if self.people is None else self.people.of_rows
        if self._tensors is not None:
            return digest_value((*self._tensors, people))
        places = sorted({index * self.examples // _LOOKED_AT for index in range(_LOOKED_AT)} if self.examples else ())
        with generators.untouched():
            examples = []
            for place in places:
                generators.seed(bytes(32))
                examples.append(self._dataset[place])
        return digest_value((self.examples, examples, people))

    @staticmethod
    def _selected(tensors: Sequence[Tensor], indices: Indices) -> tuple[Tensor, ...]:
        chosen = torch.from_numpy(indices)
        return tuple(tensor.index_select(0, chosen.to(tensor.device)) for tensor in tensors)

    def _loaded(self, asked: Iterator[Asked]) -> Iterator[Any]:
        """Through worker processes; their first seed is made from that of the first list."""
        first = next(asked, None)
        if first is None:
            return
        own = None if first[1] is None else torch.Generator().manual_seed(int.from_bytes(first[1][:8], "little"))
        yield from DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=_Once(chain([first], asked)),
            num_workers=self.workers,
            collate_fn=_as_it_is,
            generator=own,
        )


class _Reader(Dataset[Any]):
    """Reads a part's rows, here or in a worker process: each by itself, in the format that the first row has.

    The format is public: names, types, shapes and constants. It is looked up in the first few rows. A row behind them
    that cannot be read, or has another, adds nothing: what is made of the others must not hang on it.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset, self._collate, self._watch = dataset, collate, Watch({"collate": collate})
        with generators.untouched():
            first: tuple[list[Any], Any] = tree_flatten(collate([dataset[0]])) if len(dataset) else ([], None)
            self._leaves, self._nesting = first
            for leaf in self._leaves:
                if isinstance(leaf, Tensor) and leaf.shape[:1] != (1,):
                    raise InvalidArgument(
                        f"collate: an example alone has shape {tuple(leaf.shape)}; want (1, ...), the same for all: "
                        "padded to a public length, as padding to a lot's longest tells every example of another"
                    )
                if isinstance(leaf, int | float) and not isinstance(leaf, bool):
                    raise InvalidArgument("collate: gives a number that is no tensor; want tensors, examples first")
            if self._leaves:
                flatten_batch(tree_unflatten(self._leaves, self._nesting))
            if any(self._read(index) is None for index in range(1, min(len(dataset), _FORMAT))):
                raise InvalidArgument(
                    "dataset: examples of different shapes, types or names among the first; want one format for all, "
                    "padded to a public length"
                )

    def __getitem__(self, asked: Asked) -> tuple[Any, Indices]:
        """A batch of the rows that could be read, and their places among those that were asked for."""
        indices, seed = asked
        generators.seed(seed)
        with self._watch.watching():
            rows = {place: self._read(int(index)) for place, index in enumerate(indices)}
        kept = [place for place, row in rows.items() if row is not None]
        columns = zip(*(rows[place] or () for place in kept), strict=True) if kept else ((),) * len(self._leaves)
        leaves = [
            (torch.cat(column) if column else leaf[:0]) if isinstance(leaf, Tensor) else leaf
            for leaf, column in zip(self._leaves, columns, strict=True)
        ]
        return tree_unflatten(leaves, self._nesting), np.array(kept, dtype=np.int64)

    def _read(self, index: int) -> list[Any] | None:
        """The leaves of one row's own batch; None where it has none, or another format than the first row."""
        try:
            leaves, nesting = tree_flatten(self._collate([self._dataset[index]]))
        except MemoryError:
            raise
        except Exception:
            return None
        same = nesting == self._nesting and all(map(_is_alike, leaves, self._leaves))
        return leaves if same else None


_FORMAT = 8  # rows whose format is compared before a run begins


def _is_alike(leaf: Any, first: Any) -> bool:
    """Whether a leaf has the type, shape and, where it is no tensor, the value of the first row's."""
    if isinstance(leaf, Tensor) and isinstance(first, Tensor):
        return leaf.shape == first.shape and leaf.dtype is first.dtype and leaf.layout is first.layout
    constant = isinstance(first, str | int | float | bool | None)
    return type(leaf) is type(first) and constant and (leaf == first or leaf != leaf)


def _people(plan: Plan, person: Any, rows: int) -> People | None:
    """Whose the rows are, where the plan draws people.

    Raises: InvalidArgument where ids and plan do not fit.
    """
    if plan.people is None:
        if person is not None:
            raise InvalidArgument("person= with a plan for examples: want sgd.Plan(people=N, rows_per_person=k)")
        return None
    if person is None:
        raise InvalidArgument(f"a plan for people={plan.people}: want person=, an id for every row")
    found = People(person, rows)
    if len(found) != plan.people:
        raise InvalidArgument(f"person: {len(found)} people; want the plan's people={plan.people}")
    return found


def cut_lot(units: Indices, size: int, share: tuple[int, int]) -> list[tuple[Indices, bool]]:
    """Return one process' share (rank, world) of a lot in parts of at most `size`, and which is last; never none."""
    own = units[share[0] :: share[1]]
    starts = range(0, max(len(own), 1), size)
    return [(own[start : start + size], start == starts[-1]) for start in starts]


_LOOKED_AT = 64
"""Examples of a data set that is not in memory by which it is told from another."""


def digest_value(value: Any) -> str:
    """Return a digest of the numbers and texts in a value."""
    digest = hashlib.sha256()
    for kind, content in _parts(value):
        digest.update(f"{kind} {memoryview(content).nbytes} ".encode())
        digest.update(content)
    return digest.hexdigest()


def digest_model(model: nn.Module) -> str:
    """Return a digest of a model's parameters and buffers, of copies: what numpy has seen cannot be freed by FSDP."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    return digest_value([digest_value((name, tensor.detach().clone())) for name, tensor in tensors])


def _parts(value: Any) -> Iterator[tuple[str, bytes | memoryview]]:
    """The types and bytes of the numbers and text in a value; of anything else, the type alone."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        whole = value.detach().cpu().to_dense() if value.layout is not torch.strided else value.detach().cpu()
        yield f"{value.dtype} {tuple(value.shape)}", whole.contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.generic | np.ndarray) or hasattr(value, "__array_interface__"):  # the last are images
        array = np.asarray(value)
        yield f"{array.dtype} {array.shape}", b"" if array.dtype.hasobject else array.tobytes()
        if array.dtype.hasobject:
            yield from _parts(array.tolist())
    elif isinstance(value, str | bytes | int | float | complex | None):
        yield kind, repr(value).encode()
    elif isinstance(value, list | tuple | Mapping):
        yield f"{kind} {len(value)}", b""
        for one in value.items() if isinstance(value, Mapping) else value:
            yield from _parts(one)
    else:
        yield kind, b""


class _Once:
    """An iterator that a DataLoader accepts as its sampler."""

    def __init__(self, asked: Iterator[Asked]) -> None:
        self._asked = asked

    def __iter__(self) -> Iterator[Asked]:
        return self._asked


def _as_it_is(batch: Any) -> Any:
    return batch


def _tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    if type(dataset) is TensorDataset:
        return tuple(dataset.tensors)
    if isinstance(dataset, tuple | list) and dataset and all(isinstance(one, Tensor) for one in dataset):
        if len({len(one) for one in dataset}) > 1:
            raise InvalidArgument(f"dataset: tensors of lengths {[len(one) for one in dataset]}: want one length")
        return tuple(dataset)
    return None


def _check_map_style(dataset: Any) -> None:
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise InvalidArgument(f"dataset is a {name}: want its data set (loader.dataset); the plan draws the lots")
    if isinstance(dataset, IterableDataset):
        raise InvalidArgument(f"{name} is iterable only: want a map-style data set, whose examples can be sampled")
    if isinstance(dataset, Tensor) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InvalidArgument(f"dataset is a {name}: want a map-style Dataset or a tuple of tensors")


__all__ = ["Asked", "Collate", "LotPart", "RowReader", "cut_lot", "digest_model", "digest_value"]
