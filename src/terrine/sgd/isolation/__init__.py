"""What an ordinary loop does with a lot outside the model: followed, so that no example meets another unseen."""

from terrine.sgd.isolation.call import Mixed, Rows, Status, Total
from terrine.sgd.isolation.lot_tensor import LotTensor, handed, plain

__all__ = ["LotTensor", "Mixed", "Rows", "Status", "Total", "handed", "plain"]
