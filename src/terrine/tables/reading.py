"""Reading a table: CSV, TSV, Parquet or Arrow, told apart by the file's ending.

All cells of a CSV file are texts: a type that was guessed from a whole column would let one row change what all others
mean (`01` is a text among texts, and 1 among numbers). The schema says what each cell stands for, cell by cell.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terrine.errors import InvalidArgument, MissingExtra

ENDINGS = (".csv", ".tsv", ".parquet", ".arrow", ".feather")


def read(path: str | Path) -> Any:
    """The table in a file, as a `pyarrow.Table`.

    Raises:
        InvalidArgument: there is no such file, it is empty, or it is not a table of its ending.
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise MissingExtra("pyarrow", extra="tables") from None
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise InvalidArgument(f"{path}: want a table in a file ending in {', '.join(ENDINGS)}")
    if not path.is_file():
        raise InvalidArgument(f"{path}: no such file; want a table ({', '.join(ENDINGS)})")
    if path.stat().st_size == 0:
        raise InvalidArgument(f"{path}: the file is empty; want a table with a line of column names and some rows")
    try:
        table = _read(path)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowKeyError, pyarrow.ArrowTypeError) as error:
        raise InvalidArgument(f"{path}: not readable as {path.suffix[1:]} ({str(error).splitlines()[0]})") from None
    return _checked(path, table)


def _read(path: Path) -> Any:
    match path.suffix.lower():
        case ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path)
        case ".arrow" | ".feather":
            from pyarrow import feather

            return feather.read_table(path)
        case ending:
            import pyarrow
            from pyarrow import csv

            gaps = ["", "?", "NA", "N/A", "NaN", "nan", "null", "NULL"]
            parsed = csv.ParseOptions(delimiter="\t" if ending == ".tsv" else ",")
            with csv.open_csv(path, parse_options=parsed) as opened:
                types = dict.fromkeys(opened.schema.names, pyarrow.string())
            converted = csv.ConvertOptions(null_values=gaps, strings_can_be_null=True, column_types=types)
            return csv.read_csv(path, parse_options=parsed, convert_options=converted)


def _checked(path: Path, table: Any) -> Any:
    names = [name.strip() for name in table.column_names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidArgument(f"{path}: two columns are named {twice[0]!r}; want each name once")
    if table.num_rows == 0:
        raise InvalidArgument(f"{path}: column names but no rows; want some rows")
    return table.rename_columns(names)
