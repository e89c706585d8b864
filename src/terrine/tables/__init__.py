"""Private tables: read with a schema of public facts, so that nothing about the columns is learned from the rows.

table = tables.read("adult.csv")
schema = tables.Schema.load("adult.schema.toml")
features, labels = schema.encode(table), schema.labels(table)
"""

from terrine.tables.drafting import draft, repeated_ids
from terrine.tables.reading import read
from terrine.tables.schema import Category, Column, Ignored, Number, Schema, as_number, check_label, column_of

__all__ = [
    "Category",
    "Column",
    "Ignored",
    "Number",
    "Schema",
    "as_number",
    "check_label",
    "column_of",
    "draft",
    "read",
    "repeated_ids",
]
