"""What recurrences are made of: scans, chunks, gates, feature maps, packed sequences."""
