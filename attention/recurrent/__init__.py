"""Parts of recurrences: scans, chunks, gates, feature maps, packed sequences."""
