"""LSH attention (Reformer): tokens that hash alike attend to each other.

`attention` is the public function, `hash` the buckets and their sorted order,
`chunks` what a chunk reads and sees, `rounds` the loop, `cache` decoding.
"""

from attention.lsh.attention import lsh, lsh_attention, lsh_rotations

__all__ = ["lsh", "lsh_attention", "lsh_rotations"]
