"""Foreign hooks are readers: they are seen as they come and go, without polling.

A forward hook (or pre-hook) of a module is handed the module's input, so on a linear, on the
module that makes its input, or on any module the input passes through, it reads the raw
activation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks")
# A hook's options lie in tables beside, and its handle refers to all of them.
_ALL_TABLES = (
    *_ATTRIBUTES,
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)


_MISSING = object()


class _WatchedHooks(OrderedDict):
    """A module's hook table that tells when an entry comes or goes."""

    def __init__(self, entries: OrderedDict, changed: Callable[[], None]) -> None:
        self._changed: Callable[[], None] | None = None
        super().__init__(entries)
        self._changed = changed

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if self._changed is not None:
            self._changed()

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        if self._changed is not None:
            self._changed()

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        if key not in self and default is not _MISSING:
            return default
        value = self[key]
        del self[key]
        return value

    def popitem(self, last: bool = True) -> tuple[Any, Any]:
        key = next(reversed(self)) if last else next(iter(self))
        return key, self.pop(key)

    def stop(self) -> None:
        """Change in silence from now on."""
        self._changed = None

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)

    def __deepcopy__(self, memo: Any) -> OrderedDict:
        return OrderedDict(self)


def watch_hooks(module: nn.Module, changed: Callable[[], None]) -> list[OrderedDict]:
    """Call `changed` after every registration or removal of a forward (pre-)hook on `module`.

    Returns:
        the tables that already held hooks.  Their handles refer to these very objects, so they
        stay in place and cannot be watched: whoever watches must compare their lengths.
    """
    unwatched = []
    for attribute in _ATTRIBUTES:
        table = getattr(module, attribute)
        if table:
            unwatched.append(table)
        elif not isinstance(table, _WatchedHooks):
            setattr(module, attribute, _WatchedHooks(table, changed))
    return unwatched


def unwatch_hooks(module: nn.Module) -> None:
    """Stop telling; hooks that came meanwhile stay, and so do their handles."""
    for attribute in _ATTRIBUTES:
        table = getattr(module, attribute)
        if isinstance(table, _WatchedHooks):
            table.stop()


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Let `target` run the hooks of `source`, under the same handles, and `source` none."""
    for attribute in _ALL_TABLES:
        setattr(target, attribute, getattr(source, attribute))
        setattr(source, attribute, OrderedDict())


@contextmanager
def hooks_suspended(model: nn.Module) -> Iterator[None]:
    """Run `model` without any hook of its modules; they are back afterwards."""
    kept = [
        (module, attribute, getattr(module, attribute))
        for module in model.modules()
        for attribute in _ALL_TABLES
    ]
    try:
        for module, attribute, _ in kept:
            setattr(module, attribute, OrderedDict())
        yield
    finally:
        for module, attribute, table in kept:
            # What was registered meanwhile stays: transformers installs its own hooks in the
            # first forward that asks for hidden states.
            table.update(getattr(module, attribute))
            setattr(module, attribute, table)


def hook_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the forward (pre-)hooks on `module`, for the audit."""
    hooks = [hook for attribute in _ATTRIBUTES for hook in getattr(module, attribute).values()]
    return tuple(getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks)


def global_hook_names() -> tuple[str, ...]:
    """Names of the forward (pre-)hooks that torch runs on every module."""
    after, before = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    # Asked at the beginning of every batch, and there are hardly ever any.
    if not after and not before:
        return ()
    hooks = [*after.values(), *before.values()]
    return tuple(getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks)
