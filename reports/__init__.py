"""The report of a comparison: tables, plots, and one page that holds both."""
