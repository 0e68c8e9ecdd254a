"""Pictures of a model's attention."""
