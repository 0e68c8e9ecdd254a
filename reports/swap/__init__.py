"""The report of `swap.py`: a row a swapped model, a row a layer, one page."""
