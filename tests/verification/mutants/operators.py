"""Mutates source code: small mutations of cosmic-ray, and two of arguments."""

import ast
from collections.abc import Iterator
import sys

try:
  from cosmic_ray import plugins
  from cosmic_ray.ast import ast_nodes, get_ast
  from cosmic_ray.mutating import mutate_code
  from cosmic_ray.operators.operator import Operator
except ImportError:
  sys.exit("random faults need cosmic-ray: `python -m pip install cosmic-ray`")

_NEAR = (
  "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_FloorDiv Pow_Mul",
  "RShift_LShift LShift_RShift BitOr_BitAnd BitAnd_BitOr BitXor_BitOr",
  "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_Gt Gt_Lt Is_IsNot IsNot_Is",
  "UAdd_USub USub_UAdd Delete_USub Delete_Invert Delete_Not",
)
"""Replacements of an operator by a similar one; others rarely run at all."""
_PAIRS = {pair for pairs in _NEAR for pair in pairs.split()}
_EXCLUDED = {"RemoveDecorator", "VariableReplacer", "VariableInserter"}
_COMMUTATIVE = {"add", "equal", "logical_and", "logical_or", "max", "maximum"}
_COMMUTATIVE |= {"min", "minimum", "multiply", "not_equal"}


class SwapArguments(Operator):
  """Turns f(x, y) into f(y, x), for two names, unless f is commutative."""

  def mutation_positions(self, node):
    return [
      (node.children[i].start_pos, node.children[i].end_pos)
      for i in self._first_arguments(node)
    ]

  def mutate(self, node, index):
    i = self._first_arguments(node)[index]
    children = node.children
    children[i], children[i + 2] = children[i + 2], children[i]
    return node

  @staticmethod
  def _first_arguments(node):
    children = node.children if node.type == "arglist" else []
    called = node.parent.get_previous_sibling() if children else None
    if called and called.get_last_leaf().value in _COMMUTATIVE:
      return []
    codes = [x.get_code(include_prefix=False) for x in children]
    return [
      i
      for i in range(0, len(children) - 2, 2)
      if children[i].type == children[i + 2].type == "name"
      and codes[i] != codes[i + 2]
    ]

  @classmethod
  def examples(cls):
    return ()


class DropKeyword(Operator):
  """Turns f(x, y=1) into f(x), except for `strict`, which only asserts."""

  def mutation_positions(self, node):
    return [
      (node.children[i].start_pos, node.children[i].end_pos)
      for i in self._keywords(node)
    ]

  def mutate(self, node, index):
    i = self._keywords(node)[index]
    with_comma = node.children[i + 1 : i + 2]
    is_followed = with_comma and with_comma[0].type == "operator"
    is_followed = is_followed and with_comma[0].value == ","
    del node.children[i : i + 1 + bool(is_followed)]
    return node

  @staticmethod
  def _keywords(node):
    if node.type not in ("arglist", "trailer"):
      return []
    return [
      i
      for i, x in enumerate(node.children)
      if x.type == "argument" and x.children[1].get_code() == "="
      if x.children[0].get_code(include_prefix=False) != "strict"
    ]

  @classmethod
  def examples(cls):
    return ()


OPERATORS = {
  **{
    name: plugins.get_operator(name)
    for name in plugins.operator_names()
    if name.rpartition("/")[2] not in _EXCLUDED
    and ("Operator_" not in name or name.partition("Operator_")[2] in _PAIRS)
  },
  "SwapArguments": SwapArguments,
  "DropKeyword": DropKeyword,
}


def mutations(source: str) -> Iterator[tuple[str, int, tuple[int, int]]]:
  """Yields operator, occurrence and position of each mutation."""
  nodes = list(ast_nodes(get_ast(source)))
  for name, operator in OPERATORS.items():
    positions = [
      (node, start)
      for node in nodes
      for start, _ in operator().mutation_positions(node)
    ]
    for occurrence, (node, start) in enumerate(positions):
      # The * of a signature is not a product.
      if not node.parent or node.parent.type != "parameters":
        yield name, occurrence, start


def mutate(source: str, operator: str, occurrence: int) -> str:
  """Returns source with one mutation, or unchanged if that is invalid Python."""
  text = mutate_code(source, OPERATORS[operator](), occurrence)
  try:
    ast.parse(text)
  except SyntaxError:
    return source
  return text
