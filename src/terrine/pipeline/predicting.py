"""Predictions for new rows, a few thousand at a time: the columns that are kept, the prediction, probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import tables
from terrine.errors import InvalidArgument
from terrine.pipeline.trained import Trained
from terrine.tables import cells

_AT_ONCE = 4096


def opened(
    model: Trained, where: str, *, encoding: str | None = None, separator: str | None = None
) -> tables.TableSource:
    """The new rows: written as told, or as the training table was, or as the file tells.

    Raises:
        InvalidArgument: there is no such table, or it lacks a column.
    """
    if model.schema is None:
        raise InvalidArgument(f"{where}: a table, but the model was trained on arrays; want inputs of the same kind")
    if encoding is not None or separator is not None:
        usual = model.schema.file or tables.FileFormat()
        return tables.open_table(where, tables.FileFormat(encoding or usual.encoding, separator))
    return model.schema.open_table(where)


def array(path: str) -> NDArray[Any]:
    """An array in an .npy file.

    Raises:
        InvalidArgument: there is none.
    """
    try:
        return np.asarray(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise InvalidArgument(f"{path}: not an array of numbers ({str(error).splitlines()[0]})") from None


def lines(
    model: Trained,
    rows: Any,
    *,
    keep: Sequence[str] = (),
    probabilities: bool = False,
    encoder: tables.Encoder | None = None,
) -> Iterator[list[str]]:
    """The lines of the answer, the names of its columns first.

    Raises:
        InvalidArgument: a column that is to be kept is not there, or is named like one of the answer.
    """
    if model.target is not None and probabilities:
        raise InvalidArgument("--probabilities: the model predicts a number, which has no classes; want it without")
    named = ["prediction", *(model.classes if probabilities else ())]
    if keep and not hasattr(rows, "column_names"):
        raise InvalidArgument(f"--keep {keep[0]}: an array has no columns; want a table")
    for name in keep:
        if name not in rows.column_names:
            raise InvalidArgument(f"--keep {name}: no such column; want one of {', '.join(rows.column_names[:12])}")
        if name in named or list(keep).count(name) > 1:
            raise InvalidArgument(f"--keep {name}: the answer has such a column already; want each name once")
    if model.schema is not None and hasattr(rows, "column_names"):
        model.schema.check_columns(rows)
        model.schema.check_encoder(encoder)
    yield [*keep, *named]
    for part, kept in _parts(model, rows, keep):
        for before, after in zip(kept, _told(model, part, probabilities, encoder), strict=True):
            yield [*before, *after]


def _parts(model: Trained, rows: Any, keep: Sequence[str]) -> Iterator[tuple[Any, list[tuple[str, ...]]]]:
    """Some rows, and what is kept of each."""
    import pyarrow

    if not hasattr(rows, "column_names"):
        for at in range(0, len(rows), _AT_ONCE):
            part = rows[at : at + _AT_ONCE]
            yield part, [()] * len(part)
        return
    assert model.schema is not None
    wanted = list(dict.fromkeys([*(name for name, one in model.schema.columns.items() if one.width), *keep]))
    for batch in rows.batches(wanted):
        part = pyarrow.Table.from_batches([batch])
        columns = [_written(batch.column(batch.schema.get_field_index(name))) for name in keep]
        yield part, list(zip(*columns, strict=True)) if columns else [()] * part.num_rows


def _written(column: Any) -> list[str]:
    """Cells as they were read."""
    column = cells.sound(column)
    try:
        found = column.to_pylist()
    except (ValueError, OverflowError):  # a moment that Python has no year for
        found = [_as_read(one) for one in column]
    return ["" if one is None else one if isinstance(one, str) else str(one) for one in found]


def _as_read(cell: Any) -> Any:
    try:
        return cell.as_py()
    except (ValueError, OverflowError):
        return cell.cast("string").as_py()


def _told(model: Trained, part: Any, probabilities: bool, encoder: tables.Encoder | None) -> Iterator[list[str]]:
    if model.target is not None:
        yield from ([str(number)] for number in model.numbers(part, encoder).tolist())
        return
    shares = model.probabilities(part, encoder)
    for place, row in zip(shares.argmax(axis=1), shares, strict=True):
        yield [model.classes[place], *(f"{share:.6f}" for share in row if probabilities)]
