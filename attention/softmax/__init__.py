"""What softmax attention is made of: who sees whom, logits, tiles, caches, shards."""
