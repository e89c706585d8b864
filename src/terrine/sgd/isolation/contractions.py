"""Products, layers with weights, attention and recurrences: the examples must not be what is summed over."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from terrine.sgd.isolation.call import Call, Mixes, broadcast, check_alike, rule, tensors
from terrine.sgd.isolation.status import Packed, Rows, Total


@rule("linear")
def linear(call: Call, out: Any) -> Any:
    """A map of the last axis."""
    x = call.argument(0, "input")
    call.public(call.argument(1, "weight"), call.argument(2, "bias"))
    rows = call.rows(x)
    if rows is None or rows.axis == x.dim() - 1:
        raise Mixes("a sum over the examples")
    return rows


def product(call: Call, one: Tensor, other: Tensor, shape: Any) -> Rows:
    """`one @ other`: examples lie in the rows of the one, the columns of the other, or in axes before both."""
    shape = list(shape)  # as if both were matrices
    shape += [1] if other.dim() == 1 else []
    shape = [*shape[:-1], 1, shape[-1]] if one.dim() == 1 else shape
    found, batched = set(), []
    for operand, summed in ((one, -1), (other, -2)):
        rows = call.rows(operand)
        if rows is None:
            continue
        back = rows.axis - operand.dim()
        if operand.dim() == 1 or back == summed:
            raise Mixes("a sum over the examples")
        found.add(Rows(len(shape) + back, rows.inner))
        batched.append(back < -2)
    if len(found) != 1 or (len(batched) == 2 and not all(batched)):
        raise Mixes("examples against examples")
    rows = found.pop()
    for operand in (one, other):
        if batched[0] and call.rows(operand) is None and operand.dim() > 2:
            check_alike(call, operand, rows, shape)
    return Rows(rows.axis - (one.dim() == 1 and rows.axis == len(shape) - 1), rows.inner)


@rule("matmul __matmul__ mm bmm mv dot")
def multiplied(call: Call, out: Any) -> Any:
    """A product of matrices."""
    return product(call, call.argument(0, "input", "self"), call.argument(1, "other", "mat2", "vec"), out.shape)


@rule("tensordot")
def summed_over(call: Call, out: Any) -> Any:
    """The axes of the one that are not summed over, then the other's."""
    one, other, dims = call.argument(0, "a"), call.argument(1, "b"), call.argument(2, "dims", default=2)
    if isinstance(dims, int):
        gone = [list(range(one.dim() - dims, one.dim())), list(range(dims))]
    else:
        gone = [[axis % one.dim() for axis in dims[0]], [axis % other.dim() for axis in dims[1]]]
    rows = [call.rows(one), call.rows(other)]
    side = 0 if rows[0] is not None else 1
    own = rows[side]
    if own is None or rows[1 - side] is not None or own.axis in gone[side]:
        raise Mixes("examples against examples, or a sum over them")
    before = 0 if side == 0 else one.dim() - len(gone[0])
    return Rows(before + own.axis - sum(axis < own.axis for axis in gone[side]), own.inner)


@rule("__rmatmul__")
def multiplied_reversed(call: Call, out: Any) -> Any:
    """The same with its operands the other way round."""
    return product(call, call.args[1], call.args[0], out.shape)


@rule("addmm baddbmm addmv")
def multiplied_and_added(call: Call, out: Any) -> Any:
    """A product plus something."""
    first, one, other = (call.argument(place, *names) for place, names in enumerate(_ADDED))
    if call.rows(one) is None and call.rows(other) is None:
        raise Mixes("examples against a public product")
    rows = product(call, one, other, out.shape)
    own = call.rows(first)
    if own is not None and Rows(own.axis + out.dim() - first.dim(), own.inner) != rows:
        raise Mixes("examples along different axes")
    if own is None:
        check_alike(call, first, rows, out.shape)
    return rows


_ADDED = (("input", "self"), ("mat1", "batch1", "mat"), ("mat2", "batch2", "vec"))


@rule("einsum")
def einsum(call: Call, out: Any) -> Any:
    """The letter of the examples is the same in every operand that holds them, and public operands do not have it."""
    equation, operands = call.args[0], list(call.args[1:])
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str):
        raise Mixes("an equation that is no text")
    inputs, result = letters(equation, [one.dim() for one in operands])
    found = {}
    for names, operand in zip(inputs, operands, strict=True):
        rows = call.rows(operand)
        if rows is not None:
            if names.count(names[rows.axis]) > 1:
                raise Mixes("a diagonal across the examples")
            found[names[rows.axis]] = rows.inner
    if len(found) != 1:
        raise Mixes("examples against examples")
    (letter, inner), *_ = found.items()
    for names, operand in zip(inputs, operands, strict=True):
        if call.rows(operand) is None and letter in names:
            check_alike(call, operand, Rows(names.index(letter), inner), operand.shape)
    return Rows(result.index(letter), inner) if letter in result else Total(mean=False)


