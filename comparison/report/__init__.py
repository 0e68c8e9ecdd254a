"""Tables, figures and pages for readers."""
