"""The parts of softmax attention: visibility, logits, tiles, caches and shards."""
