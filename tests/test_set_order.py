"""No program or message depends on the order of a set, which differs by process.

Processes of one run must compile the same program, and a later process finds only the
same program in the compilation cache.
"""

import ast
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parent.parent
_FOLDERS = ("attention", "models", "training", "projects")


def _is_set(node, sets):
  match node:
    case ast.Set() | ast.SetComp():
      return True
    case ast.Name(id=name):
      return name in sets
    case ast.Call(func=ast.Name(id="set" | "frozenset")):
      return True
    case ast.Call(func=ast.Attribute(attr="union" | "intersection")):
      return True
    case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() | ast.Sub()):
      is_keys = isinstance(left, ast.Call) and ast.unparse(left).endswith(
        ".keys()"
      )
      return is_keys or _is_set(left, sets) or _is_set(node.right, sets)
  return False


def _ordered_loops(source):
  """Loops over a set whose results have an order: statements, lists and dicts."""
  for function in ast.walk(ast.parse(source)):
    if not isinstance(function, ast.FunctionDef):
      continue
    nodes = list(ast.walk(function))
    sets = {
      node.targets[0].id
      for node in nodes
      if isinstance(node, ast.Assign)
      and isinstance(node.targets[0], ast.Name)
      and _is_set(node.value, set())
    }
    for node in nodes:
      if isinstance(node, ast.For) and _is_set(node.iter, sets):
        yield ast.unparse(node.iter)
      if isinstance(node, ast.DictComp | ast.ListComp):
        for generator in node.generators:
          if _is_set(generator.iter, sets):
            yield ast.unparse(generator.iter)


@pytest.mark.parametrize("folder", _FOLDERS)
def test_loops_over_sets_are_sorted(folder):
  found = {}
  for path in sorted((_ROOT / folder).rglob("*.py")):
    loops = [*_ordered_loops(path.read_text("utf-8"))]
    if loops and "tests" not in path.parts:
      found[str(path.relative_to(_ROOT))] = loops
  assert not found


def test_what_counts_as_a_loop_over_a_set():
  source = """
def f(a, b):
  names = a.keys() & b
  x = {n: 0 for n in names}
  for n in {1, 2}: pass
  for n in sorted(names): pass
  return {n for n in names}, [n for n in set(a) - b]
"""
  assert [*_ordered_loops(source)] == ["{1, 2}", "names", "set(a) - b"]
