"""Settings of the whole suite: eight simulated devices, no silent broadcasting.

The environment is set before JAX is imported. With COMPILE=fully, programs are
compiled as users compile them, and the shapes in the annotations of `attention` are
checked in every test.
"""

import ctypes
import gc
import os
import pathlib
import re

from tests import compiling

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    *([] if compiling.FULLY else compiling.flags()),
  ]
)

import training  # noqa: F401 - adds the flag that every program has

import jax  # isort: skip
import jaxtyping
import pytest
from xdist.scheduler import LoadScopeScheduling

from settings import cache

jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiled programs are kept between runs of the suite, of any checkout: with them it
# takes two thirds of its time.
jax.config.update("jax_compilation_cache_dir", str(cache.folder("xla-tests")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# Checking the annotations takes as long as tracing: tests/attention/annotations.py
# calls every mechanism with every option for it.
if compiling.FULLY:
  jaxtyping.install_import_hook(["attention"], "beartype.beartype")

from attention import ATTENTIONS

from attention.platform import programs  # isort: skip  # isort: skip

# Programs are many objects that live long. With Python's own thresholds, looking
# through them again and again takes a tenth of the suite's time.
gc.freeze()
gc.set_threshold(100_000, 50, 100)

# Programs of single operations serve many files: a worker that forgets them after
# each file takes an eighth longer. Those of 25 files take 4.5 GB, so it forgets all
# at 2 GB. If it kept the memory, it would forget them after each later file.
_MOST_PAGES = 2 * 2**30 // os.sysconf("SC_PAGE_SIZE")


def pytest_addoption(parser):
  parser.addoption("--of", help="a mechanism: its own tests and its contract")


def pytest_configure(config):
  name = config.getoption("--of")
  if name and name not in ATTENTIONS:
    known = ", ".join(ATTENTIONS)
    raise pytest.UsageError(f"--of: expected one of {known}, got {name!r}")


def pytest_collection_modifyitems(config, items):
  """Leaves out tests of other mechanisms than that of `--of`."""
  name = config.getoption("--of")
  if name:
    items[:] = [item for item in items if _is_of(item, name)]


def _is_of(item, name):
  """Whether a test is in the file of a mechanism, or has it as a parameter."""
  parameters = getattr(item, "callspec", None)
  values = parameters.params.values() if parameters else ()
  named = {str(getattr(value, "name", value)) for value in values}
  named |= {getattr(value, "mechanism", None) for value in values}
  return item.path.stem == f"test_{name}" or name in named


class _Groups(LoadScopeScheduling):
  """Tests of a group share what they compile, so they stay on one worker.

  A group is a file, or a mechanism of the contract.
  """

  def _split_scope(self, nodeid):
    of_contract = re.match(r".*::test_contract\[\w+", nodeid)
    return of_contract[0] if of_contract else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
  return _Groups(config, log)


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
  """Frees what has been compiled, where a worker has grown by it."""
  yield
  resident = int(pathlib.Path("/proc/self/statm").read_text("utf-8").split()[1])
  if resident > _MOST_PAGES:
    jax.clear_caches()
    programs.clear_cache()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture(autouse=True)
def _trace_what_is_patched(request):
  """Keeps no program that was traced with a module's name replaced."""
  is_patched = "monkeypatch" in request.fixturenames
  if is_patched:
    programs.clear_cache()
  yield
  if is_patched:
    programs.clear_cache()


@pytest.fixture
def unchecked():
  """Lets a wrong argument through to the function's own checks."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
