"""The paired bootstrap of BLEU, held to SacreBLEU's, and its table."""

import re

import numpy as np
import pytest
import sacrebleu
from sacrebleu import significance

from reports import bootstrap, latex, markdown, page, sentences, style, summary
from tests.reports import made_up

WORDS = [f"w{i}" for i in range(40)]


def sentences_of(num, length=(1, 15)):
  """Made-up references."""
  generator = np.random.default_rng(0)
  return [
    " ".join(generator.choice(WORDS, generator.integers(*length)))
    for _ in range(num)
  ]


def translated(references, wrong, seed=0):
  """Outputs in which a share of the words is wrong; some end early."""
  generator = np.random.default_rng(seed)
  outputs = []
  for reference in references:
    words = np.array(reference.split())
    is_wrong = generator.random(len(words)) < wrong
    changed = np.where(is_wrong, generator.choice(WORDS, len(words)), words)
    outputs.append(" ".join(changed[: generator.integers(1, 20)]))
  return outputs


def statistics(references, wrong, seed=0):
  """Of the sentences of such outputs."""
  outputs = translated(references, wrong, seed)
  metric = sacrebleu.BLEU(effective_order=True)
  scores = [
    metric.sentence_score(output, [reference])
    for output, reference in zip(outputs, references, strict=True)
  ]
  return [[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores]


@pytest.mark.parametrize("effective_order", [False, True])
@pytest.mark.parametrize(
  ("wrong", "length"), [(0.2, (1, 15)), (0.9, (4, 9)), (1.0, (1, 3))]
)
def test_bleu_is_sacrebleus(wrong, length, effective_order):
  """Sums with every order, without right 4-grams, without any 4-gram, and empty."""
  found = np.array(statistics(sentences_of(30, length), wrong), float)
  sums = [found[i : i + n].sum(0) for i in range(20) for n in (1, 3, 10)]
  sums += [np.zeros(10), np.array([0] * 9 + [5])]
  expected = [
    sacrebleu.BLEU.compute_bleu(
      correct=one[:4].tolist(),
      total=one[4:8].tolist(),
      sys_len=int(one[8]),
      ref_len=int(one[9]),
      smooth_method="exp",
      effective_order=effective_order,
    ).score
    for one in sums
  ]
  np.testing.assert_allclose(
    bootstrap.bleu(np.stack(sums), effective_order), expected, atol=1e-9
  )
  assert (max(expected) > 0) == (effective_order or length[1] > 4)


@pytest.mark.parametrize("wrong", [0.3, 0.32, 0.5])
def test_one_run_each_is_sacrebleus_paired_bootstrap(monkeypatch, wrong):
  """With the draws that SacreBLEU makes, to the last of the resamples."""
  monkeypatch.setenv("SACREBLEU_SEED", "12345")
  references = sentences_of(120)
  _, scores = significance.PairedTest(
    [
      ("other", translated(references, 0.3)),
      ("system", translated(references, wrong, seed=1)),
    ],
    {"BLEU": sacrebleu.BLEU(references=[references])},
    references=None,
    test_type="bs",
    n_samples=300,
  )()
  other, system = scores["BLEU"]
  systems = [
    np.array([statistics(references, *made)], float)
    for made in ((wrong, 1), (0.3, 0))
  ]
  found = bootstrap.paired(*systems, bootstrap.draws(120, 300))
  assert found.p_value == system.p_value
  assert found.mean == pytest.approx(system.score - other.score)
  assert found.low < found.mean < found.high


def test_systems_and_runs_share_their_draws():
  """A mean over runs, antisymmetric, and 0 between a system and itself."""
  references = sentences_of(50)
  runs = [
    np.array(statistics(references, wrong), float) for wrong in (0.2, 0.4)
  ]
  both, swapped = np.stack(runs), np.stack(runs[::-1])
  drawn = bootstrap.draws(50, 200)
  assert drawn.shape == (200, 50)
  assert (drawn.sum(axis=1) == 50).all()
  np.testing.assert_array_equal(drawn, bootstrap.draws(50, 200))
  same = bootstrap.paired(both, swapped, drawn)
  np.testing.assert_allclose(same[:3], 0.0, atol=1e-12)
  assert bootstrap.paired(both, both, drawn) == (0.0, 0.0, 0.0, 1.0)
  one = bootstrap.paired(both[:1], both[1:], drawn)
  other = bootstrap.paired(both[1:], both[:1], drawn)
  assert other.mean == pytest.approx(-one.mean)
  assert other.low == pytest.approx(-one.high)
  assert other.p_value == one.p_value
  # (a + b) / 2 − b is half of a − b.
  half = bootstrap.paired(both, both[[1, 1]], drawn)
  np.testing.assert_allclose(half[:3], np.divide(one[:3], 2))


def test_the_interval_holds_the_quantiles_of_what_was_drawn():
  """Of 39 resamples all are within it; of 1,000, 950 are."""
  references = sentences_of(60)
  systems = [
    np.array([statistics(references, wrong)], float) for wrong in (0.2, 0.4)
  ]
  for resamples, outside in ((39, 0), (1000, 25)):
    drawn = bootstrap.draws(60, resamples)
    found = bootstrap.paired(*systems, drawn)
    ours, theirs = (bootstrap.bleu(drawn @ one[0]) for one in systems)
    below = np.sum(ours - theirs < found.low - 1e-9)
    above = np.sum(ours - theirs > found.high + 1e-9)
    assert below == above == outside


def judged_by_bleu():
  """Dense and linear translate, three seeds of one and two of the other."""
  metric, references, found = sacrebleu.BLEU(), sentences_of(40), []
  for attention, seeds, wrong in (
    ("dense", (0, 1, 2), 0.1),
    ("linear", (0, 1), 0.4),
    ("lsh", (5,), 0.6),
  ):
    for seed in seeds:
      outputs = translated(references, wrong, seed)
      final = {
        "step": 9,
        "split": "test_2016",
        "bleu": metric.corpus_score(outputs, [references]).score,
        "bleu_signature": "nrefs:1|eff:no|smooth:exp",
        "loss": 1.0,
      }
      found.append(
        {
          "task": "multi",
          "attention": attention,
          "seed": seed,
          "status": "done",
          "parameters": 1000,
          "arguments": [],
          "final": final,
          "history": [final],
          "sentences": statistics(references, wrong, seed),
        }
      )
  return found


def test_each_row_is_compared_with_the_best_over_common_seeds():
  found = judged_by_bleu()
  pairs = sentences.pairs(summary.summarize(found)["multi"])
  assert pairs.best.attention == "dense"
  linear, lsh = pairs.pairs
  assert (linear.row.attention, linear.seeds) == ("linear", 2)
  bleu = {(r["attention"], r["seed"]): r["final"]["bleu"] for r in found}
  expected = np.mean(
    [bleu["linear", seed] - bleu["dense", seed] for seed in (0, 1)]
  )
  assert linear.difference.mean == pytest.approx(expected)
  assert linear.difference.low < expected < linear.difference.high < 0
  # No seed of its own is one of the best row's.
  assert (lsh.seeds, lsh.difference) == (0, None)


def test_what_is_not_of_the_same_sentences_is_not_paired():
  found = judged_by_bleu()
  for run in found:
    if run["attention"] == "linear":
      run["sentences"] = run["sentences"][::-1]
  assert sentences.pairs(summary.summarize(found)["multi"]) is None


def test_no_table_without_sentences_or_bleu():
  found = judged_by_bleu()
  for run in found:
    del run["sentences"]
  assert sentences.pairs(summary.summarize(found)["multi"]) is None
  assert "paired over" not in latex.report(made_up.records())
  of_copy = summary.summarize(made_up.records())["copy"]
  assert sentences.pairs(of_copy) is None


def test_every_report_has_the_table_and_what_it_is():
  found = judged_by_bleu()
  of_task = summary.summarize(found)["multi"]
  pairs = sentences.pairs(of_task)
  text = markdown.report(found, {}, {})
  assert "paired over sentences: each row against dense" in text
  assert "sentences of the test_2016 split are drawn" in text
  row = re.search(r"`linear` +\| +2 \| +(−\S+) \| +\[(\S+), (\S+)\] \|", text)
  mean, low, high = (float(x.replace("−", "-")) for x in row.groups())
  assert low < mean < high < 0
  assert re.search(r"\| `lsh` +\| +0 \| +– \| +– \| +– \|", text)
  tables = latex.report(found)
  assert "% multi: BLEU, paired over sentences" in tables
  assert rf"\texttt{{linear}} & 2 & $-${-mean:.2f} & [$-$" in tables
  styles = style.styles(run["attention"] for run in found)
  markup = page.page(found, {}, {"multi": []}, [], styles)
  value = f'data-value="{pairs.pairs[0].difference.mean!r}"'
  assert f"<td {value}>−{-mean:.2f}</td>" in markup
  assert 'data-name="paired_p"' in markup
  assert "<code>dense</code> has the best mean BLEU" in markup
