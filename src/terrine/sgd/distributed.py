"""Several processes that train one model: same key, same lots, each its share; sums added up before the noise.

Every process draws the same noise from the same key and adds it to the same total, so the noise is there once and
the replicas stay equal without being sent around. What fails in one process fails in all of them: before the run
begins, and in every step before its release, processes tell each other how it went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from terrine.common.keys import Key
from terrine.errors import InvalidArgument, OutOfOrder, TerrineError

T = TypeVar("T")


def share() -> tuple[int, int]:
    """This process' place, and how many there are."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _together() else (0, 1)


def is_first() -> bool:
    """Whether this process speaks for all, to the account and the disk."""
    return share()[0] == 0


def agreed(key: Key) -> Key:
    """The first process' key, in every process."""
    return Key(from_first(key.secret)) if _together() else key


def gathered(value: Any) -> list[Any]:
    """Return every process' value, by rank: for small things that are not tensors."""
    if not _together():
        return [value]
    values: list[Any] = [None] * share()[1]
    with _all_there():
        torch.distributed.all_gather_object(values, value)
    return values


def check_same(**values: Any) -> None:
    """Refuse to go on where processes have others than the first has.

    Raises: InvalidArgument, in every process, naming what differs and where.
    """
    _refuse_different(gathered(values))


@contextmanager
def together(**values: Any) -> Iterator[None]:
    """Do this in every process: where it fails in one, it fails in all, and so it does where the values differ.

    Raises:
        InvalidArgument: processes have different values.
        OutOfOrder: another process has failed.
    """
    try:
        yield
    except BaseException as failure:
        with suppress(Exception):
            gathered(_Failure(f"{type(failure).__name__}: {failure}"))
        raise
    reports = gathered(values)
    failures = [f"process {rank}: {report}" for rank, report in enumerate(reports) if isinstance(report, _Failure)]
    if failures:
        raise OutOfOrder(f"{failures[0]}; want that mended, and every process started again")
    _refuse_different(reports)


def run_on_first(function: Callable[[], T]) -> T:
    """Return what `function` returns in the first process, where it is called, in every process.

    Raises: what it raises, in every process.
    """
    if not _together():
        return function()
    failure: BaseException | None = None
    report: Any = None
    if is_first():
        try:
            report = True, function()
        except BaseException as error:
            failure, kind = error, type(error) if isinstance(error, TerrineError) else OutOfOrder
            report = False, (kind, str(error) if isinstance(error, TerrineError) else f"process 0: {error!r}")
    if failure is None:
        is_done, result = from_first(report)
        if not is_done:
            raise result[0](result[1])
        return result  # type: ignore[no-any-return]
    with suppress(Exception):
        from_first(report)
    raise failure


def from_first(value: Any) -> Any:
    """Return the first process' value, in every process."""
    if not _together():
        return value
    holder = [value]
    with _all_there():
        torch.distributed.broadcast_object_list(holder, src=0)
    return holder[0]


def summed(value: Tensor) -> Tensor:
    """The sum of `value` over all processes."""
    if _together():
        with _all_there():
            torch.distributed.all_reduce(value)
    return value


class _Failure(str):
    """Why a process has failed."""


@contextmanager
def _all_there() -> Iterator[None]:
    """What the processes do together; one that is gone, or hangs for longer than their group waits, ends it.

    Raises: OutOfOrder
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise OutOfOrder(
            f"another process of this run is gone or does something else ({reason}); want every process started again: "
            "a run with a checkpoint goes on"
        ) from error


def _refuse_different(reports: list[dict[str, Any]]) -> None:
    different = [
        f"{name.replace('_', ' ')}: process {', '.join(map(str, strange))} has another than process 0"
        for name, value in reports[0].items()
        if (strange := [rank for rank, report in enumerate(reports) if report.get(name) != value])
    ]
    if different:
        raise InvalidArgument(
            f"{'; '.join(different)}; want every process to be given the same model, plan and whole data set, and to "
            "take the same steps"
        )


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
