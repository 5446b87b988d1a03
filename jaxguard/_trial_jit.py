"""`trial_jit`: `jax.jit`, built where it is called."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, overload

from . import _jax_state

P = ParamSpec("P")
R = TypeVar("R")


class TrialJit(Generic[P, R]):
    """A function that JAX compiles in the process that calls it."""

    def __init__(self, function: Callable[P, R], traced: Mapping[str, Any] | None, jit_options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        # After it: it brings the function's own attributes along, and a callable object, or a function that was made
        # from a step (`jax.grad(step)`), may have some of these names.
        self._function = function
        self._traced = dict(traced or {})
        self._jit_options = jit_options
        self._jitted: Any = None
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._here()(*args, **kwargs, **self._traced)  # type: ignore[no-any-return]

    def _here(self) -> Any:
        _jax_state.refuse_if_forked("trial_jit")  # each time: it may have been built before the fork
        if self._jitted is None:
            import jax

            self._jitted = jax.jit(self._function, **self._jit_options)
        return self._jitted

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else _Method(self, instance)

    def __reduce__(self) -> str | tuple[Any, ...]:
        module, name = getattr(self, "__module__", None), getattr(self, "__qualname__", "<none>")
        if module != "__main__" and _found(module, name) is self:
            return str(name)  # at module level: by name, as functions do
        # Not the executable: the process that unpickles this builds its own. In two steps, so that a function that
        # refers to itself pickles.
        return _empty, (), (self._function, self._traced, self._jit_options)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"trial_jit({self._function!r})"

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `jax.jit(f).lower`."""
        return self._here().lower(*args, **kwargs, **self._traced)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `jax.jit(f).trace`."""
        return self._here().trace(*args, **kwargs, **self._traced)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `jax.jit(f).eval_shape`."""
        return self._here().eval_shape(*args, **kwargs, **self._traced)

    def clear_cache(self) -> None:
        """As `jax.jit(f).clear_cache`."""
        if self._jitted is not None:
            self._jitted.clear_cache()


def _found(module: str | None, name: str) -> Any:
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _empty() -> TrialJit[Any, Any]:
    return TrialJit.__new__(TrialJit)


class _Method:
    """A `TrialJit` bound to an instance."""

    def __init__(self, jit: TrialJit[Any, Any], instance: object) -> None:
        self._jit = jit
        self._instance = instance
        self.__self__ = instance
        self.__func__ = jit
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(jit, name):
                setattr(self, name, getattr(jit, name))

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._jit)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Method) and self._jit is other._jit and self._instance is other._instance

    def __hash__(self) -> int:
        return hash((id(self._jit), id(self._instance)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._jit(self._instance, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in {"lower", "trace", "eval_shape"}:
            return functools.partial(getattr(self._jit, name), self._instance)
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._jit, name)


@overload
def trial_jit(function: Callable[P, R], /, *, traced: None = None, **jit_options: Any) -> TrialJit[P, R]: ...
@overload
def trial_jit(function: Callable[..., R], /, *, traced: Mapping[str, Any], **jit_options: Any) -> TrialJit[..., R]: ...
@overload
def trial_jit(*, traced: None = None, **jit_options: Any) -> Callable[[Callable[P, R]], TrialJit[P, R]]: ...
@overload
def trial_jit(*, traced: Mapping[str, Any], **jit_options: Any) -> Callable[[Callable[..., R]], TrialJit[..., R]]: ...
def trial_jit(
    function: Callable[..., Any] | None = None, /, *, traced: Mapping[str, Any] | None = None, **jit_options: Any
) -> Any:
    """Compile a function with `jax.jit`, in the process that calls it.

    `trial_jit(f, traced=t)(*args)` equals `jax.jit(f)(*args, **t)`. Nothing of JAX happens at import or decoration, and
    the step pickles, so it can stand at module level and be captured by a guarded objective.

    Args:
        function: The function, when used without options.
        traced: Keyword arguments that are the same in all calls, given to JAX as traced arrays (scalars or pytrees of
            arrays), so that their values are no constants of the program: all trials share one.
        **jit_options: What `jax.jit` takes (`static_argnums`, `donate_argnums`, ...), with its meaning.

    Returns:
        The compiled function, with `lower`, `trace`, `eval_shape` and `clear_cache` as `jax.jit` has them; or, without
        a function, a decorator.

    Raises:
        TypeError: If `function` is not callable, or `traced` maps no names.
        ForkedAfterJax: At a call, in a process forked from one in which JAX had started.

    Example:
        >>> from jaxguard import trial_jit
        >>> def step(weight, gradient, lr):
        ...     return weight - lr * gradient
        >>> float(trial_jit(step, traced={"lr": 0.5})(1.0, 1.0))
        0.5
    """
    names: object = traced
    if names is not None and not (isinstance(names, Mapping) and all(isinstance(name, str) for name in names)):
        text = f"traced must map names of arguments to values, as in traced={{'lr': lr}}, not {traced!r}"
        raise TypeError(text)
    if function is None:
        return functools.partial(trial_jit, traced=traced, **jit_options)
    if not callable(function):
        text = f"trial_jit compiles a function, not {function!r}"
        raise TypeError(text)
    return TrialJit(function, traced, jit_options)
