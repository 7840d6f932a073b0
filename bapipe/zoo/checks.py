"""Checks of the arguments of factories."""


def check_sizes(**sizes: object) -> None:
    """Raises ValueError unless every size is an integer of at least 1; a factory's caller may be a command line."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} is {size!r}; want an integer of at least 1")
