"""The recording of one microbatch: keeps what per-example gradients are made of while its examples run, each alone.

Every example is a lot of one under `torch.vmap`; the recording sees the torch calls of that one program, on tensors
whose examples vmap hides. What happens to a call with a trained parameter among its arguments:

    only parameters and public tensors    a derived parameter view, computed once for all examples
    a function with a rule                see `use.py`: ghost norms, no gradient per example
    anything else                         every example is given the parameter as a copy of its own (expanded, not
                                          copied in memory), whose gradient is the example's by construction

A truth value that Python asks for (`if`, an index) is a question that every example answers for itself; where the
answers differ, `Divided` has the examples that agree run together. Other numbers of an example are refused by place
(`item()`, `float()`, numpy), because nothing follows them, unless the caller says that the program keeps none. A
tensor of another batch, kept in an attribute or a global variable, is refused. Whatever the program writes into a
tensor that it has not made itself, such as a buffer, is put back when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.contribution import Contribution, Dense, kept_bytes
from terrine.sgd.clipping.examples import keeps_what_it_sees, tensors
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.parameter_view import ParameterView, is_view, merged, settle, shares_memory
from terrine.sgd.clipping.state import caller
from terrine.sgd.clipping.substitutes import INSTEAD, argument_at, tensor_places
from terrine.sgd.clipping.use import COMPOSED, RULES, AllExamples, Found, Rule, Unfollowed, Use, listen
from terrine.sgd.precision import exact


class Divided(Exception):
    """Examples gave different answers where Python asked for one."""

    def __init__(self, answers: list[Any]) -> None:
        super().__init__(f"{len(set(map(repr, answers)))} answers")
        self.answers = answers


class Escaped(BaseException):
    """A failure under vmap. The model cannot catch it: one example's failure would send all the others that way."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Recording(TorchFunctionMode):
    """What one microbatch of `examples` examples did with the parameters.

    `each`: so many examples that follow each other are one unit, clipped as one.
    `lifted`: tensors that the model makes belong to each example, so that they can be written to in place.
    `shielded`: gradient checkpointing is passed over; a microbatch keeps its activations.
    `reads_values`: Python may read numbers of an example.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        examples: int,
        *,
        each: int = 1,
        lifted: bool = False,
        shielded: bool = False,
        reads_values: bool = False,
    ) -> None:
        super().__init__()
        self.parameters, self.examples, self.units = parameters, examples, examples // each
        self.lifted, self.shielded, self.reads_values = lifted, shielded, reads_values
        self.bytes = 0  # of activations and their gradients, about
        self.rows = 0  # of per-example gradients that are kept
        self.escaped: Escaped | None = None
        self._overwritten: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that outlive the program, and their numbers
        self._roots = {name: ParameterView(p.detach(), p, name) for name, p in parameters.items()}
        self._views: dict[int, ParameterView] = {id(root.graph): root for root in self._roots.values()}
        self._made: list[ParameterView] = []
        self._copies: dict[int, Tensor] = {}  # by view: the examples' own copies
        self._counted: set[int] = set()  # views whose copies were used in this pass
        self._squares: dict[str, Tensor] = {}
        self._key = object()
        self._marker: Tensor | None = None

    def begin(self, marker: Tensor | None, row: Iterable[Any]) -> None:
        """A forward pass begins with these tensors of one example, whose number under vmap `marker` is."""
        self._marker = marker
        self._copies.clear()
        self._counted.clear()
        for tensor in tensors(row):
            self._tag(tensor)

    def as_own(self, value: Tensor) -> Tensor:
        """What the program returns, as every example's own: also where it is made of parameters alone."""
        view = self._views.get(id(value)) if torch.is_grad_enabled() else None
        return value if view is None else self._copy(view)

    def put_back(self) -> None:
        """Restore the tensors that the program wrote to and that outlive it."""
        with torch.no_grad():
            for tensor, numbers in reversed(self._overwritten.values()):
                tensor.detach().copy_(numbers)
        self._overwritten.clear()

    def finish(self) -> tuple[dict[str, Contribution], dict[str, Tensor]]:
        """What every parameter's uses contribute, and its squared norms, by name; forgets both."""
        settle(self._made, self.units)
        contributions: dict[str, Contribution] = {}
        squares: dict[str, Tensor] = {}
        for name, root in self._roots.items():
            if root.contributions or any(view.contributions for view in root.views):
                contributions[name] = part = merged(root)
                known = self._squares.get(name) if root.simple else None
                squares[name] = part.squares() if known is None else known
        for view in (*self._roots.values(), *self._made):
            view.contributions, view.views = [], []  # whoever adds them up may let go of them one by one
        self._copies.clear()
        return contributions, squares

    # -- every call ------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._seen(func, args, kwargs or {})
        except Exception as failure:
            if self._marker is None:
                raise
            self.escaped = Escaped(failure)
            raise self.escaped from failure

    def _seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
            if name == "requires_grad" and self._marker is not None and self._own([args[0]]):
                return self._requires_grad(args[0])
            if name not in _TURNS:
                return func(*args)
        elif name in _METADATA:
            return func(*args, **kwargs)
        given = tensors(args)
        if kwargs:
            given += tensors(kwargs.values())
        if self.shielded:
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                return self._called(func, name, args, kwargs, given)
        return self._called(func, name, args, kwargs, given)

    def _called(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        own = self._own(given)
        if own and name in _VALUES:
            self._refuse_reading(name)
        if own and name in _MEMORY and self._marker is not None:
            raise Unfollowed(f"{name}: memory that all examples would share")
        if name == "__set__" or (name == "requires_grad_" and not _is_transformed(args[0])):
            self._refuse_setting(args[0])
        if name != "batch_norm" and (kept := keeps_what_it_sees(name, args, kwargs)):
            raise InvalidArgument(f"{name}: {kept}, which no noise protects; want it without")
        if own and (name in _TRUTHS or name in _VALUES):
            return self._answer(func, args, kwargs)
        if name == "backward" and own:
            raise InvalidArgument(
                f"{caller()}: backward() inside the loss; want the loss returned, whose gradient is clipped here"
            )
        if own and name in _HOOKS and self._marker is not None:
            raise Unfollowed(f"{name}: hooks see one example at a time")
        if torch.is_grad_enabled():
            views = self._views
            for tensor in given:
                if id(tensor) in views:
                    return self._used(func, name, args, kwargs)
        if _writes(name) or "out" in kwargs:
            self._keep_numbers(tensors((args[:1], kwargs.get("out"))), own)
        result = self._computed(func, args, kwargs)
        if not own and name in _FACTORIES:
            if self._marker is not None and name in _DRAWS:
                own = True
            elif self._marker is not None and self.lifted:
                result, own = self._lift(result), True
            else:
                self._make(result)
        elif not own and name != "data" and not _shares_memory(result, given, self._key):
            self._make(result)
        return self._kept(result) if own else result

    def _refuse_reading(self, name: str) -> None:
        if not self.reads_values:
            raise InvalidArgument(
                f"{caller()}: {_SPOKEN.get(name, name + '()')} reads an example's number into Python, where nothing "
                "follows it; want a tensor operation, or reads_values=True where the program keeps nothing of it"
            )

    def _outlives(self, tensor: Tensor) -> bool:
        """Whether a tensor was there before the program, and will be after it."""
        return self._key is not getattr(tensor, _TAG, None) and self._key is not getattr(tensor, _MADE, None)

    def _keep_numbers(self, targets: list[Tensor], own: bool) -> None:
        """Keep the numbers of tensors that are about to be written to, and that outlive the program."""
        for target in targets:
            if self._outlives(target):
                if own and self._marker is None:
                    raise InvalidArgument(
                        f"{caller()}: writes an example into a tensor that outlives it, such as a buffer, which no "
                        "noise protects; want a program that leaves its buffers alone"
                    )
                if _is_transformed(target):
                    raise Unfollowed("a tensor inside a transform of torch.func is written to")
                self._overwritten.setdefault(id(target), (target, target.detach().clone()))

    def _make(self, result: Any) -> None:
        """Note that tensors were made for this example, without vmap, and may be written to."""
        for one in tensors((result,)):
            one.__dict__[_MADE] = self._key

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        instead = INSTEAD.get(func)
        return func(*args, **kwargs) if instead is None else instead(self, func, args, kwargs)

    @property
    def is_alone(self) -> bool:
        """Whether there is but one example, without vmap."""
        return self._marker is None

    def _own(self, given: list[Tensor]) -> bool:
        """Whether one of the tensors comes from the examples under way.

        Raises: InvalidArgument where one comes from others.
        """
        found = False
        for tensor in given:
            key = getattr(tensor, _TAG, None)
            if key is not None:
                if key is not self._key:
                    raise InvalidArgument(
                        f"{caller()}: uses a tensor of an earlier batch or another example, kept in an attribute or a "
                        "variable, so examples would meet over time; want a program that keeps nothing"
                    )
                found = True
        return found

    def _tag(self, tensor: Tensor) -> None:
        tensor.__dict__[_TAG] = self._key

    def _kept(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            self._tag(result)
        elif isinstance(result, tuple | list | dict):
            for one in tensors(result.values() if isinstance(result, dict) else result):
                self._tag(one)
        return result

    def _refuse_setting(self, target: Any) -> None:
        """A parameter's memory, gradient or `requires_grad` is nobody's to set in a forward pass, nor a buffer's."""
        if isinstance(target, Tensor) and self._outlives(target):
            raise InvalidArgument(
                f"{caller()}: sets the data, the gradient or requires_grad of a parameter, a buffer or another tensor "
                "that outlives the program; want that done before the run, and numbers written by copy_()"
            )

    # -- leaving vmap ----------------------------------------------------------------------------------

    def all_examples(self, compute: Callable[[int, list[Tensor], list[bool]], Any], *given: Tensor) -> Any:
        """What `compute` makes of the tensors of all examples, examples first, as a tensor of each."""
        out: Any = AllExamples.apply(compute, self._marker, *given)  # type: ignore[no-untyped-call]
        return out

    def batched(self, given: Sequence[Tensor]) -> list[bool]:
        """Which tensors are of the examples: what vmap itself says."""
        answers: list[bool] = []

        def look(n: int, physical: list[Tensor], batched: list[bool]) -> Tensor:
            answers.extend(batched)
            return torch.zeros(n, device=physical[0].device)

        if self._marker is not None:
            self.all_examples(look, *given)
        return answers

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The answer to a question that Python asks, which all examples have to share."""
        if self._marker is None:
            return func(*args, **kwargs)
        answers: list[Any] = []

        def ask(n: int, physical: list[Tensor], batched: list[bool]) -> Tensor:
            for index in range(n):
                rows = iter([one[index] if own else one for one, own in zip(physical, batched, strict=True)])
                alone = [next(rows) if isinstance(value, Tensor) else value for value in args]
                answers.append(func(*alone, **kwargs))
            return physical[0].new_zeros(n)

        self.all_examples(ask, *[value.detach() for value in args if isinstance(value, Tensor)])
        if len(set(map(repr, answers))) > 1:
            raise Divided(answers)
        return answers[0]

    def _requires_grad(self, tensor: Tensor) -> bool:
        """What vmap does not tell: whether the tensor of all examples requires a gradient."""
        answers: list[bool] = []

        def look(n: int, physical: list[Tensor], _: list[bool]) -> Tensor:
            answers.append(physical[0].requires_grad)
            return torch.zeros(n, device=physical[0].device)

        self.all_examples(look, tensor)
        return answers[0]

    def _lift(self, made: Tensor) -> Tensor:
        def own(n: int, physical: list[Tensor], batched: list[bool]) -> Tensor:
            return physical[0] if batched[0] else physical[0].expand(n, *physical[0].shape).clone()

        lifted: Tensor = self.all_examples(own, made)
        return lifted

    # -- a call with a parameter -----------------------------------------------------------------------

    def _used(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not self._own([one for one in (*tensors(args), *tensors(kwargs.values())) if id(one) not in self._views]):
            return self._derive(func, name, args, kwargs)
        if func in COMPOSED:
            return self._kept(COMPOSED[func](self, *args, **kwargs))
        rule = RULES.get(func)
        if rule is not None:
            params, batched = self._places(args, kwargs)
            use = Use(func, args, kwargs, params, self.units)
            if rule.fits(use, batched) and (name not in _PRODUCTS or _is_matrix(params)):
                return self._kept(self._ruled(rule, use))
        return self._own_copies(func, args, kwargs)

    def _own_copies(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tuple(map(self._copied, args)), {key: self._copied(value) for key, value in kwargs.items()}
        return self._kept(self._computed(func, args, kwargs))

    def _places(self, args: Any, kwargs: Any) -> tuple[dict[int | str, ParameterView], set[int | str]]:
        """Which arguments are parameters, and which are of the examples."""
        params: dict[int | str, ParameterView] = {}
        batched: set[int | str] = set()
        for place, value in (*enumerate(args), *kwargs.items()):
            view = self._views.get(id(value))
            if view is not None:
                params[place] = view
            elif self._own(tensors((value,))):
                batched.add(place)
        return params, batched

    def _ruled(self, rule: Rule, use: Use) -> Tensor:
        """The output of a function that has a rule; its gradient will become contributions."""
        places = tensor_places(use.args, use.kwargs)
        args, kwargs = use.args, use.kwargs
        given = [
            use.params[place].value if place in use.params else argument_at(args, kwargs, place) for place in places
        ]

        def compute(_: int, physical: list[Tensor], batched: list[bool]) -> Tensor:
            if any(own and place in use.params for own, place in zip(batched, places, strict=True)):
                raise Unfollowed(f"{use.function.__name__}: a parameter that was made from an example")
            found = dict(zip(places, physical, strict=True))
            use.args = tuple(found.get(place, value) for place, value in enumerate(args))
            use.kwargs = {key: found.get(key, value) for key, value in kwargs.items()}
            out = self._recorded(rule.forward(use), use, rule)
            return out.unflatten(0, (self.examples, -1)) if use.folded else out

        out: Tensor = self.all_examples(compute, *given)
        return out

    def _recorded(self, out: Tensor, use: Use, rule: Rule) -> Tensor:
        """`out`, listened to; `use` is forgotten once it was heard."""
        for view in set(use.params.values()):
            view.uses += 1
        self.bytes += 3 * out.numel() * out.element_size()
        versions = [(one, one._version) for one in (*use.args, *use.kwargs.values()) if isinstance(one, Tensor)]
        return listen(out, partial(self._hear, use, rule, versions))

    def _hear(self, use: Use, rule: Rule, versions: list[tuple[Tensor, int]], gradient: Tensor) -> None:
        if use.heard:
            raise InvalidArgument("a second backward pass through one forward pass; want all losses in one backward")
        use.heard = True
        for tensor, version in versions:
            if tensor._version != version:
                raise Unfollowed("an input of a layer was changed in place after its use; use the out-of-place form")
        versions.clear()
        with torch.no_grad(), torch.autocast(gradient.device.type, enabled=False), exact():
            self._add(rule.contributions(use, gradient))
        use.args, use.kwargs = (), {}

    def _add(self, found: Found) -> None:
        for view, contribution in found:
            view.contributions.append(contribution)
            if view.simple:
                self._squares[view.name] = contribution.squares()
            self.rows += kept_bytes(contribution)

    # -- every example's own copy ----------------------------------------------------------------------

    def _copied(self, value: Any) -> Any:
        """`value` with parameters as the example's own copies."""
        if isinstance(value, Tensor):
            view = self._views.get(id(value))
            return value if view is None else self._copy(view)
        return type(value)([self._copied(one) for one in value]) if type(value) in (list, tuple) else value

    def _copy(self, view: ParameterView) -> Tensor:
        if id(view) not in self._copies:
            small = [root for root in self._roots.values() if root.value.dim() < 2 and id(root) not in self._copies]
            views = [view, *(root for root in small if root is not view)] if view.value.dim() < 2 else [view]

            def compute(n: int, physical: list[Tensor], _: list[bool]) -> tuple[Tensor, ...]:
                return tuple(
                    listen(value.expand(n, *value.shape), partial(self._hear_copy, one))
                    for one, value in zip(views, physical, strict=True)
                )

            made: Any = self.all_examples(compute, *[one.value for one in views])  # leaving vmap is dear: once for all
            self._copies.update({id(one): self._kept(copy) for one, copy in zip(views, made, strict=True)})
        found = self._copies[id(view)]
        if id(view) not in self._counted:
            self._counted.add(id(view))
            view.uses += 1
        return found

    def _hear_copy(self, view: ParameterView, gradient: Tensor) -> None:
        self._add([(view, Dense(wide(gradient.detach())).of_units(self.units))])

    # -- something made from parameters alone ----------------------------------------------------------

    def _derive(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        found: list[ParameterView] = []

        def graph(value: Any) -> Any:
            if isinstance(value, Tensor):
                view = self._views.get(id(value))
                if view is not None:
                    found.append(view)
                    return view.graph
                return value
            return type(value)(graph(item) for item in value) if type(value) in (list, tuple) else value

        others = [one for one in tensors((*args, *kwargs.values())) if id(one) not in self._views]
        if others and any(self.batched(others)):
            raise Unfollowed(f"{name}: a parameter meets an example inside torch.func or a function of its own")
        out = func(*(graph(a) for a in args), **{k: graph(a) for k, a in kwargs.items()})
        if any(one.is_complex() and one.requires_grad for one in tensors((out,))):  # contributions are of real numbers
            return self._own_copies(func, args, kwargs)
        parents = tuple(dict.fromkeys(found))
        if name == "embedding" and isinstance(out, Tensor) and len(parents) == 1 and kwargs.get("padding_idx") is None:
            view = self._derived(out, parents)
            view.tokens = args[0]
            return view.value
        if isinstance(out, Tensor):
            return self._derived(out, parents).value if out.requires_grad else out
        if isinstance(out, tuple | list) and all(isinstance(item, Tensor) and item.requires_grad for item in out):
            return type(out)(self._derived(item, parents).value for item in out)
        return out

    def _derived(self, out: Tensor, parents: tuple[ParameterView, ...]) -> ParameterView:
        base = parents[0]
        root = base.parents[0] if is_view(base) else base
        view = ParameterView(out.detach(), out, parents=parents)
        if len(parents) == 1 and root.name and shares_memory(out, root.value):
            view.parents = (root,)
            root.views.append(view)
        self._made.append(view)
        self._views[id(view.value)] = view
        for parent in view.parents:
            parent.uses += 2  # what is derived is settled at the end, with its cross terms
        return view


def _is_matrix(params: dict[int | str, ParameterView]) -> bool:
    return all(view.value.dim() == 2 for place, view in params.items() if place != 0) and len(params) <= 2


def _shares_memory(result: Any, given: list[Tensor], key: object) -> bool:
    """Whether a result lies in the memory of a tensor that was given and that this program has not made."""
    older = [tensor for tensor in given if getattr(tensor, _MADE, None) is not key]
    return any(new is tensor or _storage(new) is _storage(tensor) for new in tensors((result,)) for tensor in older)


def _storage(tensor: Tensor) -> Any:
    """The memory of a tensor; None of sparse ones, and of those inside the transforms of torch.func."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def _is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is one that a transform of torch.func, inside the program, has made."""
    return tensor.layout is torch.strided and _storage(tensor) is None


def _writes(name: str) -> bool:
    plain = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return plain or name == "__setitem__" or name.startswith("__i")


def _same(tensor: Tensor) -> Tensor:
    return tensor


_TAG, _MADE = "_terrine_examples", "_terrine_made"
_TURNS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})  # attributes that are functions of the tensor
_METADATA = frozenset({"dim", "size", "__len__", "stride", "numel", "is_contiguous", "is_floating_point", "ndimension"})
_HOOKS = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook"})
_PRODUCTS = frozenset({"matmul", "__matmul__", "mm", "addmm"})
_MEMORY = frozenset({"numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "__reduce_ex__"})
_MEMORY |= {"as_strided", "as_strided_", "as_strided_scatter", "set_"}
_TRUTHS = frozenset({"__bool__", "__index__", "__contains__", "equal", "allclose", "is_nonzero"})
_VALUES = frozenset({"item", "tolist", "__float__", "__int__", "__complex__", "__repr__", "__format__", "numpy"})
_VALUES |= {"__array__", "__dlpack__", "__reduce_ex__"}
_SPOKEN = {
    "__float__": "float()",
    "__int__": "int()",
    "__complex__": "complex()",
    "__array__": "numpy",
    "numpy": "numpy",
}
_SPOKEN |= {"__repr__": "printing", "__format__": "printing", "__dlpack__": "dlpack", "__reduce_ex__": "pickling"}
_DRAWS = frozenset(
    {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "rand_like", "randn_like", "randint_like"}
    | {"uniform", "exponential", "geometric", "cauchy", "log_normal", "random", "poisson", "multinomial"}
)
_FACTORIES = (
    _DRAWS | {"zeros", "ones", "full", "empty", "tensor"} | {"zeros_like", "ones_like", "full_like", "empty_like"}
)
_FACTORIES |= {"new_zeros", "new_ones", "new_full", "new_empty", "clone"}
