"""Damages files of runs and records, texts, images, weights and names."""

import functools
import json
import os
import pickle
import re
import shutil
import struct

import numpy as np
import PIL.Image
from safetensors.numpy import load_file

from comparison import archive, records
from comparison.report import files
import models
from settings.errors import ConfigError
from tests import commands
from tests.comparison import made_up
from tests.models.published.test_equality import changed
from tests.models.published.test_folders import _Trap
from tests.verification.campaign.faults import fault, one_line, require
from tests.verification.campaign.runs import compare, run_process, stopped_run


def damage(rng, path):
  """Flips a bit of a file, truncates it, empties it or deletes it."""
  content = bytearray(path.read_bytes())
  kind = rng.choice(["flipped", "cut", "emptied", "missing"])
  if kind == "missing":
    path.unlink()
  elif kind == "flipped" and content:
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    path.write_bytes(content)
  else:
    size = rng.integers(len(content)) if kind == "cut" and content else 0
    path.write_bytes(content[:size])
  return str(kind)


@fault(
  "a damaged file of a run",
  60,
  "named; the previous step is used; same digests",
)
def run_damaged(rng, folder):
  """Damages a checkpoint or the vocabulary of a run that stopped at step 8 of 12."""
  run = folder / "run"
  shutil.copytree(stopped_run(), run)
  parts = [run / "checkpoints", run / "vocabulary"]
  paths = [x for part in parts for x in [part, *sorted(part.rglob("*"))]]
  path = rng.choice([x for x in paths if x.is_file()])
  kind = damage(rng, path)
  code, _, error = run_process(run)
  where = f"{path.relative_to(run)} {kind}"
  if code:
    line = one_line(code, error)
    require(str(run) in line, where, line)
    return "refused"
  try:
    compare(run)
  except AssertionError as lost:
    raise AssertionError(f"{where}: {lost}; {error}") from lost
  return "the last step" if "corrupt" in error else "nothing"


@functools.cache
def packed_comparison():
  """Returns a packed comparison of this repository, and its records."""
  path = commands.ROOT / "docs" / "results" / "s3.jsonl.xz"
  return path, archive.read(path)


@fault("a damaged record of a comparison", 40, "ignored, never read as another")
def record_damaged(rng, folder):
  """Damages one record, or the packed file of all records."""
  path, expected = packed_comparison()
  if rng.random() < 0.5:
    copy = folder / path.name
    shutil.copy(path, copy)
    damage(rng, copy)
    try:
      records_read = archive.read(copy)
    except ConfigError as error:
      require("\n" not in str(error), error)
      return "refused"
    require(records_read == expected, "other records")
    return ""
  archive.unpack(path, folder / "all")
  before = records.by_identity(folder / "all")
  path = rng.choice(sorted((folder / "all" / records.RECORDS).glob("*.json")))
  kind = damage(rng, path)
  after = records.by_identity(folder / "all")
  before = {x: before[x] for x in before if x in after or x != path.stem}
  require(after == before, f"{path.name} {kind} is read as another record")
  return "one record" if path.stem not in after else "nothing"


def refusal(folder, *flags):
  """Returns the line by which training refuses its data, or an empty text."""
  workdir = f"--workdir={folder / 'run'}"
  code, _, error = commands.run("train.py", *flags, workdir)
  return one_line(code, error, [2]) if code else ""


