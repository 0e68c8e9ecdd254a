"""Tasks at the sizes of their papers."""
