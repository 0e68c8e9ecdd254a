"""Settings of the whole suite: eight simulated devices, no silent broadcasting.

The environment is set before JAX is imported; the shapes in the annotations of
`attention` are checked at run time.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiled programs are kept between runs of the suite.
jax.config.update(
  "jax_compilation_cache_dir",
  os.path.join(os.path.dirname(__file__), "..", ".cache", "xla-tests"),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

jaxtyping.install_import_hook(["attention"], "beartype.beartype")


@pytest.fixture
def unchecked():
  """Lets a wrong argument through to the function's own checks."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
