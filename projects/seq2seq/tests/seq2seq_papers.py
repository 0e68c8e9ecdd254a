"""The recurrent models written from their papers: one sentence, loops, float64.

One layer, one head and a softmax tied to the target's table.
"""

import numpy as np


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def gru(p, x, h):
  def gate(name):
    return x @ p["i" + name]["kernel"] + p["i" + name]["bias"]

  r = sigmoid(gate("r") + h @ p["hr"]["kernel"])
  z = sigmoid(gate("z") + h @ p["hz"]["kernel"])
  n = np.tanh(gate("n") + r * (h @ p["hn"]["kernel"] + p["hn"]["bias"]))
  return (1 - z) * n + z * h


def lstm(p, x, state):
  c, h = state
  i, f, g, o = (
    x @ p["i" + k]["kernel"] + h @ p["h" + k]["kernel"] + p["h" + k]["bias"]
    for k in "ifgo"
  )
  c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
  return np.array([c, sigmoid(o) * np.tanh(c)])


def softmax(x):
  return np.exp(x) / np.exp(x).sum()


def readings(cell, encoder, words, state):
  """States after each word, in both directions."""
  found = []
  for name, order in (("forward_0", words), ("backward_0", words[::-1])):
    states = [state]
    for x in order:
      states.append(cell(encoder[name], x, states[-1]))
    found.append(states[1:])
  return found


def bahdanau(p, source, inputs):
  """Appendix A of the paper for one sentence, in loops and float64."""
  table, decoder = p["target_embedding"]["embedding"], p["decoder"]
  scale = table.shape[1] ** 0.5
  start = np.zeros(table.shape[1] // 2)
  forward, backward = readings(gru, p["encoder"], scale * table[source], start)
  annotations = np.concatenate([forward, backward[::-1]], axis=1)
  initial, attention = decoder["initial_0"], decoder["cross_attention"]
  attention = {name: k[0] for name, k in attention["attention"].items()}
  s = np.tanh(backward[-1] @ initial["kernel"] + initial["bias"])
  logits, alignments = [], []
  for word in inputs:
    e = scale * table[word]
    alpha = softmax(
      np.array(
        [
          attention["score_kernel"]
          @ np.tanh(s @ attention["query_kernel"] + h @ attention["key_kernel"])
          for h in annotations
        ]
      )
    )
    c = sum(a * h for a, h in zip(alpha, annotations, strict=True))
    s = gru(decoder["cells_0"], np.concatenate([e, c]), s)
    t = np.concatenate([s, c, e]) @ decoder["maxout"]["kernel"]
    t = (t + decoder["maxout"]["bias"]).reshape(-1, 2).max(axis=1)
    logits.append(table @ t)
    alignments.append(alpha)
  return np.array(logits), np.array(alignments)


def luong(p, source, inputs):
  """Section 3 of the paper, 'general', for one sentence."""
  table, decoder = p["target_embedding"]["embedding"], p["decoder"]
  scale = table.shape[1] ** 0.5
  start = np.zeros((2, table.shape[1] // 2))
  forward, backward = readings(lstm, p["encoder"], scale * table[source], start)
  annotations = np.concatenate([forward, backward[::-1]], axis=2)[:, 1]
  state = np.concatenate([forward[-1], backward[-1]], axis=1)
  fed = np.zeros(table.shape[1])
  kernel = decoder["cross_attention"]["attention"]["kernel"][0]
  logits, alignments = [], []
  for word in inputs:
    x = np.concatenate([scale * table[word], fed])
    state = lstm(decoder["cells_0"], x, state)
    alpha = softmax(np.array([state[1] @ kernel @ h for h in annotations]))
    c = sum(a * h for a, h in zip(alpha, annotations, strict=True))
    fed = np.concatenate([c, state[1]]) @ decoder["attentional"]["kernel"]
    fed = np.tanh(fed)
    logits.append(table @ fed)
    alignments.append(alpha)
  return np.array(logits), np.array(alignments)
