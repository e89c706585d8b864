"""Private tables: read with a schema of public facts, so that nothing about the columns is learned from the rows.

    table = tables.open_table("adult.csv")
    schema = tables.Schema.load("adult.schema.toml")
    features, labels = schema.encode(table), schema.labels(table)

`terrine schema` drafts a schema, and asks for what only people can know.
"""

from terrine.tables.cells import as_number
from terrine.tables.columns import Category, Column, Date, Hashed, Ignored, Number, Text
from terrine.tables.drafting import draft, repeated_ids
from terrine.tables.formats import FileFormat
from terrine.tables.reading import read
from terrine.tables.schema import Schema, check_label, column_of, ids_of
from terrine.tables.sentences import Encoder
from terrine.tables.sentences import load as load_encoder
from terrine.tables.sources import TableSource, named, open_table, schema_path, sniffed_table

__all__ = [
    "Category",
    "Column",
    "Date",
    "Encoder",
    "FileFormat",
    "Hashed",
    "Ignored",
    "Number",
    "Schema",
    "TableSource",
    "Text",
    "as_number",
    "check_label",
    "column_of",
    "draft",
    "ids_of",
    "load_encoder",
    "named",
    "open_table",
    "read",
    "repeated_ids",
    "schema_path",
    "sniffed_table",
]
