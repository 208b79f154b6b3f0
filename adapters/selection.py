"""Which modules a config selects, as PEFT's `check_target_module_exists` does it.

Lists are looked up, expressions are compiled once and matched with a limit on time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

from ..core.expressions import Expression, Patience
from .patterns import DottedEnds, WholePattern, too_slow

_PLAIN = re.compile(r"[\w\-]*")
# Python converts no longer ones; no index is near.
_MOST_DIGITS = 4300


class ModuleSelection:
    """The keys of a config that select modules.

    Args:
        targets: names, or one regular expression for whole names.
        exclude: the same, of modules that are left out.
        layers: the only layers that count, of targets that are not named in full; None for all.
        layers_pattern: what the lists of layers are called.
        modules_to_save: modules that are left out, with what lies in them.

    Raises:
        re.error: an expression that a checked config does not have.
    """

    def __init__(
        self,
        targets: Sequence[str] | str,
        *,
        exclude: Sequence[str] | str | None = None,
        layers: Sequence[int] | int | None = None,
        layers_pattern: Sequence[str] | str | None = None,
        modules_to_save: Sequence[str] | None = None,
    ) -> None:
        self._targets = _names("target_modules", targets)
        self._full = frozenset(() if isinstance(targets, str) else targets)
        self._exclude = _names("exclude_modules", exclude) if exclude else None
        self._layers = frozenset((layers,) if isinstance(layers, int) else layers or ())
        patterns = (layers_pattern,) if isinstance(layers_pattern, str) else layers_pattern
        # An empty text means any list of layers; in a list it is an expression like others.
        self._layers_pattern = tuple(patterns or ()) if layers_pattern else ()
        self._saved = tuple(modules_to_save or ())
        self._patience = Patience()

    def selects(self, name: str) -> bool:
        """Whether the adapter has weights for this module.

        Args:
            name: as the adapter calls it.

        Raises:
            AdapterUnsupportedError: a regular expression takes too long.
        """
        if self._exclude is not None and self._exclude.matches(name):
            return False
        if self._saved and self._is_saved(name):
            return False
        if not self._targets.matches(name):
            return False
        if isinstance(self._targets, WholePattern) or not self._layers or name in self._full:
            return True
        return self._layer(name) in self._layers

    @cached_property
    def _saved_plain(self) -> frozenset[str]:
        return frozenset(entry for entry in self._saved if _PLAIN.fullmatch(entry))

    @cached_property
    def _saved_expressions(self) -> dict[str, Expression]:
        return {entry: _saved_expression(entry) for entry in {*self._saved} - self._saved_plain}

    def _is_saved(self, name: str) -> bool:
        expressions = self._saved_expressions
        if "\n" in name:
            # No dot of PEFT's frame stands for a line break.
            plain = {entry: _saved_expression(entry) for entry in self._saved_plain}
            expressions = {**expressions, **plain}
        elif not self._saved_plain.isdisjoint(name.split(".")):
            return True
        return any(
            _match(expression, name, "modules_to_save", entry, self._patience)
            for entry, expression in expressions.items()
        )

    @cached_property
    def _layer_expressions(self) -> dict[str, Expression | None]:
        # Lazy: the first index counts, not that of an expert.
        if not self._layers_pattern:
            return {"": Expression(r".*?\.[^.]*\.(?P<idx>\d+)\.")}
        return dict.fromkeys(self._layers_pattern)

    def _layer(self, name: str) -> int | None:
        for pattern, compiled in self._layer_expressions.items():
            # Compiled when it is reached: most lists end at their first entry.
            expression = compiled or Expression(rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.")
            self._layer_expressions[pattern] = expression
            match = _match(expression, name, "layers_pattern", pattern, self._patience)
            if match is not None:
                digits = match["idx"]
                return int(digits) if len(digits) <= _MOST_DIGITS else None
        return None


def _names(key: str, value: Sequence[str] | str) -> WholePattern | DottedEnds:
    return WholePattern(value, key) if isinstance(value, str) else DottedEnds(value)


def _saved_expression(entry: str) -> Expression:
    return Expression(rf"(^|.*\.){entry}($|\..*)")


def _match(
    expression: Expression, name: str, key: str, pattern: str, patience: Patience
) -> re.Match[str] | None:
    try:
        return expression.match(name, patience)
    except TimeoutError as error:
        raise too_slow(key, pattern, error) from error
