"""megamoe: one matrix of shapes, two kernel backends, one reference, and a verdict for every cell."""
