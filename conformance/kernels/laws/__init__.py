"""Laws that every kernel keeps, and Hypothesis looking for shapes that break them."""
