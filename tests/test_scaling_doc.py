"""The commands, the scripts and the tables of docs/scaling.md and of SLURM."""

import pathlib
import re
import shutil
import subprocess

import pytest
import yaml

from attention import ATTENTIONS
from attention import mechanism as mechanisms
from training.devices import cluster, mesh

_DOCS = pathlib.Path(__file__).parent.parent / "docs"
_TEXT = (_DOCS / "scaling.md").read_text("utf-8")


def _block(first):
  """The indented block that begins with a line."""
  lines = _TEXT.splitlines()
  start = lines.index(f"    {first}")
  found = []
  for line in lines[start:]:
    if line and not line.startswith("    "):
      break
    found.append(line[4:])
  return "\n".join(found)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_slurm_script_is_one():
  page = (_DOCS / "howto" / "slurm.md").read_text("utf-8")
  script = re.findall(r"```bash\n(.*?)```", page, flags=re.DOTALL)[0]
  subprocess.run(["bash", "-n"], input=script, text=True, check=True)
  options = re.findall(r"^#SBATCH --([\w-]+)", script, re.M)
  assert {"nodes", "ntasks-per-node", "requeue", "signal"} <= set(options)
  assert "srun python train.py" in script


def test_the_kubernetes_job_is_indexed():
  job = yaml.safe_load(_block("apiVersion: batch/v1"))
  spec = job["spec"]
  assert spec["completionMode"] == "Indexed"
  assert spec["completions"] == spec["parallelism"] > 1
  pod = spec["template"]["spec"]
  # What `jax.distributed` reads of such a job.
  assert pod["subdomain"] == job["metadata"]["name"]
  (container,) = pod["containers"]
  assert container["command"][:2] == ["python", "train.py"]
  names = {volume["name"] for volume in pod["volumes"]}
  assert {mount["name"] for mount in container["volumeMounts"]} <= names


def test_commands_set_fields_that_exist():
  used = set(re.findall(r"--config\.mesh\.(\w+)", _TEXT))
  assert used <= set(mesh.AXES)
  for axis in mesh.AXES:
    assert f"| `{axis}` |" in _TEXT


def test_the_page_names_what_can_be_sequence_sharded():
  able = mechanisms.supporting(ATTENTIONS, "sequence")
  start = _TEXT.index("## Context parallelism")
  part = _TEXT[start : _TEXT.index("## Several processes")]
  table, rest = part.split("cannot be sequence-sharded yet")[0].rsplit(
    "\n\n", 1
  )
  assert set(re.findall(r"`(\w+)`", rest)) == set(ATTENTIONS) - set(able)
  rows = "\n".join(line for line in table.splitlines() if line[:1] == "|")
  assert set(re.findall(r"`(\w+)`", rows)) == set(able)


def test_schedulers_are_recognised(monkeypatch):
  names = [name for name, _ in cluster._RECOGNISED]
  for name in (*names, "KUBERNETES_SERVICE_HOST"):
    monkeypatch.delenv(name, raising=False)
  assert not cluster._is_scheduled()
  for name, alone, several in (
    ("SLURM_STEP_NUM_TASKS", "1", "4"),
    ("OMPI_COMM_WORLD_SIZE", "1", "2"),
    ("TPU_WORKER_HOSTNAMES", "host", "host0,host1"),
  ):
    monkeypatch.setenv(name, alone)
    assert not cluster._is_scheduled()
    monkeypatch.setenv(name, several)
    assert cluster._is_scheduled()
    monkeypatch.delenv(name)
  monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
  assert not cluster._is_scheduled()
  monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
  assert cluster._is_scheduled()
