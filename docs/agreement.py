"""Writes a page that compares functions and definitions with other programs.

`python -m docs.agreement` writes docs/agreement.md in two minutes.
"""

from collections.abc import Mapping
import pathlib
from typing import NamedTuple

from attention.mechanism import ATTENTIONS
from tests.verification.peers import agreement, vectors
from tests.verification.peers.vectors import Case
import training  # noqa: F401 - switches off a faulty fusion of XLA

PAGE = pathlib.Path(__file__).with_suffix(".md")

_HEADINGS = (
  *("mechanism", "witness", "compared"),
  *("results", "gradients", "definition", "date"),
)
_MEASURED = slice(3, 6)
"""Columns of measured differences."""

_REPOSITORIES = {
  "fla": "https://github.com/fla-org/flash-linear-attention",
  "fla_recurrences": "https://github.com/fla-org/flash-linear-attention",
  "fla_momentum": "https://github.com/fla-org/flash-linear-attention",
  "jla": "https://pypi.org/project/jax-linear-attention",
  "ejkernel": "https://pypi.org/project/ejkernel",
  "jla_recurrences": "https://pypi.org/project/jax-linear-attention",
  "jla_ttt": "https://pypi.org/project/jax-linear-attention",
  "jla_states": "https://pypi.org/project/jax-linear-attention",
  "recurrentgemma": "https://github.com/google-deepmind/recurrentgemma",
  "mlstm_kernels": "https://github.com/NX-AI/mlstm_kernels",
  "mamba3_jax": "https://pypi.org/project/mamba3-jax",
  "fla_titans": "https://github.com/fla-org/flash-linear-attention",
  "titans": "https://pypi.org/project/titans-pytorch",
  "ttt": "https://github.com/test-time-training/ttt-lm-jax",
  "torch": "https://github.com/pytorch/pytorch",
  "zoology": "https://github.com/HazyResearch/zoology",
  "transformers": "https://github.com/huggingface/transformers",
  "transformers_states": "https://github.com/huggingface/transformers",
  "transformers_4": "https://github.com/huggingface/transformers",
  "jax": "https://github.com/jax-ml/jax",
}

_TEXT = """---
html_theme.sidebar_secondary.remove: true
---

# Agreement

Tests compare the functions and the definitions with other implementations, the *peers*. [tests/verification/peers](../tests/verification/peers) has their arguments, results, gradients and states, and the scripts that made them. *results*, *gradients* and *definition* are the largest differences, relative to the largest value of an array; tests allow 2e-5, and 1e-4 for gradients. Peers compute in float32, definitions in float64. `python -m docs.agreement` writes this page.

"""

_DISAGREEMENTS = """
## Where peers disagree

Some peers disagree with each other or with the paper. The test vectors follow the same rule as this project.

| | difference | here |
| --- | --- | --- |
| `comba` | `naive_recurrent_comba` of fla decays the state before it erases; fla's chunked form and kernels, and equation 9 of the paper, erase from the state before the decay | as the paper |
| `comba` | the layer of fla subtracts d·p from the query and normalises p to length 1, which loses σ(a); the paper subtracts d·k | as the paper |
| `path` | fla and jla multiply the cumulative log forget gates by the scale; the paper adds them unscaled | as the paper |
| `kimi_delta` | ejkernel has a decay for each head; the paper, fla, jla and transformers have a decay for each channel | as the paper |
| `mlstm` | the authors' code starts with m = 0, jla with m = −∞, which matters with ε > 0 only; a segment of packed rows starts with m = 0 here | m = 0 |
| `ttt_linear` | fla adds z = q W + b instead of q to LN(z) | q, as the paper and its code |
| `ttt_linear` | jla does not restart mini-batches where a segment starts | restarted |
| `titans` | the references of fla add a layer norm and a residual, and their gradient of the norm does not multiply sums over channels by D | one matrix without a norm, as equation 12 |
| `rg_lru` | equation 4 multiplies the input of the first position by √(1 − a²) as well; the authors' code and transformers do not | as the code |
| `mamba` | equation 4 of the paper multiplies B by (e^(ΔA) − 1) / A, its code by Δ | as the code |
| `mamba3` | in the authors' code, jla and mamba3-jax, the decay rate is 1 + x for x ≥ 0 and 1 / (1 − x) for x < 0; mamba3-ssm uses softplus | softplus |
| `lightning` | the decay rates of fla are (8 n / N)(1 − l / L) for head n of N, from 0; those of transformers and jla are 2^(−8(n+1)/N)(1 − l / (L − 1) + 10⁻⁵). transformers does not divide by √H | geometric, with the call's scale |
| `logits_soft_cap` | transformers adds a bias after the cap, tokamax adds it before the cap | after |
| `return_lse` | `jax.nn.dot_product_attention` stops the gradient of its log-sum-exp, `flex_attention` does not | with gradient |
| `moba`, `dsa`, `nsa` | among equal scores, `torch.topk`, which fla and the authors of MoBA use, selects any; `jax.lax.top_k`, which jla uses, selects the earlier key or block | the earlier |
| `nsa` | fla averages the keys of a block; the paper uses an MLP | a weighted sum, which the vectors set to the mean |
| `lsh` | transformers, and reformer-pytorch by default, let a query attend to keys of other buckets in its chunks, and count a pair once for each round that contains it; the paper counts it once | as the paper |
| `performer` | performer-pytorch adds 10⁻⁴ to exponentials, the paper adds nothing; performer-pytorch does not divide by √M before a relu | as the paper, and divided by √M |
| `nystrom` | the authors' code and packages start the iteration with the largest norm of a batch; the paper starts with the norm of one matrix | both, by `shared_start` |
| `differential` | heads n and n + N of DiffLlama are the halves of one head; in the paper, neighbouring heads are | neighbours |
| `differential` | `multihead_diffattn` of unilm repeats half-heads where key heads are grouped; its `flashdiff_1` and `flashdiff_2` pair the halves of a head | as `flashdiff` |
| `window_2d` | torchvision shifts along one axis alone where the other axis fits into one window; the authors' code shifts along both | as the authors' code |
| `window_2d` | Swin's code adds −100 to the logits of pairs that only the roll puts into the same window | masked, or −100 by `hidden_logit` |
| `strided_2d` | CvT divides logits by the square root of the width of all heads, its paper by that of one head | of one head, or `scale` |
| `sliding_window` | a window of w means w keys on each side here and in `jax.nn`, w / 2 on each side in Longformer, and the last w keys, including the query's own, in fla and jla | on each side |
"""


