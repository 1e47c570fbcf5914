"""The binding of a parsed query: names become columns, literals become values, and types are checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sqlglot import exp

from dormouse.errors import InvalidQuery
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.rows import types
from dormouse.rows.columns import Column
from dormouse.rows.expressions import (
    ROW_ID_CELL,
    ROW_VERSION_CELL,
    Aggregate,
    Apply,
    Cell,
    Expression,
    Order,
    Selected,
    Statement,
    Value,
    has_aggregate,
)
from dormouse.rows.sql import label, name_node, only, refused
from dormouse.rows.types import AGGREGATES, ARITHMETIC, CALLS, COMPARED

CLAUSES = ("expressions", "from_", "where", "group", "order", "limit", "offset", "distinct", "having")
ROWS_MAX = (1 << 63) - 1
_ITEM = re.compile(r"\d{1,9}")


class Binding:
    """The binding of one syntax tree to a table. It does not change the tree, which may be cached."""

    def __init__(
        self, tree: exp.Select, table: str, columns: Sequence[Column], values: Mapping[str, Value]
    ) -> None:
        self._values, self._used = values, set[str]()
        self._tree = only(tree, *CLAUSES)
        self._columns = columns
        self._exact = {column.name: column for column in columns}
        self._folded = {column.name.casefold(): column for column in columns}
        self._table = self._check_table(table)
        self._aggregates = 0

    def statement(self) -> Statement:
        tree = self._tree
        distinct = tree.args.get("distinct")
        if distinct is not None:
            only(distinct)
        where = tree.args.get("where")
        condition = None if where is None else self._condition(only(where, "this").this)
        if self._aggregates:
            raise InvalidQuery("WHERE tests single rows: it can have no aggregate")
        selected = tuple(item for node in tree.expressions for item in self._items(node))
        if not selected:
            raise InvalidQuery("the query selects nothing")
        groups = self._groups(selected)
        orders = self._orders(selected)
        having = tree.args.get("having")
        kept = None if having is None else self._condition(only(having, "this").this)
        is_grouped = bool(groups) or self._aggregates > 0 or kept is not None
        if is_grouped:
            results = [*(s.expression for s in selected), *(o.expression for o in orders)]
            for expression in results if kept is None else [*results, kept]:
                types.check_grouped(expression, groups)
        if distinct is not None:
            listed = {item.expression for item in selected}
            for item in selected:
                types.check_comparable(item.expression, "DISTINCT")
            if not all(order.expression in listed for order in orders):
                raise InvalidQuery("with DISTINCT, ORDER BY can only use what is selected")
        if distinct is None and not is_grouped:
            types.check_keys(selected)
        limit, offset = self._count("limit"), self._count("offset")
        if unused := self._values.keys() - self._used:
            raise InvalidQuery(f"the query has no parameter ${min(unused)}")
        return Statement(
            selected, distinct is not None, condition, groups, is_grouped, orders, limit, offset or 0, kept
        )

    def _check_table(self, name: str) -> frozenset[str]:
        """Returns the name that may qualify columns, in lower case: the alias of the table, or else its name.

        Raises `InvalidQuery` if the query reads nothing or another table.
        """
        source = self._tree.args.get("from_")
        if source is None:
            raise InvalidQuery(f"the query reads nothing: write FROM {name}")
        table = only(source, "this").this
        if type(table) is not exp.Table:
            raise refused(table)
        only(table, "this", "alias")
        source_name = only(name_node(table.this), "this", "quoted")
        is_other = source_name.args.get("quoted") or source_name.this.casefold() != name.casefold()
        if source_name.this != name and is_other:
            raise InvalidQuery(
                f"the query reads {source_name.this!r}: it can read only its own table {name!r}"
            )
        alias = table.args.get("alias")
        if alias is None:
            return frozenset({name.casefold()})
        return frozenset({only(name_node(only(alias, "this").this), "this", "quoted").this.casefold()})

    def _items(self, node: exp.Expression) -> list[Selected]:
        if type(node) is exp.Star:
            only(node)
            return self._all()
        if type(node) is exp.Column and type(node.this) is exp.Star:
            only(node.this)
            self._check_qualifier(only(node, "this", "table"))
            return self._all()
        if type(node) is exp.Alias:
            only(node, "this", "alias")
            name = only(name_node(node.args["alias"]), "this", "quoted").this
            return [replace(self._item(node.this), name=name)]
        return [self._item(node)]

    def _item(self, node: exp.Expression) -> Selected:
        expression = self._expression(node)
        if isinstance(expression, Cell):
            column = next((c for c in self._columns if c.column_id == expression.column_id), None)
            if column is not None:
                return Selected(column.name, column.type, expression)
            return Selected(ROW_ID if expression == ROW_ID_CELL else ROW_VERSION, "INTEGER", expression)
        kind = "STRING" if expression.kind == "NULL" else expression.kind
        return Selected(label(node), kind, types.of_kind(expression, kind))

    def _all(self) -> list[Selected]:
        return [Selected(column.name, column.type, types.cell(column)) for column in self._columns]

    def _groups(self, selected: tuple[Selected, ...]) -> tuple[Expression, ...]:
        group = self._tree.args.get("group")
        if group is None:
            return ()
        before = self._aggregates
        found = [
            self._named(node, selected, "GROUP BY", columns_first=True)
            for node in only(group, "expressions").expressions
        ]
        for expression in found:
            types.check_comparable(expression, "GROUP BY")
            if isinstance(expression, Value) or has_aggregate(expression) or self._aggregates > before:
                raise InvalidQuery("GROUP BY takes columns and expressions of columns")
        return tuple(dict.fromkeys(found))

    def _orders(self, selected: tuple[Selected, ...]) -> tuple[Order, ...]:
        order = self._tree.args.get("order")
        if order is None:
            return ()
        found = []
        for node in only(order, "expressions").expressions:
            if type(node) is not exp.Ordered:
                raise refused(node)
            only(node, "this", "desc", "nulls_first")
            expression = self._named(node.this, selected, "ORDER BY", columns_first=False)
            types.check_comparable(expression, "ORDER BY")
            if not isinstance(expression, Value):
                found.append(
                    Order(expression, bool(node.args.get("desc")), bool(node.args.get("nulls_first")))
                )
        return tuple(found)

    def _named(
        self, node: exp.Expression, selected: tuple[Selected, ...], clause: str, *, columns_first: bool
    ) -> Expression:
        """Returns the expression of an item of GROUP BY or ORDER BY.

        The item may be the number or the alias of a selected item. With `columns_first`, a name means a
        column of the table if there is one, and otherwise an alias.
        """
        if type(node) is exp.Literal and not node.is_string:
            number = int(node.this) if _ITEM.fullmatch(node.this) else 0
            if not 1 <= number <= len(selected):
                raise InvalidQuery(f"{clause} {node.this[:20]}: the query selects {len(selected)} columns")
            return selected[number - 1].expression
        if type(node) is exp.Column and not node.args.get("table"):
            identifier = only(name_node(only(node, "this").this), "this", "quoted")
            if not (columns_first and self._find(identifier) is not None):
                for item in selected:
                    if item.name == identifier.this or (
                        not identifier.args.get("quoted")
                        and item.name.casefold() == identifier.this.casefold()
                    ):
                        return item.expression
        return self._expression(node)

    def _count(self, name: str) -> int | None:
        node = self._tree.args.get(name)
        if node is None:
            return None
        if type(node) not in (exp.Limit, exp.Offset):
            raise refused(node)
        value = self._expression(only(node, "expression").args["expression"])
        if not isinstance(value, Value) or type(value.value) is not int or not 0 <= value.value <= ROWS_MAX:
            raise InvalidQuery(f"{name.upper()} takes a whole number of rows")
        return value.value

    def _condition(self, node: exp.Expression) -> Expression:
        condition = self._expression(node)
        if condition.kind not in ("BOOLEAN", "NULL"):
            raise InvalidQuery(f"{label(node)!r} is {condition.kind}: a condition is true or false")
        return types.of_kind(condition, "BOOLEAN")

    def _expression(self, node: exp.Expression) -> Expression:
        bind = EXPRESSIONS.get(type(node))
        if bind is None:
            raise refused(node)
        return bind(self, node)

    def _column(self, node: exp.Expression) -> Expression:
        self._check_qualifier(only(node, "this", "table"))
        identifier = only(name_node(node.this), "this", "quoted")
        found = self._parameter(identifier) or self._find(identifier)
        if found is None and identifier.this[:1] == "$" and not identifier.args.get("quoted"):
            raise InvalidQuery(f"the query's parameter {identifier.this} has no value: give it in parameters")
        if found is None:
            known = ", ".join(column.name for column in self._columns[:20])
            raise InvalidQuery(f"there is no column {identifier.this!r}; the columns are {known or 'none'}")
        return found

    def _parameter(self, identifier: exp.Identifier) -> Value | None:
        """Returns the value of a parameter `$name`, or None if the name is not that of a given parameter."""
        name = identifier.this[1:].lower()
        if identifier.args.get("quoted") or identifier.this[:1] != "$" or name not in self._values:
            return None
        self._used.add(name)
        return self._values[name]

    def _find(self, identifier: exp.Identifier) -> Expression | None:
        if identifier.this.upper() in (ROW_ID, ROW_VERSION):
            return ROW_ID_CELL if identifier.this.upper() == ROW_ID else ROW_VERSION_CELL
        column = self._exact.get(identifier.this)
        if column is None and not identifier.args.get("quoted"):
            column = self._folded.get(identifier.this.casefold())
        return None if column is None else types.cell(column)

    def _check_qualifier(self, node: exp.Expression) -> None:
        table = node.args.get("table")
        if table is not None and only(name_node(table), "this", "quoted").this.casefold() not in self._table:
            raise InvalidQuery(f"the query reads no {table.this!r}")

    def _literal(self, node: exp.Expression) -> Expression:
        only(node, "this", "is_string")
        if node.args.get("is_string"):
            return Value("STRING", node.this)
        return types.number(types.numeral(node.this))

    def _null(self, node: exp.Expression) -> Expression:
        only(node)
        return Value("NULL", None)

    def _negation(self, node: exp.Expression) -> Expression:
        inner = only(node, "this").this
        if type(inner) is exp.Literal and not inner.is_string:
            return types.number("-" + types.numeral(only(inner, "this").this))
        operand = types.numeric(self._expression(inner), "-")
        return Apply(operand.kind, "negate", (operand,))

    def _arithmetic(self, node: exp.Expression) -> Expression:
        # sqlglot sets `typed` and `safe` for the division rules of other dialects: they do not matter here
        only(node, "this", "expression", "typed", "safe")
        left, right = self._expression(node.this), self._expression(node.args["expression"])
        return types.arithmetic(ARITHMETIC[type(node)], left, right)

    def _comparison(self, node: exp.Expression) -> Expression:
        only(node, "this", "expression")
        left, right = types.alike([self._expression(node.this), self._expression(node.args["expression"])])
        return Apply("BOOLEAN", COMPARED[type(node)], (left, right))

    def _connective(self, node: exp.Expression) -> Expression:
        """Returns a chain of AND or of OR, of any length, as one expression."""
        kind, operands = type(node), []
        while type(node) is kind:
            operands.append(self._condition(only(node, "this", "expression").args["expression"]))
            node = node.this
        operands.append(self._condition(node))
        return Apply("BOOLEAN", "and" if kind is exp.And else "or", tuple(reversed(operands)))

    def _not(self, node: exp.Expression) -> Expression:
        return Apply("BOOLEAN", "not", (self._condition(only(node, "this").this),))

    def _is(self, node: exp.Expression) -> Expression:
        only(node, "this", "expression", "negate")
        right, negated = node.args["expression"], bool(node.args.get("negate"))
        if type(right) is exp.Not:
            right, negated = only(right, "this").this, not negated
        if type(right) is not exp.Null:
            raise InvalidQuery(f"{label(node)!r}: IS takes NULL or NOT NULL; compare with =")
        operand = self._expression(node.this)
        found = Apply(
            "BOOLEAN", "is null", (types.of_kind(operand, "STRING") if operand.kind == "NULL" else operand,)
        )
        return Apply("BOOLEAN", "not", (found,)) if negated else found

    def _in(self, node: exp.Expression) -> Expression:
        only(node, "this", "expressions")
        found = types.alike([self._expression(one) for one in (node.this, *node.expressions)])
        if len(found) < 2 or not all(isinstance(value, Value) for value in found[1:]):
            raise InvalidQuery("IN takes a list of values")
        return Apply("BOOLEAN", "in", tuple(found))

    def _between(self, node: exp.Expression) -> Expression:
        only(node, "this", "low", "high")
        value, low, high = types.alike(
            [self._expression(node.args[name]) for name in ("this", "low", "high")]
        )
        bounds = (Apply("BOOLEAN", ">=", (value, low)), Apply("BOOLEAN", "<=", (value, high)))
        return Apply("BOOLEAN", "and", bounds)

    def _like(self, node: exp.Expression) -> Expression:
        escape = None
        if type(node) is exp.Escape:
            escape = only(node, "this", "expression").args["expression"]
            node = node.this
            if type(node) is not exp.Like:
                raise refused(node)
        only(node, "this", "expression", "negate")
        operands = [self._expression(node.this), self._expression(node.args["expression"])]
        if escape is not None:
            operands.append(self._expression(escape))
        found = types.like(operands)
        return Apply("BOOLEAN", "not", (found,)) if node.args.get("negate") else found

    def _case(self, node: exp.Expression) -> Expression:
        """Returns the expression of a CASE.

        In `CASE x WHEN y`, the conditions are comparisons of the value after CASE: `x = y`.
        """
        subject, default = only(node, "this", "ifs", "default").this, node.args.get("default")
        conditions, values = [], []
        for one in node.args["ifs"]:
            wanted = only(one, "this", "true").this
            equal = exp.EQ(this=subject, expression=wanted)
            conditions.append(self._condition(wanted) if subject is None else self._comparison(equal))
            values.append(self._expression(one.args["true"]))
        values.append(Value("NULL", None) if default is None else self._expression(default))
        return types.case(conditions, values)

    def _cast(self, node: exp.Expression) -> Expression:
        kind = only(only(node, "this", "to").args["to"], "this", "nested")
        return types.cast(self._expression(node.this), kind)

    def _call(self, node: exp.Expression) -> Expression:
        only(node, "this", "expression", "expressions", "safe")
        given = [node.this, node.args.get("expression"), *(node.args.get("expressions") or ())]
        return CALLS[type(node)]([self._expression(one) for one in given if one is not None])

    def _aggregate(self, node: exp.Expression) -> Expression:
        function = AGGREGATES[type(node)]
        operand = only(node, "this", "big_int").this
        if type(operand) is exp.Star and function == "count":
            only(operand)
            self._aggregates += 1
            return Aggregate("INTEGER", "count", None)
        distinct = type(operand) is exp.Distinct
        if distinct:
            listed = only(operand, "expressions").expressions
            if len(listed) != 1:
                raise InvalidQuery(f"{function} takes one value")
            operand = listed[0]
        if not isinstance(operand, exp.Expression):
            raise InvalidQuery(f"{function} takes one value")
        before = self._aggregates
        found = self._expression(operand)
        if self._aggregates > before:
            raise InvalidQuery("an aggregate cannot contain another aggregate")
        self._aggregates += 1
        return types.aggregate(function, found, distinct=distinct)


EXPRESSIONS: dict[type, Callable[[Binding, exp.Expression], Expression]] = {
    exp.Column: Binding._column,
    exp.Literal: Binding._literal,
    exp.Null: Binding._null,
    exp.Boolean: lambda _, node: Value("BOOLEAN", bool(only(node, "this").this)),
    exp.Paren: lambda binding, node: binding._expression(only(node, "this").this),
    exp.Neg: Binding._negation,
    exp.Not: Binding._not,
    exp.And: Binding._connective,
    exp.Or: Binding._connective,
    exp.Is: Binding._is,
    exp.In: Binding._in,
    exp.Between: Binding._between,
    exp.Like: Binding._like,
    exp.Escape: Binding._like,
    exp.Case: Binding._case,
    exp.Cast: Binding._cast,
    **dict.fromkeys(CALLS, Binding._call),
    **dict.fromkeys(ARITHMETIC, Binding._arithmetic),
    **dict.fromkeys(COMPARED, Binding._comparison),
    **dict.fromkeys(AGGREGATES, Binding._aggregate),
}