def letters(equation: str, dims: list[int]) -> tuple[list[str], str]:
    """An equation's operands and result with an ellipsis, and a result that is left out, written in letters."""
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    inputs = left.split(",")
    spare = [chr(code) for code in range(0x100, 0x100 + 64)]
    widths = [dim - len(one.replace("...", "")) for one, dim in zip(inputs, dims, strict=True)]
    most = max([width for one, width in zip(inputs, widths, strict=True) if "..." in one], default=0)
    filled = [
        "".join(spare[most - width : most]) if "..." in one else "" for one, width in zip(inputs, widths, strict=True)
    ]
    if not arrow:
        once = sorted({one for one in left if one.isalpha() and left.count(one) == 1})
        right = ("..." if most else "") + "".join(once)
    found = [one.replace("...", fill) for one, fill in zip(inputs, filled, strict=True)]
    return found, right.replace("...", "".join(spare[:most]))


_CONVOLVED = {"1d": 3, "2d": 4, "3d": 5}


@rule(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d max_pool3d "
    "avg_pool1d avg_pool2d avg_pool3d lp_pool1d lp_pool2d lp_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
    "max_pool3d_with_indices adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices"
)
def convolved(call: Call, out: Any) -> Any:
    """A batch of images in front."""
    x = call.argument(0, "input")
    call.public(*(one for one in tensors((*call.args[1:], *call.kwargs.values())) if one is not x))
    name = call.name.removesuffix("_with_indices")
    return in_front(call, x, _CONVOLVED[name[-2:]], out)


def in_front(call: Call, x: Tensor, dims: int, out: Any) -> list[Rows]:
    """Examples along the first axis of a tensor with so many."""
    rows = call.rows(x)
    if rows is None or rows.axis != 0 or x.dim() != dims:
        raise Mixes(f"examples that are not the first of {dims} axes")
    return [rows] * len(tensors((out,)))


@rule("group_norm instance_norm local_response_norm interpolate upsample fold")
def by_image(call: Call, out: Any) -> Any:
    """What takes its batch in front, and channels behind it."""
    x = call.argument(0, "input")
    if call.name == "instance_norm" and (call.argument(1, "running_mean") is not None):
        raise Mixes("running statistics of the examples")
    call.public(*(one for one in tensors((*call.args[1:], *call.kwargs.values())) if one is not x))
    rows = call.rows(x)
    if rows is None or rows.axis != 0 or x.dim() < (2 if call.name == "group_norm" else 3):
        raise Mixes("examples that are not the first axis")
    return rows


@rule("pixel_shuffle pixel_unshuffle channel_shuffle")
def shuffled(call: Call, out: Any) -> Any:
    """The last three axes are an image."""
    x = call.argument(0, "input", "self")
    rows = call.rows(x)
    if rows is None or rows.axis >= x.dim() - 3:
        raise Mixes("examples inside an image")
    return rows


@rule("layer_norm rms_norm")
def normalised(call: Call, out: Any) -> Any:
    """Over the last axes."""
    x, shape = call.argument(0, "input"), call.argument(1, "normalized_shape")
    call.public(*(one for one in tensors((*call.args[1:], *call.kwargs.values())) if one is not x))
    rows = call.rows(x)
    if rows is None or rows.axis >= x.dim() - len(shape):
        raise Mixes("a statistic over the examples")
    return rows


@rule("batch_norm")
def batch_normalised(call: Call, out: Any) -> Any:
    """By fixed statistics, for every channel."""
    x = call.argument(0, "input")
    rows = call.rows(x)
    call.public(*(one for one in tensors((*call.args[1:], *call.kwargs.values())) if one is not x))
    if rows is None or rows.axis == 1 or call.argument(5, "training", default=False):
        raise Mixes("a statistic over the examples")
    return rows


@rule("embedding")
def looked_up(call: Call, out: Any) -> Any:
    """Rows of a public table."""
    call.public(call.argument(1, "weight"))
    if call.argument(3, "max_norm") is not None:
        raise Mixes("a table that examples change")
    return call.rows(call.argument(0, "input"))


@rule("embedding_bag")
def bags(call: Call, out: Any) -> Any:
    """Bags as rows of a matrix, or between offsets."""
    x, weights = call.argument(0, "input"), call.argument(8, "per_sample_weights")
    call.public(call.argument(1, "weight"))
    if x.dim() == 1 and isinstance(call.status(x), Packed):  # each bag is what lies between its example's offsets
        offsets, last = call.argument(2, "offsets"), call.argument(9, "include_last_offset", default=False)
        given = call.status(offsets)
        if (given == Rows(0) and not last) or (isinstance(given, Packed) and last and len(out) == call.n):
            return Rows(0)
    if x.dim() != 2 or call.argument(3, "max_norm") is not None:
        raise Mixes("bags between offsets")
    if call.rows(x) != Rows(0) or (weights is not None and call.rows(weights) != Rows(0)):
        raise Mixes("examples that are not the first axis")
    return Rows(0)


