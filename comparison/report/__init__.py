"""Tables, figures and HTML pages for readers."""
