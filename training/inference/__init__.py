"""Text generation with trained runs and published weights."""
