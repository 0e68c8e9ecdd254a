"""Tables and tests of what runs found."""
