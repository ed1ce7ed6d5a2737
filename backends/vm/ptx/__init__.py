"""PTX text to a syntax tree with names resolved."""
