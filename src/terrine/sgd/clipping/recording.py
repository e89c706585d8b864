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
from terrine.sgd.clipping import functions
from terrine.sgd.clipping.contribution import Contribution, kept_bytes
from terrine.sgd.clipping.derived import copy_parameters, copy_view, derive
from terrine.sgd.clipping.functions import tensors
from terrine.sgd.clipping.parameter_view import ParameterView, merged, settle
from terrine.sgd.clipping.state import caller
from terrine.sgd.clipping.substitutes import INSTEAD, argument_at, tensor_places
from terrine.sgd.clipping.use import COMPOSED, RULES, AllExamples, Found, RefusedReading, Rule, Unfollowed, Use, listen
from terrine.sgd.devices import exact


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
        self.roots = {name: ParameterView(p.detach(), p, name) for name, p in parameters.items()}
        self.views: dict[int, ParameterView] = {id(root.graph): root for root in self.roots.values()}
        self.derived: list[ParameterView] = []
        self.copies: dict[int, Tensor] = {}  # by view: the examples' own copies
        self.counted: set[int] = set()  # views whose copies were used in this pass
        self._squares: dict[str, Tensor] = {}
        self._key = object()
        self._marker: Tensor | None = None

    def begin(self, marker: Tensor | None, row: Iterable[Any]) -> None:
        """A forward pass begins with these tensors of one example, whose number under vmap `marker` is."""
        self._marker = marker
        self.copies.clear()
        self.counted.clear()
        for tensor in tensors(row):
            self._tag(tensor)

    def as_own(self, value: Tensor) -> Tensor:
        """What the program returns, as every example's own: also where it is made of parameters alone."""
        view = self.views.get(id(value)) if torch.is_grad_enabled() else None
        return value if view is None else copy_view(self, view)

    def put_back(self) -> None:
        """Restore the tensors that the program wrote to and that outlive it."""
        with torch.no_grad():
            for tensor, numbers in reversed(self._overwritten.values()):
                tensor.detach().copy_(numbers)
        self._overwritten.clear()

    def finish(self) -> tuple[dict[str, Contribution], dict[str, Tensor]]:
        """What every parameter's uses contribute, and its squared norms, by name; forgets both."""
        settle(self.derived, self.units)
        contributions: dict[str, Contribution] = {}
        squares: dict[str, Tensor] = {}
        for name, root in self.roots.items():
            if root.contributions or any(view.contributions for view in root.views):
                contributions[name] = part = merged(root)
                known = self._squares.get(name) if root.simple else None
                squares[name] = part.squares() if known is None else known
        for view in (*self.roots.values(), *self.derived):
            view.contributions, view.views = [], []  # whoever adds them up may let go of them one by one
        self.copies.clear()
        return contributions, squares

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._seen(func, args, kwargs or {})
        except Exception as failure:
            if self._marker is None:
                raise
            failure.__dict__.setdefault("place", caller())
            self.escaped = Escaped(failure)
            raise self.escaped from failure

    def _seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
            if name == "requires_grad" and self._marker is not None and self.is_of_examples([args[0]]):
                return self._requires_grad(args[0])
            if name not in functions.TURNS:
                return func(*args)
        elif name in functions.METADATA:
            return func(*args, **kwargs)
        given = tensors(args)
        if kwargs:
            given += tensors(kwargs.values())
        if self.shielded:
            with torch.autograd.graph.saved_tensors_hooks(functions.return_same, functions.return_same):
                return self._called(func, name, args, kwargs, given)
        return self._called(func, name, args, kwargs, given)

    def _called(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        own = self.is_of_examples(given)
        if own and name in functions.VALUES:
            self._refuse_reading(name)
        if own and name in functions.MEMORY and self._marker is not None:
            raise Unfollowed(f"{name}: memory that all examples would share")
        if name == "__set__" or (name == "requires_grad_" and not functions.is_transformed(args[0])):
            self._refuse_setting(args[0])
        if name != "batch_norm" and (kept := functions.keeps_what_it_sees(name, args, kwargs)):
            raise InvalidArgument(f"{name}: {kept}, which no noise protects; want it without")
        if own and (name in functions.TRUTHS or name in functions.VALUES):
            return self._answer(func, args, kwargs)
        if name == "backward" and own:
            raise InvalidArgument(
                f"{caller()}: backward() inside the loss; want the loss returned, whose gradient is clipped here"
            )
        if own and name in functions.HOOKS and self._marker is not None:
            raise Unfollowed(f"{name}: hooks see one example at a time")
        if torch.is_grad_enabled():
            views = self.views
            for tensor in given:
                if id(tensor) in views:
                    return self._used(func, name, args, kwargs)
        if functions.writes_in_place(name) or "out" in kwargs:
            self._keep_numbers(tensors((args[:1], kwargs.get("out"))), own)
        result = self._computed(func, args, kwargs)
        if not own and name in functions.FACTORIES:
            if self._marker is not None and name in functions.DRAWS:
                own = True
            elif self._marker is not None and self.lifted:
                result, own = self._lift(result), True
            else:
                self._make(result)
        elif not own and name != "data" and not functions.shares_older_memory(result, given, self._key):
            self._make(result)
        return self.tag_own(result) if own else result

    def _refuse_reading(self, name: str) -> None:
        if not self.reads_values:
            raise RefusedReading(
                f"{caller()}: {functions.SPOKEN.get(name, name + '()')} reads an example's number into Python, where "
                "nothing follows it; want a tensor operation, or reads_values=True where the program keeps nothing"
            )

    def _outlives(self, tensor: Tensor) -> bool:
        """Whether a tensor was there before the program, and will be after it."""
        return self._key is not getattr(tensor, functions.TAG, None) and self._key is not getattr(
            tensor, functions.MADE, None
        )

    def _keep_numbers(self, targets: list[Tensor], own: bool) -> None:
        """Keep the numbers of tensors that are about to be written to, and that outlive the program."""
        for target in targets:
            if self._outlives(target):
                if own and self._marker is None:
                    raise InvalidArgument(
                        f"{caller()}: writes an example into a tensor that outlives it, such as a buffer, which no "
                        "noise protects; want a program that leaves its buffers alone"
                    )
                if functions.is_transformed(target):
                    raise Unfollowed("a tensor inside a transform of torch.func is written to")
                self._overwritten.setdefault(id(target), (target, target.detach().clone()))

    def _make(self, result: Any) -> None:
        """Note that tensors were made for this example, without vmap, and may be written to."""
        for one in tensors((result,)):
            one.__dict__[functions.MADE] = self._key

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        instead = INSTEAD.get(func)
        return func(*args, **kwargs) if instead is None else instead(self, func, args, kwargs)

    @property
    def is_alone(self) -> bool:
        """Whether there is but one example, without vmap."""
        return self._marker is None

    def is_of_examples(self, given: list[Tensor]) -> bool:
        """Whether one of the tensors comes from the examples under way.

        Raises: InvalidArgument where one comes from others.
        """
        found = False
        for tensor in given:
            key = getattr(tensor, functions.TAG, None)
            if key is not None:
                if key is not self._key:
                    raise InvalidArgument(
                        f"{caller()}: uses a tensor of an earlier batch or another example, kept in an attribute or a "
                        "variable, so examples would meet over time; want a program that keeps nothing"
                    )
                found = True
        return found

    def _tag(self, tensor: Tensor) -> None:
        tensor.__dict__[functions.TAG] = self._key

    def tag_own(self, result: Any) -> Any:
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

    def _used(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not self.is_of_examples(
            [one for one in (*tensors(args), *tensors(kwargs.values())) if id(one) not in self.views]
        ):
            return derive(self, func, name, args, kwargs)
        if func in COMPOSED:
            return self.tag_own(COMPOSED[func](self, *args, **kwargs))
        rule = RULES.get(func)
        if rule is not None:
            params, batched = self.find_parameters(args, kwargs)
            use = Use(func, args, kwargs, params, self.units)
            if rule.fits(use, batched) and (name not in functions.PRODUCTS or functions.is_matrix(params)):
                return self.tag_own(self._ruled(rule, use))
        return self.call_with_copies(func, args, kwargs)

    def call_with_copies(self, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = (
            tuple(copy_parameters(self, value) for value in args),
            {key: copy_parameters(self, value) for key, value in kwargs.items()},
        )
        return self.tag_own(self._computed(func, args, kwargs))

    def find_parameters(self, args: Any, kwargs: Any) -> tuple[dict[int | str, ParameterView], set[int | str]]:
        """Which arguments are parameters, and which are of the examples."""
        params: dict[int | str, ParameterView] = {}
        batched: set[int | str] = set()
        for place, value in (*enumerate(args), *kwargs.items()):
            view = self.views.get(id(value))
            if view is not None:
                params[place] = view
            elif self.is_of_examples(tensors((value,))):
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
            out = self.record_output(rule.forward(use), use, rule)
            return out.unflatten(0, (self.examples, -1)) if use.folded else out

        out: Tensor = self.all_examples(compute, *given)
        return out

    def record_output(self, out: Tensor, use: Use, rule: Rule) -> Tensor:
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
            self.add_contributions(rule.contributions(use, gradient))
        use.args, use.kwargs = (), {}

    def add_contributions(self, found: Found) -> None:
        for view, contribution in found:
            view.contributions.append(contribution)
            if view.simple:
                self._squares[view.name] = contribution.squares()
            self.rows += kept_bytes(contribution)
