"""Laws that every kernel keeps, held on shapes that Hypothesis draws to break them."""