class Row(NamedTuple):
  """The cases in which one peer is the witness of a mechanism."""

  mechanism: str
  cases: list[Case]

  @property
  def witness(self) -> str:
    """Names the peer, its version and its functions."""
    first = self.cases[0]
    names = "; ".join(dict.fromkeys(case.witness for case in self.cases))
    if first.peer in _REPOSITORIES:
      return f"[{first.version}]({_REPOSITORIES[first.peer]}): {names}"
    return names

  @property
  def compared(self) -> str:
    """Lists what the test vectors of these cases contain."""
    names = dict.fromkeys(x for case in self.cases for x in case.result)
    words = ["results" if "out" in names else ""]
    words += [x for x in names if x != "out"]
    words.append("gradients")
    if any(_has_groups(case) for case in self.cases):
      words.append("grouped heads")
    fixed = {name for case in self.cases for name in case.fixed}
    if any("segment_ids" in name for name in fixed):
      words.append("segments")
    if "mask" in fixed:
      words.append("masks")
    lowest = min(_lowest_decay(case) for case in self.cases)
    if lowest < 0:
      words.append(f"decays to e^{lowest:.0f}".replace("-", "−"))
    return ", ".join(words)

  @property
  def date(self) -> str:
    """The date of the newest vectors."""
    return max(case.date for case in self.cases)


def _has_groups(case: Case) -> bool:
  heads = [case.given[x].shape[-2] for x in ("query", "key") if x in case.given]
  return len(set(heads)) > 1


def _lowest_decay(case: Case) -> float:
  names = "log_decay", "log_forget"
  return min((case.given[x].min() for x in names if x in case.given), default=0)


def rows() -> list[Row]:
  """Returns one row per mechanism and peer, in the order of `ATTENTIONS`."""
  by_row: dict[tuple[str, str], list[Case]] = {}
  for case in vectors.read():
    by_row.setdefault((case.mechanism, case.peer), []).append(case)
  order = [*ATTENTIONS, "positions"]
  table = [Row(mechanism, cases) for (mechanism, _), cases in by_row.items()]
  return sorted(table, key=lambda row: order.index(row.mechanism))


def unmeasured_cells(row: Row) -> list[str]:
  """Returns the cells of a row, with empty text for measured differences."""
  return [
    *(f"`{row.mechanism}`", row.witness, row.compared),
    *("", "", "", row.date),
  ]


def measure(row: Row) -> list[str]:
  """Returns the largest differences of results, gradients and definitions."""
  worst: dict[str, float] = dict.fromkeys(("out", "grad", "def"), 0.0)

  def update(name: str, differences: Mapping[str, float]) -> None:
    worst[name] = max(worst[name], *differences.values())

  for case in row.cases:
    results, gradients = agreement.results_and_gradients(case)
    update("out", agreement.differences(results, case.result))
    update("grad", agreement.differences(gradients, case.gradient))
    if case.definition:
      results = agreement.definition_results(case)
      expected = {x: y for x, y in case.result.items() if x in results}
      update("def", agreement.differences(results, expected))
  return [f"{x:.0e}" if x else "" for x in worst.values()]


def page_rows(text: str) -> list[list[str]]:
  """Returns the cells of the first table of a page like `unmeasured_cells`."""
  table = text.partition("| --- |")[2].partition("\n\n")[0].splitlines()[1:]
  rows = [[x.strip() for x in line.strip("|").split("|")] for line in table]
  for cells in rows:
    cells[_MEASURED] = ["", "", ""]
  return rows


def main() -> None:
  """Writes the page."""
  lines = [list(_HEADINGS), ["---"] * len(_HEADINGS)]
  for row in rows():
    cells = unmeasured_cells(row)
    cells[_MEASURED] = measure(row)
    lines.append(cells)
  table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
  PAGE.write_text(_TEXT + table + _DISAGREEMENTS, encoding="utf-8")


if __name__ == "__main__":
  main()