@fault("an invalid text", 40, "one line, or read as documented")
def text(rng, folder):
  size = 10 ** int(rng.integers(1, 6)) if rng.random() < 0.95 else 10**8
  words = rng.choice(
    [b"the ", b"of ", b"cat\n", "süß ".encode()], size // 4 + 1
  )
  content = {
    "empty": b"",
    "binary": rng.bytes(min(size, 10**6)),
    "one line": b"".join(words).replace(b"\n", b" "),
    "CRLF": b"".join(words).replace(b"\n", b"\r\n"),
    "invalid": b"".join(words)[: size // 2] + b"\xff\xfe" + b"".join(words),
    "zeros": b"\0" * size,
  }
  kind = rng.choice([*content])
  (folder / "text").write_bytes(content[kind])
  line = refusal(
    folder,
    "--config=configs/text.py",
    f"--config.task.path={folder / 'text'}",
    *commands.flags({"log_every": 2, "batch_size": 8, "model": commands.SMALL}),
    *commands.flags({"num_steps": 2, "eval_every": 2, "checkpoint_every": 2}),
  )
  require(not line or "config.task" in line or str(folder) in line, kind, line)
  return f"{kind}: {'refused' if line else 'read'}"


@fault("an invalid image", 30, "one line that names the file, or read")
def image(rng, folder):
  for label in "ab":
    (folder / "images" / label).mkdir(parents=True)
    for i in range(3):
      pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
      picture = PIL.Image.fromarray(pixels)
      picture.save(folder / "images" / label / f"{i}.png")
  path = folder / "images" / "a" / "1.png"
  kind = rng.choice(["file", "1", "L", "P", "RGBA", "CMYK", "I;16", "LA", "F"])
  if kind == "file":
    damage(rng, path)
  elif kind in ("CMYK", "F"):
    picture.convert(kind).save(path, "TIFF" if kind == "F" else "JPEG")
  else:
    picture.convert("L" if kind == "I;16" else "RGB").convert(kind).save(path)
  line = refusal(
    folder,
    "--config=configs/vit.py",
    "--config.task.source=folder",
    f"--config.task.path={folder / 'images'}",
    *commands.flags({"num_steps": 1, "eval_every": 1, "batch_size": 2}),
    *commands.flags({"model": {"num_layers": 1, "patch_size": 4}}),
  )
  require(not line or str(folder / "images") in line, kind, line)
  return f"{kind}: {'refused' if line else 'read'}"


@fault(
  "a folder of weights",
  60,
  "refused by name; nothing unpickled, or read outside the folder",
)
def weights(rng, folder):
  bert = changed("bert_masked", folder / "bert")
  outside = folder / "outside.safetensors"
  path, secret = bert / "model.safetensors", folder / "trap"
  names = sorted(load_file(path))
  name, other = rng.choice(names, 2, replace=False)
  shutil.copy(path, outside)

  def index(file):
    path.unlink()
    content = {"weight_map": dict.fromkeys(names, file)}
    (bert / "model.safetensors.index.json").write_text(json.dumps(content))

  def huge_header():
    path.write_bytes(struct.pack("<Q", 2 ** int(rng.integers(20, 63))) + b"{")

  def pickle_file():
    path.unlink()
    (bert / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap(secret)))

  def symlink():
    path.unlink()
    path.symlink_to(outside)

  def duplicate():
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + size].replace(
      f'"{other}"'.encode(), f'"{name}"'.encode()
    )
    path.write_bytes(
      struct.pack("<Q", len(header)) + header + content[8 + size :]
    )

  def replace_tensor(value):
    changed("bert_masked", bert, lambda x: x.update({name: value(x[name])}))

  corruptions = {
    "pickle": pickle_file,
    "index outside": lambda: index("../outside.safetensors"),
    "absolute index": lambda: index(str(outside)),
    "huge header": huge_header,
    "not a number": lambda: replace_tensor(lambda x: np.full_like(x, np.nan)),
    "integers": lambda: replace_tensor(lambda x: np.ones(x.shape, np.int64)),
    "another shape": lambda: replace_tensor(
      lambda x: np.ones((*x.shape, 2), x.dtype)
    ),
    "twice": duplicate,
    "link outside": symlink,
    "config": lambda: changed(
      "bert_masked", bert, hidden_size=int(rng.integers(-5, 10**9))
    ),
  }
  kind = rng.choice([*corruptions])
  corruptions[kind]()
  try:
    models.load_pretrained(bert)
  except (ValueError, FileNotFoundError) as error:
    require(str(error).startswith(str(folder)), kind, error)
    require("\n" not in str(error), kind, error)
  else:
    raise AssertionError(f"{kind}: loaded")
  require(not secret.exists(), f"{kind}: unpickled")
  return ""


_MARKUP = (
  "<script>alert(1)</script>",
  "</style><b>",
  '"><img src=x onerror=alert(1)>',
  "\\input{/etc/passwd}",
  "$x_1^2$ & 100 % #1 ~",
  "{{ 7 * 7 }}",
  "a | b ` c",
)


@fault("names and texts with markup", 20, "escaped; nothing is executed")
def markup(rng, folder):
  """Adds markup to two texts of every record of a comparison."""
  text = str(rng.choice(_MARKUP))
  found = made_up.records(with_seconds=False)
  for record in found:
    for field in rng.choice(["attention", "task", "reason"], 2, replace=False):
      record[field] = f"{record[field]} {text}"
  shared = {"tasks": f"copy{text}", "match_parameters": True}
  (folder / records.COMPARISON).write_text(json.dumps(shared))
  made_up.write(folder, found, made_up.scaling())
  files.write(folder)
  page = (folder / "report.html").read_text()
  tex = (folder / "report.tex").read_text()
  for raw in ("<script>alert", "</style><b>", "<img src=x", " 49 "):
    require(raw not in page, raw, page[max(page.find(raw) - 200, 0) :][:400])
  require("\\input" not in tex.replace("\\textbackslash", ""), tex)
  bare = re.search(r"(?<!\\)[#%^]|(?<!\\)_", re.sub(r"\$\\approx\$", "", tex))
  require(
    not bare, "not escaped:", bare and tex[max(bare.start() - 80, 0) :][:160]
  )
  outside = [x for x in os.listdir(folder.parent) if "passwd" in x]
  require(not outside, outside)
  return ""
