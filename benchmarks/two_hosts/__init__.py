"""Two hosts with a slow link between them, on one machine."""
