"""Damages a checkpoint."""


def flip_a_byte(workdir, step):
  """Flips a byte of the largest file of a step, which has the data."""
  files = (workdir / "checkpoints" / str(step)).rglob("*")
  largest = max(
    (f for f in files if f.is_file()), key=lambda f: f.stat().st_size
  )
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)
