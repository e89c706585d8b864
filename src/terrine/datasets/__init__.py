"""Real data sets in their publishers' own formats, read from a folder and checked against the published sums.

The folder is $TERRINE_DATA, or `terrine` in the user's cache. What is absent is fetched from its publisher, or from
$TERRINE_MIRROR where that is set.
"""

from terrine.datasets.files import folder
from terrine.datasets.images import Images, cifar10, digits, fashion_mnist, mnist
from terrine.datasets.tables import Table, adult

__all__ = ["Images", "Table", "adult", "cifar10", "digits", "fashion_mnist", "folder", "mnist"]
