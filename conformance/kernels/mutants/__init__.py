"""A check must notice each kernel with one thing changed."""