@rule("cosine_similarity pairwise_distance")
def compared(call: Call, out: Any) -> Any:
    """Vectors along one axis, at the same place of both."""
    one, other = call.argument(0, "x1"), call.argument(1, "x2")
    dims = max(one.dim(), other.dim())
    axis = dims - 1
    if call.name == "cosine_similarity":
        axis = (call.axes(2, dims, "dim", default=1) or [1])[0]
    sizes = [max(a, b) for a, b in zip(_sizes(one, dims), _sizes(other, dims), strict=True)]
    rows = broadcast(call, (one, other), sizes)
    if not isinstance(rows, Rows) or rows.axis == axis:
        raise Mixes("a product over the examples")
    return Rows(rows.axis - (axis < rows.axis and out.dim() < dims), rows.inner)


def _sizes(tensor: Tensor, dims: int) -> list[int]:
    return [1] * (dims - tensor.dim()) + list(tensor.shape)


@rule("bilinear")
def bilinear(call: Call, out: Any) -> Any:
    """A map of the last axes of two tensors."""
    operands = call.argument(0, "input1"), call.argument(1, "input2")
    call.public(call.argument(2, "weight"), call.argument(3, "bias"))
    found = [rows for rows in map(call.rows, operands) if rows is not None]
    if len(set(found)) != 1 or found[0].axis == operands[0].dim() - 1:
        raise Mixes("examples along different axes")
    for operand in operands:
        if call.rows(operand) is None:
            check_alike(call, operand, found[0], operand.shape)
    return found[0]


@rule("scaled_dot_product_attention")
def attention(call: Call, out: Any) -> Any:
    """Queries, keys and values by axes before the last two."""
    names = (("query",), ("key",), ("value",), ("attn_mask",))
    operands = [one for place, name in enumerate(names) if (one := call.argument(place, *name)) is not None]
    for operand in operands:
        rows = call.rows(operand)
        if rows is not None and rows.axis >= operand.dim() - 2:
            raise Mixes("attention between examples")
    shape = (*out.shape[:-2], 1, 1)
    found: Rows | None = None
    for operand in operands:
        rows = call.rows(operand)
        if rows is not None:
            here = Rows(rows.axis + out.dim() - operand.dim(), rows.inner)
            if found not in (None, here):
                raise Mixes("examples along different axes")
            found = here
    assert found is not None
    for operand in operands:
        if call.rows(operand) is None:
            check_alike(call, operand, found, shape)
    return found


@rule("multi_head_attention_forward")
def multi_head(call: Call, out: Any) -> Any:
    """Positions, examples, features; the result likewise, and weights by example."""
    operands = [call.argument(place, name) for place, name in enumerate(("query", "key", "value"))]
    padding, mask = call.kwargs.get("key_padding_mask"), call.kwargs.get("attn_mask")
    padding = call.args[14] if len(call.args) > 14 else padding
    mask = call.args[16] if len(call.args) > 16 else mask
    known = {id(one) for one in (*operands, padding, mask)}
    call.public(*(one for one in tensors((*call.args, *call.kwargs.values())) if id(one) not in known))
    for operand in operands:
        rows = call.rows(operand)
        if rows is None:
            check_alike(call, operand, Rows(1), operand.shape)
        if operand.dim() != 3 or rows not in (None, Rows(1)):
            raise Mixes("attention between examples")
    if padding is not None and call.rows(padding) != Rows(0):
        check_alike(call, padding, Rows(0), padding.shape)
        call.public(padding)
    if mask is not None and (rows := call.rows(mask)) is not None and rows != Rows(0, call.argument(4, "num_heads")):
        raise Mixes("attention between examples")
    return [Rows(1)] + [Rows(0)] * (len(tensors((out,))) - 1)


@rule("lstm gru rnn_tanh rnn_relu")
def recurrent(call: Call, out: Any) -> Any:
    """A lot of sequences, from a state that has the examples along its second axis."""
    x, first = call.args[0], call.args[1]
    if len(call.args) < 9 or x.dim() != 3:
        raise Mixes("packed sequences, whose rows are examples of all lengths")
    axis = 0 if call.args[8] else 1
    call.public(*tensors((call.args[2],)))
    if call.rows(x) != Rows(axis):
        raise Mixes("examples along another axis than the batch")
    for state in tensors((first,)):
        if call.rows(state) is None:
            check_alike(call, state, Rows(1), state.shape)
        elif call.rows(state) != Rows(1):
            raise Mixes("examples along another axis than the batch")
    return [Rows(axis)] + [Rows(1)] * (len(tensors((out,))) - 1)


@rule("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def cell(call: Call, out: Any) -> Any:
    """One position of them."""
    x, states = call.args[0], tensors((call.args[1],))
    call.public(*tensors(call.args[2:]))
    for one in (x, *states):
        if call.rows(one) is None:
            check_alike(call, one, Rows(0), one.shape)
        elif call.rows(one) != Rows(0) or one.dim() != 2:
            raise Mixes("examples that are not the first axis")
    return [Rows(0)] * len(tensors((out,)))
