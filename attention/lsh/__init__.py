"""LSH attention (Reformer): tokens of one hash bucket attend to each other.

`attention` is the public function, `hash` computes the buckets and their sorted
order, `chunks` says what a chunk reads and sees, `rounds` is the loop, and
`cache` decodes.
"""

from attention.lsh.attention import lsh, lsh_attention, lsh_rotations

__all__ = ["lsh", "lsh_attention", "lsh_rotations"]
