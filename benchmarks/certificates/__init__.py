"""Plans from outside the search, held against the lower bounds of certificates; see `__main__.py`."""
